"""One step function for every layout: each trains to the losses of a single device, within rounding."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from small import small

from sharder.config import OptimizerConfig, ParallelConfig, RunConfig
from sharder.data.loader import read_step
from sharder.data.open import open_datasets
from sharder.data.order import Order
from sharder.train.evaluation import evaluate, make_eval_step
from sharder.train.setup import prepare
from sharder.train.state import create_state
from sharder.train.step import compile_step, stop_flags, stop_sharding

STEPS = 20
ONE = ParallelConfig(policy="dp")


def train(config: RunConfig, num_devices: int = 8) -> np.ndarray:
    """The losses of STEPS steps, and of the held-out examples after them."""
    setup = prepare(config, jax.devices()[:num_devices])
    training, validation = open_datasets(config)
    order = Order(len(training), config.train.global_batch_size, 0, config.data.shuffle_rounds)
    state = create_state(config, setup.declared, setup.state_shardings)
    seed = jax.device_put(np.uint32(0), setup.replicated())
    stop, halted = stop_flags(setup.mesh, False), jax.device_put(np.bool_(False), setup.replicated())
    step, losses = None, []
    for number in range(STEPS):
        batch = setup.batch.to_devices(read_step(training, order, setup.batch, number))
        step = step or compile_step(setup, (state, batch, seed, stop, halted))
        state, metrics = step(state, batch, seed, stop, halted)
        losses.append(float(metrics["loss"]))
    return np.array([*losses, evaluate(make_eval_step(setup), state.params, validation, setup)[0]])


def optimized_by(name: str) -> RunConfig:
    optimizer = OptimizerConfig(name=name, learning_rate=3e-3, warmup_steps=5, decay_steps=100, factored_min_dim=32)
    return replace(small(), optimizer=optimizer)


@cache
def single(name: str) -> np.ndarray:
    found = train(replace(optimized_by(name), parallel=ONE), 1)
    assert found[-2] < found[0] - 0.3  # it learns
    return found


def agrees(name: str, policy: str, tensor: int) -> None:
    found = train(replace(optimized_by(name), parallel=ParallelConfig(policy=policy, tensor=tensor)))
    np.testing.assert_allclose(found, single(name), rtol=0, atol=1e-5)


def test_fsdp_with_tensor_parallelism_trains_as_one_device():
    agrees("adamw", "fsdp", 2)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("policy", ["dp", "zero", "fsdp"])
def test_every_policy_and_tensor_degree_trains_as_one_device(policy, tensor):
    agrees("adamw", policy, tensor)


@pytest.mark.slow
def test_an_optimizer_of_matrices_trains_under_fsdp_as_on_one_device():
    agrees("adafactor", "fsdp", 1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dp", "zero", "fsdp"])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_every_optimizer_and_policy_trains_as_one_device(name, policy):
    agrees(name, policy, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_optimizers_of_matrices_agree_under_tensor_parallelism(name):
    agrees(name, "fsdp", 2)


def test_the_compiled_step_does_not_grow_with_depth():
    def num_lines(num_layers: int) -> int:
        config = replace(small(), parallel=ONE, model=replace(small().model, num_layers=num_layers))
        setup = prepare(config, jax.devices()[:1])
        state = create_state(config, setup.declared, setup.state_shardings)
        batch = setup.batch.abstract({k: np.zeros((1, 32), np.int32) for k in ("inputs", "targets")})
        seed = jax.device_put(np.uint32(0), setup.replicated())
        stop = jax.device_put(np.zeros(1, np.int32), stop_sharding(setup.mesh))
        halted = jax.device_put(np.bool_(False), setup.replicated())
        return len(compile_step(setup, (state, batch, seed, stop, halted)).as_text().splitlines())

    assert num_lines(6) == pytest.approx(num_lines(3), rel=0.02)

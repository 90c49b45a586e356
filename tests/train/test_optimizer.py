from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharder import recipes
from sharder.config import MlpConfig, OptimizerConfig, RunConfig, TrainConfig
from sharder.models.build import declare, flatten, initial_params, unflatten
from sharder.train.optimizer import clipped, decay_mask, global_norm, moving_average, schedule, to_float32
from sharder.train.state import TrainState, declare_state, initial_state
from sharder.train.step import apply_update

MODEL = MlpConfig(input_dim=3, hidden_dim=5, num_layers=2, output_dim=2)
OPTIMIZER = OptimizerConfig(
    learning_rate=0.02, initial_lr_fraction=0.2, warmup_steps=4, decay_steps=20, final_lr_fraction=0.1,
    b1=0.8, b2=0.9, eps=1e-4, weight_decay=0.3, clip_norm=1.5,
)  # fmt: skip
CONFIG = RunConfig(model=MODEL, optimizer=OPTIMIZER, train=TrainConfig(ema_decay=0.75))
STEPS = 6


def config_of(dtype: str) -> RunConfig:
    return replace(CONFIG, model=replace(MODEL, param_dtype=dtype))


def draw_gradients(dtype: str) -> list[dict]:
    """Flat, one tree for each step; the even ones are clipped, the odd ones not."""
    rng, decls = np.random.default_rng(0), declare(MODEL).params
    draw = lambda shape, size: np.asarray(jnp.asarray(size * rng.standard_normal(shape), dtype))  # noqa: E731
    return [{p: draw(d.shape, 0.1 if step % 2 else 0.9) for p, d in decls.items()} for step in range(STEPS)]


@cache
def run(dtype: str) -> list[TrainState]:
    """The states from the first to that after STEPS updates."""
    config = config_of(dtype)
    setup = SimpleNamespace(config=config, declared=declare(config.model))
    states = [jax.jit(lambda: initial_state(config, setup.declared, initial_params(config.model, jax.random.key(0))))()]
    update = jax.jit(lambda state, grads: apply_update(setup, state, grads, global_norm(grads)))
    for grads in draw_gradients(dtype):
        states.append(update(states[-1], unflatten(grads)))
    return states


@cache
def reference(dtype: str) -> list[dict]:
    """Parameters after each step by AdamW in float64 (arXiv:1711.05101, algorithm 2); parameters rounded to `dtype`."""
    o = OPTIMIZER
    w = {p: np.asarray(x, np.float64) for p, x in flatten(run(dtype)[0].params).items()}
    first, second = ({p: np.zeros(x.shape) for p, x in w.items()} for _ in range(2))
    trajectory = [w]
    for step, grads in enumerate(draw_gradients(dtype)):
        g = {p: x.astype(np.float64) for p, x in grads.items()}
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        if step < o.warmup_steps:
            first_rate = o.learning_rate * o.initial_lr_fraction
            rate = first_rate + (o.learning_rate - first_rate) * step / o.warmup_steps
        else:
            done = (step - o.warmup_steps) / (o.decay_steps - o.warmup_steps)
            low = o.learning_rate * o.final_lr_fraction
            rate = low + (o.learning_rate - low) * 0.5 * (1 + np.cos(np.pi * done))
        w = dict(w)
        for p in w:
            scaled = g[p] * min(1, o.clip_norm / norm)
            first[p] = o.b1 * first[p] + (1 - o.b1) * scaled
            second[p] = o.b2 * second[p] + (1 - o.b2) * scaled**2
            corrected = first[p] / (1 - o.b1 ** (step + 1)), second[p] / (1 - o.b2 ** (step + 1))
            decay = o.weight_decay * w[p] if p.endswith("kernel") else 0
            new = w[p] - rate * (corrected[0] / (np.sqrt(corrected[1]) + o.eps) + decay)
            w[p] = np.asarray(jnp.asarray(new, dtype), np.float64) if dtype == "bfloat16" else new
        trajectory.append(w)
    return trajectory


def test_pi0_begins_as_its_original_does():
    """At peak / (warm-up + 1)."""
    o = recipes.load_recipe("pi0").optimizer
    assert float(schedule(o)(0)) == pytest.approx(2.5e-5 / 1001) and float(schedule(o)(1000)) == pytest.approx(2.5e-5)


def test_gradients_of_the_test_are_clipped_and_not():
    norms = [float(global_norm(grads)) for grads in draw_gradients("float32")]
    assert min(norms[::2]) > OPTIMIZER.clip_norm > max(norms[1::2])


def test_updates_are_adamw_with_clipping_decay_and_warm_up():
    for state, expected in zip(run("float32"), reference("float32")):
        for path, value in flatten(state.params).items():
            np.testing.assert_allclose(value, expected[path], rtol=1e-5, atol=1e-7, err_msg=f"{path}, step {state.step}")


def test_bfloat16_parameters_are_updated_by_adamw_and_rounded():
    for state, expected in zip(run("bfloat16"), reference("bfloat16")):
        for path, value in flatten(state.params).items():
            # One unit in the last place, 2**-8, where float32 and float64 fall on two sides of a tie.
            np.testing.assert_allclose(np.asarray(value, np.float64), expected[path], rtol=2**-7, atol=1e-4, err_msg=path)


@pytest.mark.parametrize("index", [0, -1], ids=["born", "updated"])
def test_moments_and_average_of_bfloat16_parameters_are_float32(index):
    state = run("bfloat16")[index]
    adam = state.opt_state[0]
    assert {x.dtype for x in jax.tree.leaves((adam.mu, adam.nu, state.ema))} == {np.dtype(np.float32)}
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}


def test_step_counts_completed_updates():
    assert [int(state.step) for state in run("float32")] == list(range(STEPS + 1))


def test_the_average_follows_the_new_parameters():
    states = run("float32")
    expected = {p: np.asarray(x, np.float64) for p, x in flatten(states[0].params).items()}
    for state in states[1:]:
        expected = {p: 0.75 * expected[p] + 0.25 * np.asarray(x) for p, x in flatten(state.params).items()}
    for path, value in flatten(states[-1].ema).items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-5, atol=1e-7, err_msg=path)


def test_no_average_is_kept_unless_asked_for():
    config = replace(CONFIG, train=TrainConfig())
    assert declare_state(config, declare(MODEL)).ema is None


def test_average_of_bfloat16_parameters_is_exact_in_float32():
    found = moving_average({"w": jnp.float32([1.0])}, {"w": jnp.array([2.0], jnp.bfloat16)}, 0.9)["w"]
    assert found.dtype == jnp.float32 and found[0] == pytest.approx(1.1, rel=1e-6)


TINY_LM_DECAYS = {
    "embed/tokens",
    "blocks/q",
    "blocks/k",
    "blocks/v",
    "blocks/attn_out",
    "blocks/mlp_in",
    "blocks/mlp_out",
    "head/out",
}


@pytest.mark.parametrize(
    "name, decayed",
    [
        ("tiny_lm", TINY_LM_DECAYS),
        ("gpt", TINY_LM_DECAYS - {"head/out"}),
        ("mlp", {"first/kernel", "blocks/kernel", "last/kernel"}),
    ],
)
def test_matrices_decay_and_nothing_else(name, decayed):
    mask = flatten(decay_mask(declare(recipes.load_recipe(name).model)))
    assert {path for path, decays in mask.items() if decays} == decayed


def test_the_mask_has_an_entry_for_every_parameter():
    declared = declare(recipes.load_recipe("tiny_lm").model)
    assert set(flatten(decay_mask(declared))) == set(declared.params)


GRADIENTS = {"a": jnp.array([3.0, -0.0, 1e-30]), "b": jnp.array([[4.0, 0.1]])}


def test_global_norm_is_that_of_all_leaves_together():
    assert float(global_norm(GRADIENTS)) == pytest.approx(np.sqrt(9 + 16 + 0.01), rel=1e-6)


def test_global_norm_of_bfloat16_is_summed_in_float32():
    # 256 squares of 1: in bfloat16 the sum would stop at 256.
    assert float(global_norm({"a": jnp.ones(1024, jnp.bfloat16)})) == 32


@pytest.mark.parametrize("clip_norm", [None, 6.0, float(global_norm(GRADIENTS))], ids=["off", "larger", "equal"])
def test_gradients_within_the_limit_keep_their_bits(clip_norm):
    found = jax.jit(lambda g: clipped(g, global_norm(GRADIENTS), clip_norm))(GRADIENTS)
    assert all(np.asarray(found[k]).tobytes() == np.asarray(GRADIENTS[k]).tobytes() for k in GRADIENTS)


def test_clipped_gradients_have_the_limit_as_norm_and_their_direction():
    found = clipped(GRADIENTS, global_norm(GRADIENTS), 0.5)
    assert float(global_norm(found)) == pytest.approx(0.5, rel=1e-6)
    assert float(found["b"][0, 0] / found["a"][0]) == pytest.approx(4 / 3, rel=1e-6)


def test_gradients_of_norm_zero_stay_zero():
    zeros = {"a": jnp.zeros(3)}
    assert clipped(zeros, global_norm(zeros), 1.0)["a"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_clipped_gradients_are_float32(clip_norm):
    narrow = to_float32(GRADIENTS) | {"a": GRADIENTS["a"].astype(jnp.bfloat16)}
    assert {x.dtype for x in clipped(narrow, jnp.float32(5), clip_norm).values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("step, rate", [(0, 0.004), (2, 0.012), (4, 0.02), (12, 0.011), (20, 0.002), (10**6, 0.002)])
def test_schedule_rises_from_its_first_rate_to_the_peak_and_falls_to_its_fraction(step, rate):
    assert float(schedule(OPTIMIZER)(step)) == pytest.approx(rate, rel=1e-6)


def test_schedule_without_warm_up_starts_at_the_peak():
    assert float(schedule(replace(OPTIMIZER, warmup_steps=0))(0)) == pytest.approx(0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_declared_state_is_that_of_the_first_step(dtype):
    declared, born = declare_state(config_of(dtype), declare(config_of(dtype).model)), run(dtype)[0]
    assert jax.tree.structure(declared) == jax.tree.structure(born)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(declared)] == [(x.shape, x.dtype) for x in jax.tree.leaves(born)]

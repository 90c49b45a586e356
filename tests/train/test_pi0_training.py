"""pi0 through both engines: policies and placements agree, frozen parameters stay as they are."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from small import needs_tested_jax
from small_pi0 import small_pi0, take_steps

from sharder.models.build import declare, flatten, initial_params

DEVICES = jax.devices()


@pytest.fixture
def on_devices(monkeypatch):
    """As if there were only the first n devices."""

    def limit(n):
        monkeypatch.setattr(jax, "devices", lambda *_: DEVICES[:n])
        monkeypatch.setattr(jax, "device_count", lambda *_: n)
        monkeypatch.setattr(jax, "local_device_count", lambda *_: n)

    return limit


def placed(**parallel):
    config = small_pi0()
    return replace(config, parallel=replace(config.parallel, **parallel))


PLACEMENTS = {1: "zero", 2: "fsdp", 4: "dp", 8: "fsdp"}


@pytest.mark.parametrize("replicas", [(1, 8), pytest.param((1, 2, 4, 8), marks=pytest.mark.slow)], ids=["1 and 8", "all"])
@needs_tested_jax  # its moving average is refused with 0.12
def test_exact_mode_gives_the_same_bits_on_any_number_of_replicas(on_devices, replicas):
    found = []
    for number in replicas:
        on_devices(number)
        found.append(take_steps(placed(reduction="exact", policy=PLACEMENTS[number]), 3)[0])
    assert all(f == found[0] for f in found) and len({fingerprint for _, fingerprint in found[0]}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("policy", ["dp", "zero", "fsdp"])
def test_policies_and_tensor_degrees_agree(on_devices, policy, tensor):
    on_devices(1)
    alone = take_steps(placed(), 4)[0]
    on_devices(8)
    divided = take_steps(placed(policy=policy, tensor=tensor), 4)[0]
    np.testing.assert_allclose([loss for loss, _ in divided], [loss for loss, _ in alone], rtol=1e-5)


def frozen(freeze, **parallel):
    """With low-rank additions where the preset is about them."""
    config = placed(**parallel)
    rank = 4 if "lora" in freeze else 0
    experts = {name: replace(getattr(config.model, name), lora_rank=rank) for name in ("backbone", "action_expert")}
    return replace(config, model=replace(config.model, freeze=freeze, **experts))


def agree_when_frozen(on_devices, freeze, placements, steps):
    """The run over these (policy, data, fsdp, tensor), asserted to be the same in bits at every step."""
    found = []
    for policy, data, fsdp, tensor, memory in placements:
        on_devices(data * fsdp * tensor)
        parallel = {"policy": policy, "data": data, "fsdp": fsdp, "tensor": tensor, "exact_memory": memory}
        found.append(take_steps(frozen(freeze, reduction="exact", **parallel), steps)[0])
    assert all(f == found[0] for f in found), found
    assert len({fingerprint for _, fingerprint in found[0]}) == steps


@needs_tested_jax
def test_exact_mode_gives_the_same_bits_with_frozen_parameters(on_devices):
    agree_when_frozen(on_devices, "vision", [("zero", 1, 1, 1, "copy"), ("fsdp", 1, 2, 1, "copy")], 2)


COPIES = [
    (policy, *mesh, 1, "copy") for policy in ("dp", "zero", "fsdp") for mesh in ((1, 1), (1, 2), (2, 2), (2, 4), (1, 8), (8, 1))
]
TENSOR = [("fsdp", 1, 1, 2, "copy"), ("zero", 2, 2, 2, "copy")]
LEAN = [("fsdp", 1, 2, 1, "lean"), ("fsdp", 2, 2, 1, "lean"), ("fsdp", 1, 8, 1, "lean")]


@pytest.mark.slow
@pytest.mark.parametrize("placements", [COPIES, TENSOR, LEAN], ids=["copies", "tensor", "lean"])
@pytest.mark.parametrize("freeze", ["vision-and-backbone", "language-but-lora"])
@needs_tested_jax
def test_the_full_matrix_with_frozen_parameters(on_devices, freeze, placements):
    agree_when_frozen(on_devices, freeze, placements, 4)


@pytest.mark.slow
def test_a_worker_computes_and_sums_gradients_of_trained_parameters_only(on_devices):
    from sharder.train.abstract import abstract_arguments
    from sharder.train.exact import ExactStep
    from sharder.train.setup import prepare

    on_devices(2)
    config = frozen("vision-and-backbone", reduction="exact", policy="fsdp")
    setup = prepare(config)
    step = ExactStep(setup, setup.workers, abstract_arguments(setup))
    trained = sum(4 * np.prod(d.shape) for d in setup.declared.trained.params.values())
    size = {name: step.programs[name].memory_analysis().output_size_in_bytes for name in ("worker", "reduce", "mean")}
    scalars = 2000  # tuples of pointers, losses and digests
    assert 0 <= size["worker"] - trained < scalars
    # Leaves too small to divide are whole.
    assert all(trained / 2 <= size[name] < 1.1 * trained / 2 + scalars for name in ("reduce", "mean")), (size, trained)


@pytest.mark.parametrize("reduction", ["fast", pytest.param("exact", marks=pytest.mark.slow)])
def test_frozen_parameters_stay_and_the_others_move(on_devices, reduction):
    on_devices(2)
    config = frozen("vision", policy="fsdp", reduction=reduction)
    _, state = take_steps(config, 3)
    fresh = flatten(jax.jit(lambda: initial_params(config.model, jax.random.key(config.train.seed)))())
    moved = {p for p, x in flatten(state.params).items() if not np.array_equal(x, fresh[p])}
    stay = declare(config.model).frozen
    # What the backbone's last norm makes is read by nothing.
    assert moved == set(fresh) - stay - {"llm/backbone/final_norm/scale"} and all(
        str(flatten(state.params)[p].dtype) == "bfloat16" for p in stay
    )


def test_frozen_parameters_have_no_optimizer_state_and_no_average():
    from sharder.train.state import by_path, declare_state

    config = frozen("vision")
    state = by_path(declare_state(config, declare(config.model)))
    assert not any("vision" in path for path in state if not path.startswith("params/"))
    assert any("llm/tokens" in path for path in state if path.startswith("opt_state"))

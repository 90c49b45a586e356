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


def test_frozen_parameters_stay_and_the_others_move(on_devices):
    on_devices(2)
    config = placed(policy="fsdp")
    config = replace(config, model=replace(config.model, freeze="vision"))
    _, state = take_steps(config, 3)
    fresh = flatten(jax.jit(lambda: initial_params(config.model, jax.random.key(config.train.seed)))())
    moved = {p for p, x in flatten(state.params).items() if not np.array_equal(x, fresh[p])}
    frozen = declare(config.model).frozen
    # What the backbone's last norm makes is read by nothing.
    assert moved == set(fresh) - frozen - {"llm/backbone/final_norm/scale"} and all(
        str(flatten(state.params)[p].dtype) == "bfloat16" for p in frozen
    )


def test_frozen_parameters_have_no_optimizer_state_and_no_average():
    from sharder.train.state import by_path, declare_state

    config = placed()
    config = replace(config, model=replace(config.model, freeze="vision"))
    state = by_path(declare_state(config, declare(config.model)))
    assert not any("vision" in path for path in state if not path.startswith("params/"))
    assert any("llm/tokens" in path for path in state if path.startswith("opt_state"))

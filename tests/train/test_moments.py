"""Moments in fewer bits: what a step makes of them against float64, where they stand still, and what they weigh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import needs_tested_jax, small, small_dropout

from sharder.config import LARGEST_DECAY, MOMENT_BYTES, MlpConfig, OptimizerConfig, UserError
from sharder.models.build import declare, flatten, unflatten
from sharder.sharding.blocks import BLOCK
from sharder.train.abstract import abstract_arguments
from sharder.train.exact import compile_finish
from sharder.train.fingerprint import combine
from sharder.train.kept import Kept
from sharder.train.moments import CODES, scale_by_narrow_adam
from sharder.train.setup import prepare
from sharder.train.state import by_path, create_state, declare_state
from sharder.train.step import stop_sharding

PATH = "blocks/kernel"
DECLARED = declare(MlpConfig(input_dim=32, hidden_dim=32, num_layers=1, output_dim=32))
SHAPE = DECLARED.params[PATH].shape
STEPS = 600
KINDS = ("bfloat16", "int8")


def rule(moments: str, b1: float, b2: float, eps: float = 1e-8) -> optax.GradientTransformation:
    if moments == "float32":
        return optax.scale_by_adam(b1, b2, eps)
    config = OptimizerConfig(b1=b1, b2=b2, eps=eps, moments=moments)
    return scale_by_narrow_adam(config, replace(DECLARED, params={PATH: DECLARED.params[PATH]}))


def follow(moments: str, gradients, b1: float, b2: float):
    """Updates for these gradients, one after the other, and the last state."""
    adam = rule(moments, b1, b2)
    state, step, found = adam.init({"blocks": {"kernel": jnp.zeros(SHAPE)}}), jax.jit(adam.update), []
    for g in gradients:
        updates, state = step(unflatten({PATH: jnp.float32(g)}), state)
        found.append(np.asarray(flatten(updates)[PATH], np.float64))
    return np.stack(found), state


def adam64(gradients, b1: float, b2: float, keep=lambda m, v: (m, v), eps: float = 1e-8):
    """arXiv:1412.6980, algorithm 1, in float64; `keep`: what becomes of the moments between two steps."""
    m, v, found = np.zeros(SHAPE), np.zeros(SHAPE), []
    for t, g in enumerate(gradients, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        found.append(m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps))
        m, v = keep(m, v)
    return np.stack(found)


def naive(m, v):
    """What astype does."""
    return tuple(np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in (m, v))


def descend(update_rule, b2: float, seed: int):
    """Mean loss of a quadratic with noisy gradients, whose noise fades at half time, by AdamW's rule with a falling rate:
    curvatures over three decades, in one block."""
    rng = np.random.default_rng(seed)
    curvature = 10 ** rng.uniform(-3, 0, SHAPE)
    noise = curvature * 10 ** rng.uniform(-1, 0.5, SHAPE) * rng.standard_normal((STEPS, *SHAPE))
    noise[STEPS // 2 :] *= 0.02
    w, state, losses = rng.standard_normal(SHAPE), None, []
    for t in range(STEPS):
        u, state = update_rule(curvature * w + noise[t], state, b2)
        w = w - 0.03 * (1 - t / STEPS) * u
        losses.append((curvature * w**2).mean())
    return float(np.mean(losses[-STEPS // 4 :]))


def kept_as(moments: str, b2: float):
    adam = rule(moments, 0.9, b2)
    step = jax.jit(adam.update)

    def update_rule(g, state, _):
        state = adam.init({"blocks": {"kernel": jnp.zeros(SHAPE)}}) if state is None else state
        updates, state = step(unflatten({PATH: jnp.float32(g)}), state)
        return np.asarray(flatten(updates)[PATH], np.float64), state

    return update_rule


def in_float64(keep=lambda m, v: (m, v)):
    def update_rule(g, state, b2):
        m, v, t = state or (np.zeros(SHAPE), np.zeros(SHAPE), 0)
        m, v, t = 0.9 * m + 0.1 * g, b2 * v + (1 - b2) * g**2, t + 1
        u = m / (1 - 0.9**t) / (np.sqrt(v / (1 - b2**t)) + 1e-8)
        return u, (*keep(m, v), t)

    return update_rule


@pytest.mark.parametrize("moments, b2, within", [("bfloat16", 0.95, 0.02), ("bfloat16", 0.999, 0.03), ("int8", 0.95, 0.1)])
def test_a_noisy_quadratic_is_descended_as_in_float64(moments, b2, within):
    seed = np.random.default_rng().integers(1 << 30)
    assert descend(kept_as(moments, b2), b2, seed) == pytest.approx(descend(in_float64(), b2, seed), rel=within)


def test_a_second_moment_in_plain_bfloat16_is_not():
    """What the codes are for: it can grow, and not fall. Of 20 seeds the least ratio was 1.09."""
    seed = np.random.default_rng().integers(1 << 30)
    assert descend(in_float64(naive), 0.999, seed) > 1.05 * descend(in_float64(), 0.999, seed)


@pytest.mark.parametrize("moments, error", [("bfloat16", 0.01), ("int8", 0.15)])
def test_updates_are_those_of_float64_but_for_the_rounding(moments, error):
    rng = np.random.default_rng()
    gradients = rng.standard_normal((40, *SHAPE)) * 10 ** rng.uniform(-2, 0, SHAPE)
    expected, (found, _) = adam64(gradients, 0.9, 0.95), follow(moments, gradients, 0.9, 0.95)
    rms = lambda x: np.sqrt((x**2).mean())  # noqa: E731
    assert 1e-5 < rms(found - expected) / rms(expected) < error
    # At the first step nothing has been rounded yet.
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)


@pytest.mark.parametrize("moments", KINDS)
def test_moments_fall_where_gradients_vanish_up_to_the_largest_decay(moments):
    """All mantissas, beside an element that keeps the block's exponent where it is."""
    b1, b2 = LARGEST_DECAY[moments]
    first = np.exp2(np.linspace(-1, 0, SHAPE[-1], endpoint=False)) * np.ones(SHAPE)
    first[..., 0] = 1.5
    later = np.zeros((3, *SHAPE))
    later[..., 0] = 1.5
    states = [follow(moments, [first, *later[:n]], b1, b2)[1] for n in (0, 1, 2, 3)]
    for name in ("mu", "nu"):
        code = CODES[moments].get(name)
        kept = [np.asarray(flatten(getattr(s, name))[PATH]).astype(np.float64) for s in states]
        kept = [x % (code.largest + 1) if code else x for x in kept]
        assert all((b < a)[..., 1:].all() for a, b in zip(kept, kept[1:])), name


def fraction(code) -> int:
    return code.mantissa_bits if code else 7  # bfloat16's


@pytest.mark.parametrize("moments", KINDS)
def test_beyond_the_largest_decay_a_moment_could_stand_still(moments):
    """Half a step below 1 + 2**-M, relatively, is what a decay must exceed."""
    for name, most in zip(("mu", "nu"), LARGEST_DECAY[moments]):
        steps = 2.0 ** -fraction(CODES[moments].get(name))
        needed = steps / 2 / (1 + steps)
        assert needed < 1 - most < 1.1 * needed, (name, 1 - needed)


@pytest.mark.parametrize("moments", KINDS)
def test_zero_stays_zero_and_the_smallest_second_moment_of_a_block_does_not_become_it(moments):
    gradients = np.zeros((2, *SHAPE))
    gradients[:, :, 0] = 1.0  # a row, which is a block
    gradients[:, :, 0, 1] = 1e-9
    gradients[1] /= 2
    updates, state = follow(moments, gradients, 0.9, 0.95)
    assert np.array_equal(updates[:, :, 1:], np.zeros_like(updates[:, :, 1:]))
    kept = np.asarray(flatten(state.nu)[PATH])
    assert kept[:, 0, 1].all() and not kept[:, 1:].any()
    assert abs(updates[:, :, 0]).max() < 1.2, "a moment of too few bits makes steps smaller, never larger"


def updated(config, devices, num_steps: int):
    """Fingerprints after each of so many updates of exact mode, from random gradients, and the last state."""
    setup = prepare(config, devices)
    state = create_state(config, setup.declared, setup.state_shardings)
    arguments = abstract_arguments(setup)
    finish = compile_finish(setup, Kept(setup, keep=False), arguments[0], *arguments[3:])
    shardings, rng = flatten(setup.gradient_shardings("update")), np.random.default_rng(0)
    go_on = jax.device_put(np.zeros(len(devices), np.int32), stop_sharding(setup.mesh))
    place, found = lambda x: jax.device_put(x, setup.replicated()), []
    for step in range(num_steps):
        decls = setup.declared.trained.params
        draw = lambda d: (rng.standard_normal(d.shape) * 10 ** rng.uniform(-3, 0, d.shape)).astype(np.float32)  # noqa: E731
        grads = unflatten({p: jax.device_put(draw(d), shardings[p]) for p, d in decls.items()})
        norm, digest = place(np.float32(1.5 + step)), place(np.zeros(2, np.uint32))
        state, metrics = finish(state, grads, norm, norm, digest, go_on, place(np.bool_(False)))
        found.append(combine(np.asarray(metrics["digests"]), list(by_path(state))))
    return found, state


def agree_in_exact_mode(config, moments, placements):
    """Six updates over these (policy, data, fsdp), asserted to be the same in bits."""
    found = []
    for policy, data, fsdp in placements:
        parallel = replace(config.parallel, reduction="exact", policy=policy, data=data, fsdp=fsdp)
        config = replace(config, parallel=parallel, optimizer=replace(config.optimizer, moments=moments))
        found.append(updated(config, jax.devices()[: data * fsdp], 6)[0])
    assert all(f == found[0] for f in found), [[a == b for a, b in zip(f, found[0])] for f in found]
    assert len(set(found[0])) == 6


@pytest.mark.parametrize("moments", KINDS)
@needs_tested_jax
def test_an_update_of_exact_mode_has_the_same_bits_on_one_device_and_on_four(moments):
    config = replace(small(), model=MlpConfig(input_dim=16, hidden_dim=32, num_layers=2, output_dim=8))
    agree_in_exact_mode(config, moments, [("zero", 1, 1), ("fsdp", 1, 4)])


PLACEMENTS = [("dp", 1, 1), ("fsdp", 1, 2), ("dp", 2, 1), ("fsdp", 2, 2), ("zero", 2, 4), ("fsdp", 1, 8), ("zero", 1, 8), ("dp", 8, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("moments", KINDS)
@needs_tested_jax
def test_an_update_of_exact_mode_has_the_same_bits_on_any_mesh(moments):
    agree_in_exact_mode(small_dropout(), moments, PLACEMENTS)


def state_bytes(moments):
    config = replace(small(), optimizer=replace(small().optimizer, moments=moments))
    leaves = {p: x for p, x in by_path(declare_state(config, declare(config.model))).items() if p.startswith("opt_state/0/")}
    sizes: dict[str, int] = {}
    for path, x in leaves.items():
        name = path.split("/")[2]
        sizes[name] = sizes.get(name, 0) + x.size * x.dtype.itemsize
    return sizes, declare(config.model).num_params


@pytest.mark.parametrize("moments", KINDS)
def test_the_state_has_the_bytes_that_are_promised(moments):
    sizes, num = state_bytes(moments)
    whole = sum(state_bytes("float32")[0].values())
    assert sizes["mu"] + sizes["nu"] == pytest.approx(MOMENT_BYTES[moments] * num, rel=0.05)
    assert sizes.get("nu_exponents") < 2 * num / BLOCK * 2
    assert sum(sizes.values()) < 1.12 * MOMENT_BYTES[moments] / MOMENT_BYTES["float32"] * whole


@pytest.mark.parametrize(
    "changes", [{"moments": "int8", "b2": 0.98}, {"moments": "int8", "b1": 0.98}, {"moments": "bfloat16", "b2": 0.9999}]
)
def test_a_decay_that_a_code_cannot_follow_is_refused(changes):
    with pytest.raises(UserError, match=r"at most 0.9\d+ with --optimizer.moments"):
        OptimizerConfig(**changes)


def test_only_adamw_has_narrow_moments():
    with pytest.raises(UserError, match="--optimizer.moments is 'int8', but must be float32 with --optimizer.name muon"):
        OptimizerConfig(name="muon", moments="int8")

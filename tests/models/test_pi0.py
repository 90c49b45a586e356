from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sharder.config import ExpertConfig, Pi0Config, SiglipConfig, UserError
from sharder.data.synthetic_robot import SyntheticRobot
from sharder.models.build import declare, unflatten
from sharder.models.pi0 import Pi0, block_causal, draw_noise_and_time, encode_time

TINY = Pi0Config(
    vision=SiglipConfig(embed_dim=8, num_layers=1, mlp_dim=8, num_heads=2, patch_size=2), backbone=ExpertConfig(12, 16),
    action_expert=ExpertConfig(8, 12), num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=400, max_prompt_len=6,
    action_dim=3, action_horizon=4, cameras=("front", "wrist"), image_size=(4, 2), compute_dtype="float32", remat="none",
)  # fmt: skip
PI05 = replace(TINY, variant="pi05")
variants = pytest.mark.parametrize("config", [TINY, PI05], ids=["pi0", "pi05"])
NUM = 5


@cache
def random_params(config: Pi0Config) -> dict:
    """All parameters of order 1, so that no zero hides a mistake."""
    rng = np.random.default_rng(1)
    with jax.ensure_compile_time_eval():  # also where it is first called inside a jit
        return unflatten(
            {p: jnp.asarray(0.5 * rng.standard_normal(d.shape), d.dtype) for p, d in declare(config).params.items()}
        )


def model(config: Pi0Config, params: dict | None = None) -> Pi0:
    return nnx.merge(declare(config).graphdef, random_params(config) if params is None else params)


def batch_of(config: Pi0Config) -> dict:
    batch = {k: jnp.asarray(x) for k, x in SyntheticRobot(100, config).read(np.arange(NUM)).items()}
    batch["token_mask"] = jnp.arange(config.max_prompt_len) < jnp.arange(NUM)[:, None] + 1
    return batch | {f"image_mask/{c}": jnp.ones(NUM, bool) for c in config.cameras}


@cache
def velocity_of(config: Pi0Config):
    """(batch, noisy actions, time) -> velocity"""
    return jax.jit(lambda batch, noisy, time: model(config).outputs(batch, noisy, time)["velocity"])


def noise_and_time(config: Pi0Config) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    return rng.standard_normal((NUM, config.action_horizon, config.action_dim)).astype(np.float32), rng.random(NUM).astype(
        np.float32
    )


def test_later_blocks_see_earlier_ones_and_not_the_other_way_round():
    # Two of the prefix, the state, two actions.
    visible = block_causal(jnp.ones((1, 5), bool), jnp.array([0, 0, 1, 1, 0], bool))[0]
    expected = [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert visible.astype(int).tolist() == expected


def test_what_is_filled_up_neither_sees_nor_is_seen():
    visible = block_causal(jnp.array([[True, False, True]]), jnp.zeros(3, bool))[0]
    assert visible.astype(int).tolist() == [[1, 0, 1], [0, 0, 0], [1, 0, 1]]


def test_time_is_sines_and_cosines_of_growing_periods():
    time, dim = np.array([0.001, 0.37, 1.0]), 10
    periods = 4e-3 * (4.0 / 4e-3) ** (np.arange(dim // 2) / (dim // 2 - 1))
    angles = time[:, None] * 2 * np.pi / periods
    found = encode_time(jnp.asarray(time, jnp.float32), dim)
    np.testing.assert_allclose(found, np.concatenate([np.sin(angles), np.cos(angles)], 1), atol=2e-4)


@variants
def test_sampling_with_a_cache_is_euler_over_the_whole_sequence(config):
    batch, (noise, _) = batch_of(config), noise_and_time(config)
    batch["image_mask/wrist"] = jnp.array([True, False, True, False, True])
    actions, steps = noise, 3
    for i in range(steps):
        actions = actions - velocity_of(config)(batch, actions, np.full(NUM, 1 - i / steps, np.float32)) / steps
    found = jax.jit(lambda b, n: model(config).sample(b, n, steps))(batch, noise)
    # Weights this large amplify rounding a thousand times; a wrong mask or position is off by more than 0.1.
    np.testing.assert_allclose(found, actions, atol=1e-3)


@variants
def test_the_loss_is_the_mean_squared_error_of_the_velocity(config):
    batch, (noise, time) = batch_of(config), noise_and_time(config)
    noisy = time[:, None, None] * noise + (1 - time[:, None, None]) * batch["actions"]
    errors = np.square(velocity_of(config)(batch, noisy, time) - (noise - batch["actions"]))
    losses, weights, _ = model(config).flow_losses(batch, noise, time)
    np.testing.assert_allclose(losses / weights, errors.mean((1, 2)), rtol=1e-5)


def test_a_padded_loss_counts_real_steps_and_dimensions_only():
    config = replace(TINY, loss_mask="padded")
    batch, (noise, time) = batch_of(config), noise_and_time(config)
    batch["action_is_pad"] = jnp.asarray(np.random.default_rng(3).random((NUM, config.action_horizon)) < 0.4)
    losses, weights, found = model(config).flow_losses(batch, noise, time)
    errors = np.square(found["velocity"] - (noise - batch["actions"]))
    real = ~np.asarray(batch["action_is_pad"])[:, :, None] & np.asarray(batch["action_dim_mask"])[:, None]
    np.testing.assert_allclose(losses.sum() / weights.sum(), errors[real].mean(), rtol=1e-5)


@variants
def test_a_masked_camera_does_not_matter(config):
    batch, arguments = batch_of(config), noise_and_time(config)
    batch["image_mask/wrist"] = jnp.zeros(NUM, bool)
    other = batch | {"image/wrist": 255 - batch["image/wrist"]}
    assert np.array_equal(*(velocity_of(config)(b, *arguments) for b in (batch, other)))


@pytest.mark.parametrize("what", ["image/wrist", "tokens", "state"])
def test_everything_that_is_seen_matters(what):
    batch, arguments = batch_of(TINY), noise_and_time(TINY)
    other = batch | {what: (batch[what] + (100 if what == "tokens" else 7)).astype(batch[what].dtype)}
    assert np.abs(velocity_of(TINY)(batch, *arguments) - velocity_of(TINY)(other, *arguments)).max() > 1e-3


def test_pi05_does_not_read_the_state():
    batch, arguments = batch_of(PI05), noise_and_time(PI05)
    other = batch | {"state": batch["state"] + 1}
    assert np.array_equal(*(velocity_of(PI05)(b, *arguments) for b in (batch, other)))


def test_tokens_that_are_filled_up_do_not_matter():
    batch, arguments = batch_of(TINY), noise_and_time(TINY)
    other = batch | {"tokens": jnp.where(batch["token_mask"], batch["tokens"], 9)}
    assert np.array_equal(*(velocity_of(TINY)(b, *arguments) for b in (batch, other)))


def test_a_byte_of_an_image_is_a_number_from_minus_one_to_one():
    batch, arguments = batch_of(TINY), noise_and_time(TINY)
    other = batch | {f"image/{c}": batch[f"image/{c}"].astype(jnp.float32) / 255.0 * 2.0 - 1.0 for c in TINY.cameras}
    np.testing.assert_allclose(velocity_of(TINY)(batch, *arguments), velocity_of(TINY)(other, *arguments), atol=1e-5)


def test_noise_and_time_depend_on_the_examples_own_key_only():
    keys = jax.random.split(jax.random.key(3), 6)
    noise, time = draw_noise_and_time(keys, (4, 3))
    noise_alone, time_alone = draw_noise_and_time(keys[4:5], (4, 3))
    assert np.array_equal(noise[4:5], noise_alone) and np.allclose(time[4:5], time_alone, rtol=1e-6)


def test_time_is_beta_distributed():
    _, time = draw_noise_and_time(jax.random.split(jax.random.key(0), 20_000), (1, 1))
    # P(Beta(1.5, 1) < x) = x**1.5, at four places; four standard errors.
    share = [(np.asarray(time) < 0.001 + 0.999 * x).mean() for x in (0.2, 0.4, 0.6, 0.8)]
    np.testing.assert_allclose(share, np.array([0.2, 0.4, 0.6, 0.8]) ** 1.5, atol=0.014)


def test_without_keys_the_loss_of_an_example_does_not_depend_on_its_place():
    batch = batch_of(TINY)
    losses = jax.jit(lambda b: model(TINY).losses(b, None)[0])
    turned = {k: jnp.roll(x, 2, axis=0) for k, x in batch.items()}
    np.testing.assert_allclose(jnp.roll(losses(batch), 2), losses(turned), rtol=1e-5)


def test_bfloat16_is_close_to_float32():
    batch, arguments = batch_of(TINY), noise_and_time(TINY)
    exact = velocity_of(TINY)(batch, *arguments)
    error = velocity_of(replace(TINY, compute_dtype="bfloat16"))
    narrow = error(batch, *arguments)
    assert narrow.dtype == jnp.float32 and np.sqrt(np.square(narrow - exact).mean()) < 0.03 * np.sqrt(np.square(exact).mean())


@pytest.mark.parametrize("size", [(3, 4), (0, 2)])
def test_an_image_that_the_patch_does_not_divide_is_refused_with_the_patch(size):
    with pytest.raises(UserError, match="image-size is .* multiples of --model.vision.patch-size, which is 2"):
        replace(TINY, image_size=size)


def test_cameras_of_the_same_name_are_refused():
    with pytest.raises(UserError, match="cameras"):
        replace(TINY, cameras=("a", "a"))

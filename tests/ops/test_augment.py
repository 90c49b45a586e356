import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharder.ops.augment import augment, crop_and_rotate, jitter

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (5, 12, 20, 3), np.uint8)
KEYS = jax.random.split(jax.random.key(3), 5)


def test_an_example_does_not_depend_on_its_batch():
    whole = augment(IMAGES, KEYS, True)
    alone = augment(IMAGES[3:4], KEYS[3:4], True)
    assert np.allclose(whole[3], alone[0], atol=1e-6)


def test_bytes_and_floats_are_the_same_picture():
    assert np.allclose(augment(IMAGES, KEYS, True), augment(IMAGES.astype(np.float32) / 127.5 - 1, KEYS, True), atol=1e-5)


@pytest.mark.parametrize("geometric", [False, True])
def test_values_stay_in_range_and_every_key_changes_the_picture(geometric):
    same = np.broadcast_to(IMAGES[:1], IMAGES.shape)
    found = np.asarray(augment(same, KEYS, geometric))
    assert found.min() >= -1 and found.max() <= 1 and found.dtype == np.float32
    assert all(np.abs(found[i] - found[j]).mean() > 1e-3 for i in range(5) for j in range(i))


def test_a_wrist_camera_keeps_its_geometry():
    flat = np.zeros((1, 12, 20, 3), np.uint8)
    flat[:, :, 10:] = 200
    found = np.asarray(augment(flat, KEYS[:1], False))[0]
    assert (np.ptp(found[:, :10], axis=(0, 1)) == 0).all() and (np.ptp(found[:, 10:], axis=(0, 1)) == 0).all()


def test_nothing_drawn_changes_nothing():
    image = jnp.asarray(IMAGES[0] / 255.0, jnp.float32)
    zero = jnp.float32(0)
    assert np.allclose(crop_and_rotate(image, zero, zero, zero, crop=1.0), image, atol=1e-6)
    assert np.allclose(jitter(image, zero, zero, zero), image, atol=1e-6)


def test_the_window_is_cut_out_and_enlarged():
    """On a ramp, bilinear sampling is exact: the picture is the coordinate itself."""
    y, x = np.mgrid[:40, :60].astype(np.float32)
    ramp = jnp.asarray(np.stack([y, x, 0 * x], -1))
    found = np.asarray(crop_and_rotate(ramp, jnp.float32(1), jnp.float32(-1), jnp.float32(0)))
    inside = slice(2, -2)
    wanted_y = (y - 19.5) * 0.95 + 19.5 - 0.025 * 40
    wanted_x = (x - 29.5) * 0.95 + 29.5 + 0.025 * 60
    assert np.allclose(found[inside, inside, 0], wanted_y[inside, inside], atol=1e-4)
    assert np.allclose(found[inside, inside, 1], wanted_x[inside, inside], atol=1e-4)


def test_a_quarter_turn_is_a_quarter_turn():
    image = jnp.asarray(RNG.random((9, 9, 3)), jnp.float32)
    found = np.asarray(crop_and_rotate(image, jnp.float32(0), jnp.float32(0), jnp.float32(np.pi / 2), crop=1.0))
    assert np.allclose(found, np.rot90(image), atol=1e-5) or np.allclose(found, np.rot90(image, -1), atol=1e-5)


def test_outside_of_the_picture_is_black():
    found = np.asarray(crop_and_rotate(jnp.ones((20, 20, 3)), jnp.float32(0), jnp.float32(0), jnp.float32(np.pi / 4), crop=1.0))
    assert found[0, 0].max() == 0 and found[10, 10].min() > 0.99


def test_jitter_is_its_formula():
    image = RNG.random((6, 7, 3)).astype(np.float32) * 0.5 + 0.25
    found = np.asarray(jitter(jnp.asarray(image), jnp.float32(0.1), jnp.float32(-0.2), jnp.float32(0.3)))
    x = image.astype(np.float64) * 1.1
    x = x.mean() + (x - x.mean()) * 0.8
    grey = x @ np.array([0.299, 0.587, 0.114])
    assert np.allclose(found, np.clip(grey[..., None] + (x - grey[..., None]) * 1.3, 0, 1), atol=1e-5)


def test_pi0_changes_the_pictures_of_its_cameras():
    from types import SimpleNamespace

    from sharder.models.pi0 import Pi0

    cameras = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    batch = {f"image/{c}": jnp.asarray(IMAGES) for c in cameras} | {
        "image_mask/right_wrist_0_rgb": jnp.zeros(5, bool),
        "state": jnp.ones((5, 2)),
    }
    found = Pi0.augmented(SimpleNamespace(config=SimpleNamespace(cameras=cameras)), batch, KEYS)
    assert np.allclose(found["image/base_0_rgb"], augment(IMAGES, KEYS, True), atol=1e-5)
    assert np.allclose(found["image/left_wrist_0_rgb"], augment(IMAGES, KEYS, False), atol=1e-5)
    assert np.allclose(found["image/right_wrist_0_rgb"], IMAGES / 127.5 - 1, atol=1e-5)
    assert found["state"] is batch["state"]

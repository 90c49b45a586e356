"""Random changes of training pictures on the accelerator, decided by each example's own key.

As openpi does (commit 15a9616, models/model.py): pictures of cameras that do not sit on a wrist are cropped to 95 % and rotated by up
to 5 degrees, all change brightness (0.3), contrast (0.4) and saturation (0.5). Crop and rotation are one bilinear resampling.

Shape letters: B batch, H height, W width, C channels.
"""

import jax
import jax.numpy as jnp

CROP = 0.95
ROTATION_DEGREES = 5.0
BRIGHTNESS, CONTRAST, SATURATION = 0.3, 0.4, 0.5
LUMA = (0.299, 0.587, 0.114)
"""Share of red, green and blue in grey, ITU-R BT.601."""
PURPOSE = 2
"""Folded into an example's key, apart from what else is drawn from it."""


def augment(images_BHWC: jax.Array, keys_B: jax.Array, geometric: bool) -> jax.Array:
    """uint8, or float32 in [-1, 1], to float32 in [-1, 1] of the same shape. `geometric`: crop and rotate as well.

    The key alone decides, so that all cameras of an example change alike, wherever it is computed.
    """
    unit = images_BHWC.astype(jnp.float32) / 255.0 if images_BHWC.dtype == jnp.uint8 else images_BHWC * 0.5 + 0.5

    def one(image_HWC, key):
        draws = jax.random.uniform(jax.random.fold_in(key, PURPOSE), (6,), minval=-1.0, maxval=1.0)
        if geometric:
            image_HWC = crop_and_rotate(image_HWC, draws[0], draws[1], jnp.deg2rad(ROTATION_DEGREES) * draws[2])
        return jitter(image_HWC, BRIGHTNESS * draws[3], CONTRAST * draws[4], SATURATION * draws[5])

    return jax.vmap(one)(unit, keys_B) * 2.0 - 1.0


def crop_and_rotate(
    image_HWC: jax.Array, across: jax.Array, down: jax.Array, angle: jax.Array, crop: float = CROP
) -> jax.Array:
    """A window of `crop` of each side, moved by `across` and `down` (-1 to 1 of what there is room for), turned about its middle.

    Bilinear; what lies outside of the picture is black.
    """
    H, W = image_HWC.shape[:2]
    middle_y, middle_x = (H - 1) / 2, (W - 1) / 2
    y = (jnp.arange(H, dtype=jnp.float32) - middle_y)[:, None] * crop
    x = (jnp.arange(W, dtype=jnp.float32) - middle_x)[None, :] * crop
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    source_y = cos * y - sin * x + middle_y + down * (1 - crop) * H / 2
    source_x = sin * y + cos * x + middle_x + across * (1 - crop) * W / 2
    return _sample(image_HWC, source_y, source_x)


def _sample(image_HWC: jax.Array, y_HW: jax.Array, x_HW: jax.Array) -> jax.Array:
    H, W = image_HWC.shape[:2]
    top, left = jnp.floor(y_HW), jnp.floor(x_HW)
    found = jnp.zeros(image_HWC.shape, jnp.float32)
    for down in (0, 1):
        for right in (0, 1):
            row, column = (top + down).astype(jnp.int32), (left + right).astype(jnp.int32)
            inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
            weight = (1 - jnp.abs(y_HW - row)) * (1 - jnp.abs(x_HW - column)) * inside
            found += weight[..., None] * image_HWC[jnp.clip(row, 0, H - 1), jnp.clip(column, 0, W - 1)]
    return found


def jitter(image_HWC: jax.Array, brightness: jax.Array, contrast: jax.Array, saturation: jax.Array) -> jax.Array:
    """In [0, 1]: every value by 1 + brightness, its distance from the picture's mean by 1 + contrast, from grey by 1 + saturation."""
    image = jnp.clip(image_HWC * (1 + brightness), 0.0, 1.0)
    mean = image.mean()
    image = jnp.clip(mean + (image - mean) * (1 + contrast), 0.0, 1.0)
    grey = (image * jnp.array(LUMA, jnp.float32)).sum(-1, keepdims=True)
    return jnp.clip(grey + (image - grey) * (1 + saturation), 0.0, 1.0)

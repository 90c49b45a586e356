import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharder.models.layers import layer_norm
from sharder.models.llama import rms_norm
from sharder.ops.widen import narrowed, widened


def test_narrowed_is_rounded_to_nearest_even_for_every_kind_of_number():
    special = np.array([0, 0x80000000, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x3F808001], np.uint32)
    bits = np.concatenate([np.random.default_rng().integers(0, 2**32, 100_000, np.uint32), special])
    x = bits.view(np.float32)
    x = x[~np.isnan(x)]
    assert np.array_equal(
        np.asarray(narrowed(x, jnp.bfloat16)).view(np.uint16), np.asarray(jnp.asarray(x).astype(jnp.bfloat16)).view(np.uint16)
    )


def test_a_nan_stays_one_whatever_its_payload():
    x = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(np.asarray(narrowed(x, jnp.bfloat16)).astype(np.float32)).all()


def test_a_widened_weight_has_its_own_dtype_in_the_gradient():
    x = jnp.linspace(-2, 2, 7, dtype=jnp.bfloat16)
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(jnp.exp(widened(x))))(x)
    assert (value.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
    assert np.array_equal(gradient, jnp.exp(x.astype(jnp.float32)).astype(jnp.bfloat16))


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, scale: layer_norm(x, scale, jnp.ones_like(scale)),
        lambda x, bias: layer_norm(x, jnp.ones_like(bias), bias),
        lambda x, scale: rms_norm(x, scale, 0.0),
    ],
    ids=["scale of a layer norm", "its bias", "scale of an RMS norm"],
)
def test_replicas_add_up_the_gradients_of_norms_in_float32(norm):
    """Four replicas have 1 + 1/256, of which bfloat16 keeps 1, and four have -1; in all 1/64, of which nothing would be left."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    over = NamedSharding(mesh, P("data"))
    signs = jnp.where(jnp.arange(32) % 2, 1.0, -1.0).astype(jnp.bfloat16)
    x = jax.device_put(jnp.broadcast_to(signs, (8, 2, 32)), over)
    slope = jnp.array([[1, 1 / 256]] * 4 + [[-1, 0]] * 4, jnp.bfloat16)[:, :, None] * jnp.ones(32, jnp.bfloat16)
    loss = lambda p, x, slope: jnp.sum((norm(x, p) * slope).astype(jnp.float32))  # noqa: E731
    gradient = jax.jit(jax.grad(loss), out_shardings=NamedSharding(mesh, P()))(
        jnp.zeros(32, jnp.bfloat16), x, jax.device_put(slope, over)
    )
    assert np.asarray(jnp.abs(gradient), float) == pytest.approx(np.full(32, 1 / 64), rel=0.01)

"""Between float32 and the narrow dtype of a weight, where a gradient comes back.

What replicas add up is to be float32. A compiler that sees the sum over replicas and behind it a conversion to bfloat16 may
convert first and add up in bfloat16 (libtpu does, in its propagation of bfloat16). So gradients are narrowed by arithmetic on
their bits, which nothing can be drawn through.
"""

import jax
import jax.numpy as jnp


def narrowed(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float32 `x` in `dtype`, rounded to nearest, ties to even, as by astype."""
    if dtype != jnp.bfloat16:
        return x.astype(dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    half_or_less = jnp.uint32(0x7FFF) + (bits >> 16 & 1)
    # The payload of a NaN would overflow into the sign.
    upper = jnp.where(jnp.isnan(x), jnp.uint32(0x7FC0), bits + half_or_less >> 16)
    return jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)


@jax.custom_vjp
def widened(x: jax.Array) -> jax.Array:
    """A weight in float32. Its gradient is summed in float32, also over replicas, before it takes the weight's dtype."""
    return x.astype(jnp.float32)


def _forward(x):
    return x.astype(jnp.float32), jnp.zeros(0, x.dtype)


def _backward(like, cotangent):
    return (narrowed(cotangent, like.dtype),)


widened.defvjp(_forward, _backward)

"""The matrix product of a layer, and its bias, whose gradients are summed in float32 over tokens and replicas."""

import math

import jax
import jax.numpy as jnp

from sharder.ops.widen import narrowed


def linear(x: jax.Array, weight: jax.Array, *, num_contracted: int = 1, dtype: jnp.dtype | None = None) -> jax.Array:
    """x (..., I...) times weight (I..., O...) to (..., O...), over the `num_contracted` dimensions I.

    `dtype` is that of the sums, by default that of the inputs. The leading dimensions are flattened to one first:
    with batch and sequence apart, the CPU compiler transposes both operands of the weight gradient and leaves its
    fast path (a scanned feed-forward block took 1.75 s forward and backward, and 0.72 s flattened).
    """
    lead = x.shape[: x.ndim - num_contracted]
    flat = x.reshape(math.prod(lead), *x.shape[x.ndim - num_contracted :])
    out = (_product if weight.dtype == jnp.float32 else _narrow_product)(flat, weight, num_contracted, dtype)
    return out.reshape(*lead, *weight.shape[num_contracted:])


def _product(flat: jax.Array, weight: jax.Array, num_contracted: int, dtype: jnp.dtype | None) -> jax.Array:
    return jnp.tensordot(flat, weight, num_contracted, preferred_element_type=dtype)


# A product with a weight in bfloat16 has a gradient in bfloat16, which replicas would then add up in bfloat16. Here it comes
# out of the product in float32, so that its sum over replicas, right behind the product, runs in float32.
_narrow_product = jax.custom_vjp(_product, nondiff_argnums=(2, 3))


def _forward(flat, weight, num_contracted, dtype):
    return _product(flat, weight, num_contracted, dtype), (flat, weight)


def _backward(num_contracted, dtype, kept, cotangent):
    flat, weight = kept
    outputs = tuple(range(1, cotangent.ndim)), tuple(range(num_contracted, weight.ndim))
    back = jnp.tensordot(cotangent, weight.astype(cotangent.dtype), outputs, preferred_element_type=flat.dtype)
    # As a product of matrices: the CPU compiler has no other from bfloat16 to float32.
    rows = flat.astype(cotangent.dtype).reshape(flat.shape[0], -1), cotangent.reshape(flat.shape[0], -1)
    gradient = jnp.tensordot(*rows, (0, 0), preferred_element_type=jnp.float32)
    return back, narrowed(gradient.reshape(weight.shape), weight.dtype)


_narrow_product.defvjp(_forward, _backward)


@jax.custom_vjp
def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x + bias, with the bias repeated along its leading dimensions, which may be missing or 1."""
    return x + bias


def _add_forward(x, bias):
    return x + bias, bias


def _add_backward(bias, cotangent):
    lead = cotangent.ndim - bias.ndim
    repeated = (*range(lead), *(lead + i for i, n in enumerate(bias.shape) if n == 1 != cotangent.shape[lead + i]))
    total = cotangent.sum(repeated, dtype=jnp.float32)
    return cotangent, narrowed(total.reshape(bias.shape), bias.dtype)


add_bias.defvjp(_add_forward, _add_backward)

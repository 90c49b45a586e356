"""A weight outside of the blocks, with a place where each replica adds up its gradient for itself.

A gradient has the dtype of what it is the gradient of: that of a weight cast to bfloat16 would be added up in bfloat16, over
tokens, uses and replicas. And where one weight is used twice (tied embeddings), a sum over replicas would be formed for each
use. So the uses add into float32 sums instead, one for each replica, and their sum over replicas is formed once.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sharder.ops.layout import Layout
from sharder.ops.widen import narrowed


class Summed(NamedTuple):
    value: jax.Array
    sums: jax.Array
    """(R, *shape of value), float32 zeros: their gradient is that of the value, of each replica. Nothing computes with them."""

    @property
    def T(self) -> "Summed":  # noqa: N802
        return Summed(self.value.T, self.sums.swapaxes(1, 2))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def summed(weight: jax.Array, axes: tuple[str, ...], layout: Layout) -> Summed:
    """A weight with these logical axes, in the layout of computation."""
    zeros = jnp.zeros((layout.num_replicas, *weight.shape), jnp.float32)
    return Summed(weight, layout.activation(zeros, ("replica", *axes)))


def _forward(weight, axes, layout):
    return summed(weight, axes, layout), None


def _backward(axes, layout, _, cotangent):
    total = layout.activation(cotangent.sums, ("replica", *axes)).sum(0)
    return (narrowed(cotangent.value.astype(jnp.float32) + total, cotangent.value.dtype),)


summed.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table_VD: Summed, ids_BT: jax.Array, layout: Layout) -> jax.Array:
    """Rows (B, T, D) of a table. The batch must divide over the layout's replicas."""
    return table_VD.value[ids_BT]


def _lookup_forward(table_VD, ids_BT, layout):
    return table_VD.value[ids_BT], (table_VD.value, ids_BT)


def _lookup_backward(layout, kept, cotangent_BTD):
    value_VD, ids_BT = kept
    split = lambda x: x.reshape(layout.num_replicas, -1, *x.shape[2:])  # noqa: E731
    by_replica = lambda x: layout.activation(x, ("replica", "vocab", "embed"))  # noqa: E731
    zeros_RVD = by_replica(jnp.zeros((layout.num_replicas, *value_VD.shape), jnp.float32))
    add = jax.vmap(lambda total_VD, ids_N, rows_ND: total_VD.at[ids_N].add(rows_ND))
    total_RVD = add(zeros_RVD, split(ids_BT), split(cotangent_BTD.astype(jnp.float32)))
    return Summed(jnp.zeros_like(value_VD), by_replica(total_RVD)), None


lookup.defvjp(_lookup_forward, _lookup_backward)

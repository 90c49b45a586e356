"""The compute layout inside `jax.shard_map`, replicas by hand: what exact mode's lean variant computes with.

Every device sees the shards of its own replica. A block gathers its weights where it asks for them, and their gradients are
added up over the replicas in the fixed tree before they leave the block, so that only one block is ever whole.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sharder.ops.layout import Body
from sharder.ops.ordered import ordered_sum
from sharder.sharding.plan import Plan
from sharder.sharding.policy import storage_dim

Tree = Any


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def _gather(p: jax.Array, dtype: str, dim: int | None, data: int, fsdp: int, divided: bool) -> jax.Array:
    """The whole parameter in `dtype` from this device's float32 shard along `dim`; the narrow dtype travels."""
    narrow = p.astype(jnp.dtype(dtype))
    return jax.lax.all_gather(narrow, "fsdp", axis=dim, tiled=True) if divided and fsdp > 1 else narrow


def _gather_forward(p, dtype, dim, data, fsdp, divided):
    return _gather(p, dtype, dim, data, fsdp, divided), None


def _gather_backward(dtype, dim, data, fsdp, divided, _, cotangent):
    return (ordered_sum(cotangent.astype(jnp.float32), dim, data, fsdp, divided),)


_gather.defvjp(_gather_forward, _gather_backward)


class ManualLayout:
    """`sharder.ops.layout.Layout` with the axes data and fsdp manual and tensor left to the compiler.

    Parameters come as float32 shards of the storage layout, and gradients leave in the update layout, summed over all
    replicas; policy fsdp, whose two layouts are the same.
    """

    def __init__(self, plan: Plan):
        assert plan.policy == "fsdp"
        self.plan = plan

    num_replicas = 1  # what a device sees is its own

    def divides(self, axis: str) -> bool:
        return axis in self.plan.rules.tensor and self.plan.mesh.tensor > 1

    def weights(self, name: str, params: Tree, dtype: str) -> Tree:
        def one(path, p):
            leaf = self.plan.leaves["/".join((name, *(str(k.key) for k in path)))]
            dim = storage_dim(leaf.decl.axes, self.plan.rules)
            # In a scan the leading dimension (layers, never divided) is gone.
            dim = None if dim is None else dim - (len(leaf.decl.shape) - p.ndim)
            return _gather(p, dtype, dim, self.plan.mesh.data, self.plan.mesh.fsdp, leaf.divided)

        return jax.tree.map_with_path(one, params)

    def activation(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        if self.plan.mesh.tensor == 1:
            return x
        spec = PartitionSpec(*("tensor" if a in self.plan.rules.tensor else None for a in axes))
        return jax.lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), spec))

    def scanned(self, body: Body, remat: str) -> Body:
        # Without a policy the gathered weights of every layer would be kept for the backward pass.
        return jax.checkpoint(body, policy=None if remat == "block" else jax.checkpoint_policies.dots_saveable)

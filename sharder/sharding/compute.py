"""The compute layout as a model meets it: weights gathered where a block asks for them, gradients scattered back."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharder.ops.layout import Body, remat_body
from sharder.sharding.mesh import REPLICA_AXES
from sharder.sharding.plan import Plan
from sharder.sharding.policy import Layout

Tree = Any


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(p: jax.Array, dtype: str, storage: NamedSharding, compute: NamedSharding, gradient: NamedSharding) -> jax.Array:
    # Cast before the gather, pinned on both sides, so that the narrow dtype travels.
    narrow = with_sharding_constraint(p.astype(jnp.dtype(dtype)), storage)
    return with_sharding_constraint(narrow, compute)


def _gather_forward(p, dtype, storage, compute, gradient):
    return _gather(p, dtype, storage, compute, gradient), jnp.zeros((), p.dtype)


def _gather_backward(dtype, storage, compute, gradient, like, cotangent):
    # A plain constraint would transpose to the compute layout (an all-reduce to whole gradients on every device);
    # pinning the gradient layout instead leaves room for a reduce-scatter. The sum runs in the parameter's dtype.
    return (with_sharding_constraint(cotangent.astype(like.dtype), gradient),)


_gather.defvjp(_gather_forward, _gather_backward)


class ComputeLayout:
    """`sharder.ops.layout.Layout` on a mesh, as a plan says."""

    def __init__(self, mesh: Mesh, plan: Plan, gradient: Layout, storage: Layout = "storage", divide_batch: bool = True):
        """`gradient`: the layout in which gradients leave a block. `storage`: that in which parameters come.

        `divide_batch`: whether replicas compute different examples, or all the same (generation).
        """
        self.mesh, self.plan, self.gradient, self.storage = mesh, plan, gradient, storage
        self.batch_axes = REPLICA_AXES if divide_batch else None

    @property
    def num_replicas(self) -> int:
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"] if self.batch_axes else 1

    def divides(self, axis: str) -> bool:
        return axis in self.plan.rules.tensor and self.mesh.shape["tensor"] > 1

    def weights(self, name: str, params: Tree, dtype: str) -> Tree:
        def one(path, p):
            leaf = self.plan.leaves["/".join((name, *(str(k.key) for k in path)))]

            def sharding(layout: Layout) -> NamedSharding:
                # In a scan the leading dimension (layers, never divided) is gone.
                return NamedSharding(self.mesh, PartitionSpec(*leaf.spec(layout)[len(leaf.decl.shape) - p.ndim :]))

            return _gather(p, dtype, sharding(self.storage), sharding("compute"), sharding(self.gradient))

        return jax.tree.map_with_path(one, params)

    def activation(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        of = {"batch": self.batch_axes, "replica": self.batch_axes}
        entries = [of[a] if a in of else "tensor" if a in self.plan.rules.tensor else None for a in axes]
        return with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*entries)))

    def scanned(self, body: Body, remat: str) -> Body:
        return remat_body(body, remat, self.plan.policy == "fsdp" and self.storage == "storage")

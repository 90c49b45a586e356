"""One device's share of a step, traced with its own shapes: what its memory and its arithmetic are counted from.

The model is traced once with weights in their local compute shapes and the examples of one replica. What a layout does to a
weight on the way is marked by name and not carried out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr

from sharder.config import ModelConfig
from sharder.models.build import Declared, merged, unflatten
from sharder.ops.layout import Body, Tree, remat_body
from sharder.sharding.plan import LeafPlan, Plan, divisor
from sharder.sharding.policy import Layout


def local_shape(leaf: LeafPlan, plan: Plan, layout: Layout) -> tuple[int, ...]:
    return tuple(n // divisor(entry, plan.mesh) for n, entry in zip(leaf.decl.shape, leaf.spec(layout)))


class LocalLayout:
    """`sharder.ops.layout.Layout` of a single device, on local shapes."""

    def __init__(self, plan: Plan, gathers: bool):
        self.plan, self.gathers = plan, gathers

    def weights(self, name: str, params: Tree, dtype: str) -> Tree:
        def one(path, p):
            leaf = self.plan.leaves["/".join((name, *(str(k.key) for k in path)))]
            drop = len(leaf.decl.shape) - p.ndim
            whole = local_shape(leaf, self.plan, "compute")[drop:]
            how = (
                "gather_weights"
                if leaf.divided and self.gathers
                else "cast_weights"
                if dtype != leaf.decl.dtype
                else "alias_weights"
            )
            return _transfer(how, whole, dtype, p)

        return jax.tree.map_with_path(one, params)

    num_replicas = 1

    def divides(self, axis: str) -> bool:
        return False  # what is divided has its local size already

    def activation(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        tensor = self.plan.rules.tensor
        if "kv_heads" in axes and self.plan.mesh.tensor > 1 and "heads" in tensor and "kv_heads" not in tensor:
            # Whole on purpose; a device attends with the heads of its own queries. One stands for them: any number of
            # queries can share it.
            return jax.lax.slice_in_dim(x, 0, 1, axis=axes.index("kv_heads"))
        return x

    def scanned(self, body: Body, remat: str) -> Body:
        # What is offloaded passes through the device; it is counted as if it stayed.
        return remat_body(body, "block" if remat == "offload" else remat, self.gathers)


def _transfer(how: str, shape: tuple[int, ...], dtype: str, p: jax.Array) -> jax.Array:
    """Weights of local compute shape from a parameter in the gradient's local shape, and gradients back, as marked calls."""
    small, own = p.shape, p.dtype

    def marked(name, to_shape, to_dtype):
        def call(x):
            return jnp.zeros(to_shape, to_dtype)

        call.__name__ = name
        return jax.jit(call)

    @jax.custom_vjp
    def fetch(p):
        return marked(how, shape, dtype)(p)

    def backward(_, cotangent):
        return (marked("scatter_gradients", small, own)(cotangent),)

    fetch.defvjp(lambda p: (fetch(p), None), backward)
    return fetch(p)


def trace_share(
    declared: Declared, plan: Plan, batch: Mapping[str, jax.ShapeDtypeStruct], gradient: Layout, gathers: bool = True
) -> ClosedJaxpr:
    """Loss and gradients of one accumulation slot on one device; of frozen parameters there are none.

    `batch`: of one replica, (microbatch_size, ...). `gradient`: the layout in which gradients leave a block. `gathers`: blocks
    gather their weights where the policy divides storage; otherwise all come in the compute layout.
    """
    key = (
        tuple((p, local_shape(x, plan, gradient), local_shape(x, plan, "compute"), x.divided) for p, x in plan.leaves.items()),
        plan.rules, plan.mesh.tensor, gathers and plan.policy == "fsdp",
        tuple((k, x.shape, str(x.dtype)) for k, x in sorted(batch.items())),
    )  # fmt: skip
    return _trace(_Trace(declared.config, key, declared, plan, batch, gradient))


@dataclass(frozen=True)
class _Trace:
    """What a trace depends on, and what it is made with: a search asks for the same one many times."""

    model: ModelConfig
    key: tuple
    declared: Declared = field(compare=False)
    plan: Plan = field(compare=False)
    batch: Mapping[str, jax.ShapeDtypeStruct] = field(compare=False)
    gradient: Layout = field(compare=False)


@lru_cache(128)
def _trace(wanted: _Trace) -> ClosedJaxpr:
    plan, gradient, batch = wanted.plan, wanted.gradient, dict(wanted.batch)
    declared = wanted.declared
    params = unflatten({p: jax.ShapeDtypeStruct(local_shape(x, plan, gradient), x.decl.dtype) for p, x in plan.leaves.items()})
    layout = LocalLayout(plan, wanted.key[3])
    num = jax.tree.leaves(batch)[0].shape[0]
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num))

    def loss(trained, params, batch, keys):
        whole = merged(trained, params) if declared.frozen else trained
        losses, weights = nnx.merge(declared.graphdef, whole).losses(batch, keys, layout)
        return losses.sum(), weights.sum()

    return jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(declared.only_trained(params), params, batch, keys)

"""The plan as a table for people and as JSON for programs."""

import math

import numpy as np
from jax.sharding import PartitionSpec
from rich import box
from rich.table import Table

from sharder.sharding.mesh import MeshShape
from sharder.sharding.plan import LeafPlan, Plan, bytes_per_device
from sharder.sharding.policy import LAYOUTS

StateLeaves = dict[str, tuple[tuple[int, ...], str, PartitionSpec]]
"""Shape, dtype and layout at rest of every leaf of the state, by path."""

PARTS = ("params", "opt_state", "ema")


def layout_text(leaf: LeafPlan, layout: str, mesh: MeshShape) -> str:
    """`embed/fsdp mlp/tensor`: which dimensions are divided by which mesh axes of more than one device."""
    divided = []
    for axis, entry in zip(leaf.decl.axes, leaf.spec(layout)):
        names = [n for n in ((entry,) if isinstance(entry, str) else entry or ()) if mesh.size(n) > 1]
        divided += [f"{axis}/{'+'.join(names)}"] if names else []
    return " ".join(divided) or "whole"


def leaf_bytes(leaf: LeafPlan, plan: Plan) -> dict[str, int]:
    return {layout: bytes_per_device(leaf.decl.shape, leaf.decl.dtype, leaf.spec(layout), plan.mesh) for layout in LAYOUTS}


def explain(plan: Plan) -> Table:
    """One row per parameter: shape, logical axes, its three layouts and its bytes on a device at rest."""
    mesh = plan.mesh
    table = Table(
        title=f"policy {plan.policy}, mesh data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}", box=box.SIMPLE
    )
    for heading in ("parameter", "dimensions", *LAYOUTS):
        table.add_column(heading, overflow="fold")
    table.add_column("bytes/device", justify="right")
    for leaf in plan.leaves.values():
        dims = " ".join(f"{axis} {size}" for axis, size in zip(leaf.decl.axes, leaf.decl.shape))
        layouts = [layout_text(leaf, layout, mesh) for layout in LAYOUTS]
        table.add_row(leaf.path, dims, *layouts, f"{leaf_bytes(leaf, plan)['storage']:,}")
    totals = [f"{plan.param_bytes_per_device(layout):,}" for layout in LAYOUTS]
    table.add_section()
    table.add_row("bytes/device", "", *totals, totals[0])
    table.caption = "\n".join(filter(None, (whole_over_tensor_text(plan), undivided_text(plan)))) or None
    return table


def undivided_text(plan: Plan) -> str | None:
    """That a policy which divides has nothing to divide over, though there are several replicas; None: it has."""
    mesh = plan.mesh
    if plan.policy == "dp" or mesh.fsdp > 1 or mesh.num_replicas == 1:
        return None
    return (
        f"policy {plan.policy} divides over the fsdp axis, which has 1 device here: everything is whole on all {mesh.num_replicas}"
        " replicas; leave --parallel.data out, or name --parallel.fsdp"
    )


def whole_over_tensor_text(plan: Plan) -> str | None:
    """What tensor parallelism leaves whole on purpose, with the numbers; None: nothing."""
    found = [f"{axis} is {size}" for axis, size in plan.whole_over_tensor.items()]
    degree = plan.mesh.tensor
    return (
        f"whole on each of the {degree} devices of a tensor group, on purpose, since {degree} does not divide it: {', '.join(found)}"
        if found
        else None
    )


def whole_bytes(state: StateLeaves) -> int:
    """Of the undivided state, as a checkpoint holds it."""
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype, _ in state.values())


def to_json(plan: Plan, state: StateLeaves) -> dict:
    """plan.json: mesh, policy, layouts and bytes of every parameter, and bytes per device of the whole state at rest.

    `gradients` are those of one accumulation slot, in the parameters' dtype and the update layout.
    """
    num_params = sum(math.prod(leaf.decl.shape) for leaf in plan.leaves.values())
    per_device = {part: 0 for part in PARTS}
    whole = {part: 0 for part in PARTS}
    for path, (shape, dtype, spec) in state.items():
        part = path.split("/")[0]
        if part in PARTS:
            per_device[part] += bytes_per_device(shape, dtype, spec, plan.mesh)
            whole[part] += math.prod(shape) * np.dtype(dtype).itemsize
    per_device["gradients"] = plan.param_bytes_per_device("update")
    whole["gradients"] = whole["params"]
    return {
        "policy": plan.policy,
        "mesh": {"data": plan.mesh.data, "fsdp": plan.mesh.fsdp, "tensor": plan.mesh.tensor},
        "num_params": num_params,
        "whole_over_tensor": dict(plan.whole_over_tensor),
        "bytes_per_device": per_device,
        "bytes_total": whole,
        "bytes_per_param": {part: round(size / num_params, 4) for part, size in whole.items()},
        "params": {
            leaf.path: {
                "shape": list(leaf.decl.shape),
                "dtype": leaf.decl.dtype,
                "axes": list(leaf.decl.axes),
                **{layout: [list(e) if isinstance(e, tuple) else e for e in leaf.spec(layout)] for layout in LAYOUTS},
                "bytes_per_device": leaf_bytes(leaf, plan),
            }
            for leaf in plan.leaves.values()
        },
    }

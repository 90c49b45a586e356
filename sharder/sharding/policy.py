"""From a policy to the layout of one parameter: the table of the three layouts, and nothing else.

| policy | storage (at rest) | compute (in a block) | update (gradients, optimizer) |
| dp     | whole             | whole                | whole                         |
| zero   | whole             | whole                | divided by fsdp               |
| fsdp   | divided by fsdp   | whole                | divided by fsdp               |

Tensor parallelism divides the model's tensor axes in all three.
"""

import math
from typing import Literal

from jax.sharding import PartitionSpec

from sharder.sharding.axes import AxisRules
from sharder.sharding.mesh import MeshShape

Layout = Literal["storage", "compute", "update"]
LAYOUTS: tuple[Layout, ...] = ("storage", "compute", "update")

DIVIDED_BY_FSDP: dict[str, tuple[Layout, ...]] = {"dp": (), "zero": ("update",), "fsdp": ("storage", "update")}


def partition(axes: tuple[str, ...], rules: AxisRules, policy: str, layout: Layout) -> PartitionSpec:
    """Partition of a parameter with these logical axes; a dimension may be divided by two mesh axes.

    The spec has one entry per dimension, so that it can be compared and printed without padding.
    """
    entries: list[list[str]] = [["tensor"] if a in rules.tensor else [] for a in axes]
    if layout in DIVIDED_BY_FSDP[policy]:
        dim = storage_dim(axes, rules)
        if dim is not None:
            entries[dim].append("fsdp")
    return PartitionSpec(*(None if not e else e[0] if len(e) == 1 else tuple(e) for e in entries))


def storage_dim(axes: tuple[str, ...], rules: AxisRules) -> int | None:
    """The dimension that ZeRO and FSDP divide, whether the policy does so or not; None: the parameter has none."""
    chosen = next((a for a in rules.storage_axes if a in axes), None)
    return None if chosen is None else axes.index(chosen)


def only_axes(spec: PartitionSpec, mesh_axes: tuple[str, ...]) -> PartitionSpec:
    """The same partition, whole over all mesh axes but these."""

    def keep(entry):
        names = [n for n in ((entry,) if isinstance(entry, str) else entry or ()) if n in mesh_axes]
        return None if not names else names[0] if len(names) == 1 else tuple(names)

    return PartitionSpec(*(keep(e) for e in spec))


def without_fsdp(spec: PartitionSpec) -> PartitionSpec:
    """The same partition, whole over the fsdp axis."""
    return only_axes(spec, ("data", "tensor"))


def stacked_matrices(num_matrices: int, mesh: MeshShape) -> PartitionSpec:
    """Layout (matrices, rows, columns) of whole matrices over the devices that share state: by number, as far as that divides.

    For work on each matrix as a whole, as Muon's: divided matrices would need a sum over devices for every product.
    """
    choices = (("fsdp", "tensor"), ("fsdp",), ("tensor",), ())
    names = next(c for c in choices if num_matrices % math.prod(mesh.size(n) for n in c) == 0)
    return PartitionSpec(names or None, None, None)

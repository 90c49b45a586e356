"""Who holds what: the grid of devices, the shards of one parameter and of the batch, and bytes by strategy. Needs no devices.

Devices are numbered as in the mesh: data slowest, tensor fastest.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import PartitionSpec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sharder.config import ParallelConfig, UserError
from sharder.sharding.axes import ParamDecl
from sharder.sharding.mesh import AXES, REPLICA_AXES, MeshShape
from sharder.sharding.plan import LeafPlan, Plan, divisor, make_plan
from sharder.sharding.policy import LAYOUTS, Layout

Slices = tuple[tuple[int, int], ...]
"""Start and stop in each dimension."""

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "white", "bright_black")


@dataclass(frozen=True)
class Shard:
    """A part of an array, and the devices that hold a copy of it."""

    slices: Slices
    devices: tuple[int, ...]

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in self.slices) + "]"


def coordinates(mesh: MeshShape) -> list[dict[str, int]]:
    """Of each device, by its number, its place along each mesh axis."""
    return [dict(zip(AXES, at)) for at in itertools.product(*(range(mesh.size(axis)) for axis in AXES))]


def device_slices(shape: tuple[int, ...], spec: PartitionSpec, mesh: MeshShape, at: Mapping[str, int]) -> Slices:
    """What the device at these coordinates holds; the dimensions must divide."""
    found = []
    for size, entry in zip(shape, (*spec, *[None] * (len(shape) - len(spec)))):
        index = 0
        for axis in () if entry is None else (entry,) if isinstance(entry, str) else entry:
            index = index * mesh.size(axis) + at[axis]
        piece = size // divisor(entry, mesh)
        found.append((index * piece, (index + 1) * piece))
    return tuple(found)


def shards(shape: tuple[int, ...], spec: PartitionSpec, mesh: MeshShape) -> list[Shard]:
    """The different parts of an array in the order of their first device."""
    holders: dict[Slices, list[int]] = {}
    for number, at in enumerate(coordinates(mesh)):
        holders.setdefault(device_slices(shape, spec, mesh, at), []).append(number)
    return [Shard(slices, tuple(devices)) for slices, devices in holders.items()]


def grid_table(mesh: MeshShape, held: list[Shard], title: str) -> Table:
    """The device grid, one row for each replica; a colour, and a number, for each part."""
    part = {device: number for number, shard in enumerate(held) for device in shard.devices}
    table = Table(title=title, box=box.ROUNDED, show_lines=True)
    table.add_column("data, fsdp")
    for tensor in range(mesh.tensor):
        table.add_column(f"tensor {tensor}", justify="center")
    for replica in range(mesh.num_replicas):
        row = []
        for device in range(replica * mesh.tensor, (replica + 1) * mesh.tensor):
            row.append(Text(f"device {device}\n{held[part[device]]}", style=COLOURS[part[device] % len(COLOURS)]))
        table.add_row(f"{replica // mesh.fsdp}, {replica % mesh.fsdp}", *row)
    copies = mesh.num_devices // len(held)
    table.caption = f"{len(held)} part(s), each on {copies} device(s)"
    return table


def find_leaf(plan: Plan, path: str | None) -> LeafPlan:
    """The parameter of that path; None: the largest. Raises UserError where there is none."""
    if path is None:
        return max(plan.leaves.values(), key=lambda leaf: math.prod(leaf.decl.shape))
    if path not in plan.leaves:
        raise UserError(f"--param is {path!r}, but the model has no such parameter; it has {', '.join(plan.leaves)}.")
    return plan.leaves[path]


def leaf_parts(plan: Plan, leaf: LeafPlan) -> dict[str, list[Shard]]:
    """Of each layout; layouts that are the same stand together."""
    found: dict[tuple, list[Layout]] = {}
    for layout in LAYOUTS:
        found.setdefault(tuple(leaf.spec(layout)), []).append(layout)
    return {", ".join(names): shards(leaf.decl.shape, PartitionSpec(*spec), plan.mesh) for spec, names in found.items()}


def batch_parts(slot_size: int, mesh: MeshShape) -> list[Shard]:
    """Examples of a batch of one slot over the replicas."""
    return shards((slot_size,), PartitionSpec(REPLICA_AXES), mesh)


def strategy_bytes(plan: Plan, parallel: ParallelConfig) -> dict[str, int]:
    """Bytes of one device for the parameters of this plan, always the same ones, divided in five ways over its devices.

    1-D divides the last dimension over all devices, 2-D the last two over a grid, whatever they are called; fsdp, and fsdp with
    tensor, go by the model's rules. A dimension that does not divide is whole.
    """
    devices = plan.mesh.num_devices
    columns = plan.mesh.tensor if plan.mesh.tensor > 1 else next((n for n in (2, 3, 5) if devices % n == 0), 1)
    rows = devices // columns
    decls = {path: leaf.decl for path, leaf in plan.leaves.items()}
    rules = replace(plan.rules, tensor=(*plan.rules.tensor, *plan.whole_over_tensor))

    def by_place(*factors: int) -> int:
        return sum(_bytes(decl, zip(reversed(decl.shape), reversed(factors))) for decl in decls.values())

    def by_rules(mesh: MeshShape) -> int:
        leaves = make_plan(decls, rules, replace(parallel, policy="fsdp"), mesh).leaves.values()
        return sum(_bytes(x.decl, zip(x.decl.shape, (divisor(entry, mesh) for entry in x.storage))) for x in leaves)

    return {
        "replicated": by_place(1),
        f"1-D: {devices}": by_place(devices),
        f"2-D: {rows} x {columns}": by_place(rows, columns),
        f"fsdp {devices}": by_rules(MeshShape(1, devices, 1)),
        f"fsdp {rows} x tensor {columns}": by_rules(MeshShape(1, rows, columns)),
    }


def _bytes(decl: ParamDecl, cuts: Iterable[tuple[int, int]]) -> int:
    """`cuts`: sizes of dimensions, and into how many pieces they are cut if they divide."""
    pieces = math.prod(factor for size, factor in cuts if size % factor == 0)
    return math.prod(decl.shape) * np.dtype(decl.dtype).itemsize // pieces


def bars(amounts: Mapping[str, int], title: str, width: int = 40) -> Table:
    """Horizontal bars, the longest `width` characters."""
    table, most = Table(title=title, box=box.SIMPLE), max(amounts.values())
    for heading in ("strategy", "", "bytes/device"):
        table.add_column(heading, justify="right" if heading == "bytes/device" else "left", no_wrap=True)
    for name, amount in amounts.items():
        table.add_row(name, "█" * max(1, round(width * amount / most)), f"{amount:,}")
    return table


def show(plan: Plan, parallel: ParallelConfig, slot_size: int, path: str | None) -> RenderableType:
    """The grid with the parts of a parameter in each layout and of the batch, and the bars."""
    leaf, mesh = find_leaf(plan, path), plan.mesh
    what = f"{leaf.path} " + " x ".join(f"{axis} {size}" for axis, size in zip(leaf.decl.axes, leaf.decl.shape))
    grids = [grid_table(mesh, held, f"{what}: {layout}") for layout, held in leaf_parts(plan, leaf).items()]
    batch = grid_table(mesh, batch_parts(slot_size, mesh), f"batch: {slot_size} examples of a slot")
    return Group(*grids, batch, bars(strategy_bytes(plan, parallel), f"parameters on {mesh.num_devices} devices, by strategy"))

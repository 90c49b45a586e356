"""The plan: every sharding of a run, derived from policy x mesh x the parameters that a model declares.

A plan needs no devices, so it can be made and explained for a machine that is not there.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharder.config import ParallelConfig
from sharder.sharding.axes import AxisRules, ParamDecl, check_axes, check_rules
from sharder.sharding.mesh import MeshShape
from sharder.sharding.policy import LAYOUTS, Layout, partition, without_fsdp

SMALL_ELEMENTS = 1 << 20
"""A parameter of fewer elements than this stays whole where its dimension is shorter than the number of pieces: the biases of
gpt's projections (head_dim 64) on 256 devices. A larger one is a finding."""

MIN_SHARD_ELEMENTS = 2
"""A parameter that fsdp would cut to shards of fewer elements stays whole: code for a single element is compiled in another
way, and AdamW then has other bits (exact mode)."""


def divisor(entry: str | tuple[str, ...] | None, mesh: MeshShape) -> int:
    """Into how many pieces one entry of a PartitionSpec cuts its dimension."""
    names = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return math.prod(mesh.size(n) for n in names)


def bytes_per_device(shape: tuple[int, ...], dtype: str, spec: PartitionSpec, mesh: MeshShape) -> int:
    """Bytes of one device's shard; the dimensions must divide."""
    pieces = math.prod(divisor(e, mesh) for e in spec)
    return math.prod(shape) * np.dtype(dtype).itemsize // pieces


@dataclass(frozen=True)
class LeafPlan:
    """One parameter and its three layouts."""

    path: str
    decl: ParamDecl
    small: bool
    """Whole because of MIN_SHARD_ELEMENTS or SMALL_ELEMENTS, or by the model's permission."""
    storage: PartitionSpec
    compute: PartitionSpec
    update: PartitionSpec

    @property
    def divided(self) -> bool:
        """Whether the fsdp axis divides it, at least for the update."""
        return any("fsdp" in (entry or ()) for entry in self.update)

    def spec(self, layout: Layout) -> PartitionSpec:
        return getattr(self, layout)


@dataclass(frozen=True)
class Indivisible:
    """A dimension that does not divide as its layout says."""

    path: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    axis: str
    dim_size: int
    factor: int
    by_fsdp: bool
    """Whether the fsdp axis takes part; otherwise tensor parallelism alone."""


@dataclass(frozen=True)
class Plan:
    """Layouts of all parameters, by path."""

    policy: str
    mesh: MeshShape
    rules: AxisRules
    """The model's, but for the axes in `whole_over_tensor`."""
    leaves: Mapping[str, LeafPlan]
    whole_over_tensor: Mapping[str, int] = field(default_factory=dict)
    """Axes, with their sizes, that tensor parallelism leaves whole on purpose, since its degree does not divide them."""

    def indivisible(self) -> list[Indivisible]:
        """Every dimension that a layout cannot divide evenly; a run needs this list empty."""
        return [
            Indivisible(leaf.path, leaf.decl.shape, leaf.spec(layout), axis, size, factor, "fsdp" in (entry or ()))
            for leaf in self.leaves.values()
            for layout in ("update", "storage")
            if layout == "update" or leaf.storage != leaf.update
            for axis, size, entry in zip(leaf.decl.axes, leaf.decl.shape, leaf.spec(layout))
            if size % (factor := divisor(entry, self.mesh))
        ]

    def undivided(self) -> list[str]:
        """Parameters that stay whole on every replica although the policy divides parameters, and are not too small to divide."""
        if self.policy == "dp" or self.mesh.fsdp == 1:
            return []
        return [p for p, leaf in self.leaves.items() if not leaf.small and not leaf.divided]

    def shardings(self, layout: Layout, mesh: Mesh) -> dict[str, NamedSharding]:
        return {path: NamedSharding(mesh, leaf.spec(layout)) for path, leaf in self.leaves.items()}

    def param_bytes_per_device(self, layout: Layout, without: Collection[str] = (), dtype: str | None = None) -> int:
        """Of all parameters but those whose paths are in `without`, in their own dtypes or in `dtype`."""
        leaves = (x for path, x in self.leaves.items() if path not in without)
        return sum(bytes_per_device(x.decl.shape, dtype or x.decl.dtype, x.spec(layout), self.mesh) for x in leaves)


def is_small(decl: ParamDecl, factors: list[int], optional: Collection[str]) -> bool:
    """Whether a parameter is too small to be cut into so many pieces along its dimensions, or may stay whole where the axis
    that would be cut does not divide."""
    size, dims = math.prod(decl.shape), list(zip(decl.axes, decl.shape, factors))
    too_short = any(n < factor for _, n, factor in dims) and size < SMALL_ELEMENTS
    return (
        size < MIN_SHARD_ELEMENTS * math.prod(factors)
        or too_short
        or any(a in optional and n % factor for a, n, factor in dims)
    )


def make_plan(decls: Mapping[str, ParamDecl], rules: AxisRules, parallel: ParallelConfig, mesh: MeshShape) -> Plan:
    """Raises ValueError for an axis name that the model's rules do not know, and for two axes on one mesh axis."""
    check_rules(rules)
    for path, decl in decls.items():
        check_axes(path, decl, rules)
    sizes = {axis: size for decl in decls.values() for axis, size in zip(decl.axes, decl.shape)}
    whole = {axis: sizes[axis] for axis in rules.replicable if axis in sizes and sizes[axis] % mesh.tensor}
    rules = rules.without_tensor(whole)
    leaves = {}
    for path, decl in decls.items():
        specs = {layout: partition(decl.axes, rules, parallel.policy, layout) for layout in LAYOUTS}
        small = mesh.fsdp > 1 and is_small(decl, [divisor(entry, mesh) for entry in specs["update"]], rules.optional)
        if small or path in parallel.replicate:
            specs = {layout: without_fsdp(spec) for layout, spec in specs.items()}
        leaves[path] = LeafPlan(path, decl, small, **specs)
    return Plan(parallel.policy, mesh, rules, leaves, whole)

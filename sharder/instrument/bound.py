"""The least that a layout must communicate, and where a compiled step moves more.

The bound follows the table of layouts (sharder.sharding.policy). Per step and device, with f devices on fsdp, d on data,
n = d f replicas, t on tensor, S accumulation slots, G bytes of gradients and P of parameters after division by tensor:

    dp      one reduction of the gradients                          2 (n-1)/n G
    zero    reduce-scatter over fsdp, all-reduce of the parts over data, gather of the new parameters
                                                                    (f-1)/f G + 2 (d-1)/d G/f + (f-1)/f P
    fsdp    the same reduction; blocks gathered in the forward and again in the backward pass, the rest once, in the
            compute dtype, in every slot                            S (f-1)/f (2 blocks + rest)
    tensor  for each pair of column- and row-divided weights an all-reduce of the activations in the forward and one in the
            backward pass (Megatron-LM, arXiv:1909.08053, section 3)  S x pairs x 2 x 2 (t-1)/t x activations

Gradients are summed in float32, whatever the dtypes; a frozen parameter has none, and is never new.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from sharder.instrument.collectives import Collective, Traffic
from sharder.sharding.mesh import REPLICA_AXES, MeshShape
from sharder.sharding.plan import LeafPlan, Plan, bytes_per_device

TOLERANCE = 1.05
NEGLIGIBLE_BYTES = 1 << 16
"""Losses, norms, fingerprints: too little to be a matter of layout."""

GATHER, REDUCE, TENSOR, OTHER = "gather parameters", "reduce gradients", "sum over tensor", "other"


@dataclass(frozen=True)
class Purpose:
    """One reason to communicate: the bound, and what the program moves for it."""

    name: str
    bound_bytes: float
    across_bound_bytes: float
    """The part of the bound that crosses hosts."""
    collectives: tuple[Collective, ...]

    @property
    def received_bytes(self) -> float:
        return sum(c.received_bytes for c in self.collectives)

    @property
    def across_bytes(self) -> float:
        return sum(c.across_bytes for c in self.collectives)

    @property
    def exceeds(self) -> bool:
        return self.received_bytes > TOLERANCE * self.bound_bytes and self.received_bytes - self.bound_bytes > NEGLIGIBLE_BYTES


Bounds = dict[tuple[str, tuple[str, ...]], float]
"""Bytes that a device receives per step at least, by purpose and mesh axes."""


def lower_bounds(plan: Plan, compute_dtype: str, num_slots: int, tokens_per_slot: int, frozen: Collection[str] = ()) -> Bounds:
    """`tokens_per_slot`: of one replica. `frozen`: parameters without gradients."""
    mesh, itemsize = plan.mesh, np.dtype(compute_dtype).itemsize
    f, d, n, t = mesh.fsdp, mesh.data, mesh.num_replicas, mesh.tensor
    gather = scatter = over_data = over_all = pairs_bytes = 0.0
    for path, leaf in plan.leaves.items():
        dtypes = (leaf.decl.dtype, compute_dtype, "float32")
        own, narrow, wide = (bytes_per_device(leaf.decl.shape, dtype, leaf.compute, mesh) for dtype in dtypes)
        gradient = 0 if path in frozen else wide
        if leaf.divided:
            scatter += (f - 1) / f * gradient
            over_data += 2 * (d - 1) / d * gradient / f
            if plan.policy == "fsdp":
                gather += num_slots * (2 if leaf.decl.axes[0] == "layers" else 1) * (f - 1) / f * narrow
            elif path not in frozen:
                gather += (f - 1) / f * own
        else:
            over_all += 2 * (n - 1) / n * gradient
        if closes_pair(leaf):
            num_layers = leaf.decl.shape[0] if leaf.decl.axes[0] == "layers" else 1
            pairs_bytes += num_layers * tokens_per_slot * leaf.decl.shape[-1] * itemsize
    return {
        (GATHER, ("fsdp",)): gather,
        (REDUCE, ("fsdp",)): scatter,
        (REDUCE, ("data",)): over_data,
        (REDUCE, REPLICA_AXES): over_all,
        (TENSOR, ("tensor",)): num_slots * 2 * 2 * (t - 1) / t * pairs_bytes,
    }


def closes_pair(leaf: LeafPlan) -> bool:
    """Whether a weight's product is a partial sum over tensor: the axis divides what is contracted, its first dimension."""
    first = 1 if leaf.decl.axes[0] == "layers" else 0
    divided = ["tensor" in ((e,) if isinstance(e, str) else e or ()) for e in leaf.compute]
    return len(divided) > first and divided[first] and leaf.decl.axes[-1] == "embed"


def hosts_of_axes(axes: tuple[str, ...], mesh: MeshShape, devices_per_host: int) -> tuple[int, int]:
    """Members and hosts of a group along these mesh axes, tensor fastest and data slowest."""
    stride = {"tensor": 1, "fsdp": mesh.tensor, "data": mesh.tensor * mesh.fsdp}
    size, first = math.prod(mesh.size(a) for a in axes), min(stride[a] for a in axes)
    members = max(1, min(size, devices_per_host // first))
    return size, -(-size // members)


def across_share(axes: tuple[str, ...], mesh: MeshShape, devices_per_host: int) -> float:
    """The part of what a device receives along these axes that crosses hosts at least: what a host lacks, shared among its
    members."""
    size, hosts = hosts_of_axes(axes, mesh, devices_per_host)
    return 0.0 if hosts == 1 else (hosts - 1) / hosts / (size / hosts) / ((size - 1) / size)


def purpose(c: Collective) -> str:
    """Told by kind and mesh axis."""
    if set(c.axes) <= set(REPLICA_AXES):
        return GATHER if c.is_gather else REDUCE if c.kind in ("reduce-scatter", "all-reduce") else OTHER
    return TENSOR if c.axes == ("tensor",) else OTHER


def compare(
    traffic: Traffic, bounds: Bounds, mesh: MeshShape, devices_per_host: int, purpose: Callable[[Collective], str] = purpose
) -> list[Purpose]:
    """What the program moves for each purpose."""
    found = []
    for name in (GATHER, REDUCE, TENSOR, OTHER):
        least = {axes: b for (of, axes), b in bounds.items() if of == name}
        across = sum(b * across_share(axes, mesh, devices_per_host) for axes, b in least.items())
        found.append(Purpose(name, sum(least.values()), across, tuple(c for c in traffic.collectives if purpose(c) == name)))
    return found


def warnings(plan: Plan, purposes: list[Purpose]) -> list[str]:
    """One line for each purpose that moves more than 1.05 x its bound, naming the operation that moves most and its scope."""
    found = []
    for p in purposes:
        if not p.exceeds:
            continue
        ratio = (
            f"{p.received_bytes / p.bound_bytes:.2f} x the bound of {mib(p.bound_bytes)}"
            if p.bound_bytes
            else "where the layout needs nothing"
        )
        named = "; ".join(
            f"{c.kind} %{c.name} over {'+'.join(c.axes)}, {c.executions} x {mib(c.bytes_each)}, in {c.scope}"
            for c in suspects(p)
        )
        line = f"{p.name}: {mib(p.received_bytes)} per step, {ratio}: {named}"
        if p.name == REDUCE and whole_sums(plan, p):
            line += ". This backend formed no reduce-scatter: it sums whole gradients and slices them"
        found.append(line)
    return found


def suspects(p: Purpose) -> list[Collective]:
    """The operations that are about as large as what is too much; where none is, the largest."""
    excess = p.received_bytes - p.bound_bytes
    close = [c for c in p.collectives if abs(c.received_bytes - excess) <= 0.05 * excess]
    return close or [max(p.collectives, key=lambda c: c.received_bytes)]


def whole_sums(plan: Plan, reduce: Purpose) -> bool:
    """Whether gradients that should be divided are summed whole."""
    divides = any(leaf.divided for leaf in plan.leaves.values()) and plan.mesh.fsdp > 1
    return divides and not any(c.kind == "reduce-scatter" for c in reduce.collectives)


def mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"

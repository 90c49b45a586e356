"""A step's time from its arithmetic, its memory traffic and its links (Williams et al., "Roofline", CACM 52(4), 2009).

Every product takes the longer of its arithmetic at peak rate and its operands and result at memory bandwidth; what else
stores takes its bytes; the update reads and writes the state once. Bytes on links take their bandwidth, at full rate in one
direction. All of it at best: a real step is slower, and how communication overlaps is not known, so both ends are given.
"""

import math
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from sharder.instrument.bound import Bounds, across_share
from sharder.instrument.hardware import Accelerator
from sharder.instrument.liveness import STORES, Equation, flat, size_of
from sharder.sharding.mesh import MeshShape


@dataclass(frozen=True)
class Work:
    """Of one device and step."""

    flops: float
    """Matrix products, those computed again for the backward pass among them."""
    memory_bytes: float
    compute_s: float | None
    """Each product and each store at the slower of its two limits; None where a rate is unknown."""


@dataclass(frozen=True)
class StepTime:
    compute_s: float
    inside_s: float
    across_s: float

    @property
    def hidden_s(self) -> float:
        """All communication overlaps with computation."""
        return max(self.compute_s, self.inside_s, self.across_s)

    @property
    def exposed_s(self) -> float:
        """None does."""
        return self.compute_s + self.inside_s + self.across_s


def product_flops(e: Equation) -> float:
    """2 x rows x columns x contracted of a dot_general."""
    (contracted, _), _ = e.params["dimension_numbers"]
    left = e.inputs[0].aval.shape
    return 2.0 * math.prod(e.outputs[0].aval.shape) * math.prod(left[i] for i in contracted)


def count_work(
    share: ClosedJaxpr, num_slots: int, update_bytes: int, accelerator: Accelerator | None, compute_dtype: str
) -> Work:
    """`share`: one slot's share of a device; `update_bytes`: what the update reads and writes."""
    peak = accelerator.peak_flops.get(compute_dtype) if accelerator else None
    bandwidth = accelerator.memory_bytes_per_s if accelerator else None
    flops, moved, seconds = _count(share.jaxpr, peak or math.inf, bandwidth or math.inf)
    known = peak is not None and bandwidth is not None
    total = num_slots * seconds + (update_bytes / bandwidth if bandwidth else 0.0)
    return Work(num_slots * flops, num_slots * moved + update_bytes, total if known else None)


def _count(jaxpr: Jaxpr, peak: float, bandwidth: float) -> tuple[float, float, float]:
    """FLOPs, bytes and seconds."""
    flops = moved = seconds = 0.0
    for e in flat(jaxpr)[0]:
        if e.name in ("scan", "while", "cond"):
            body = (
                e.params["jaxpr"]
                if e.name == "scan"
                else e.params["body_jaxpr"]
                if e.name == "while"
                else e.params["branches"][-1]
            )
            inner = _count(body.jaxpr, peak, bandwidth)
            times = e.params.get("length", 1)
            flops, moved, seconds = flops + times * inner[0], moved + times * inner[1], seconds + times * inner[2]
        elif e.name in STORES:
            size = sum(size_of(v) for v in [*e.outputs, *(v for v in e.inputs if not isinstance(v, Literal))])
            work = product_flops(e) if e.name == "dot_general" else 0.0
            flops, moved, seconds = flops + work, moved + size, seconds + max(work / peak, size / bandwidth)
    return flops, moved, seconds


def split_bounds(bounds: Bounds, mesh: MeshShape, devices_per_host: int) -> tuple[float, float]:
    """Bytes inside and across hosts of what a layout must move at least."""
    inside = across = 0.0
    for (_, axes), received in bounds.items():
        crossing = received * across_share(axes, mesh, devices_per_host)
        across, inside = across + crossing, inside + received - crossing
    return inside, across


def predict(work: Work, inside_bytes: float, across_bytes: float, accelerator: Accelerator) -> StepTime | None:
    """None where a rate that the step needs is unknown."""
    rates = ((inside_bytes, accelerator.inside_bytes_per_s), (across_bytes, accelerator.across_bytes_per_s))
    if work.compute_s is None or any(size and not rate for size, rate in rates):
        return None
    inside, across = (size / rate if size else 0.0 for size, rate in rates)
    return StepTime(work.compute_s, inside, across)

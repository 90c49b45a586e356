"""Memory of a step per device: predicted before compiling, read from the compiled program, measured where a device tells.

State and batch are exact. What lies between is the worst moment of one device's share of a slot (`sharder.instrument.share`,
`sharder.instrument.liveness`), or of the update where that needs more:

    total = parameters + optimizer state + moving average + batch + max(accumulators + slot, gradients + gathered parameters)

With bfloat16 parameters and AdamW the state of a parameter is 2 bytes, its gradient 2 and its two float32 moments 8.

Exact mode (sharder.train.exact): beside the state a whole copy of the parameters under fsdp, what one virtual worker needs,
its whole gradient among it, and log2(V/n) + 1 float32 accumulators in the update layout.
"""

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial

import jax
import numpy as np

from sharder.instrument.liveness import Moment, worst_moment
from sharder.instrument.share import local_shape, trace_share
from sharder.models.build import Declared
from sharder.sharding.plan import Plan, bytes_per_device
from sharder.sharding.policy import Layout
from sharder.sharding.show import StateLeaves

Shapes = Mapping[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    params: int
    opt_state: int
    ema: int
    batch: int
    gradients: int
    activations: int
    """Kept from the forward for the backward pass."""
    temporary: int
    communication: int
    """Gathered weights, and gradients on their way."""

    @property
    def state(self) -> int:
        return self.params + self.opt_state + self.ema

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))

    @property
    def scratch(self) -> int:
        """All but state and batch."""
        return self.total - self.state - self.batch


def state_bytes(state: StateLeaves, plan: Plan) -> dict[str, int]:
    """Exact bytes at rest of `params`, `opt_state` and `ema`; the step counter counts to the optimizer."""
    found = {"params": 0, "opt_state": 0, "ema": 0}
    for path, (shape, dtype, spec) in state.items():
        part = path.split("/")[0]
        found[part if part in found else "opt_state"] += bytes_per_device(shape, dtype, spec, plan.mesh)
    return found


def estimate_memory(declared: Declared, plan: Plan, state: StateLeaves, batch: Shapes, num_slots: int) -> Memory:
    """Of the declarative step. `batch`: the examples of one replica in one slot."""
    gradient: Layout = "update" if num_slots == 1 else "storage"
    moment = worst_moment(trace_share(declared, plan, batch, gradient).jaxpr)
    wide = partial(plan.param_bytes_per_device, without=declared.frozen, dtype="float32")
    accumulators = 0 if num_slots == 1 else wide("storage")
    # The update holds gradients in the update layout, and under zero the whole new parameters while they are gathered.
    update = plan.param_bytes_per_device("update", declared.frozen) if num_slots == 1 else accumulators
    gathered = plan.param_bytes_per_device("storage", declared.frozen) if plan.policy == "zero" and plan.mesh.fsdp > 1 else 0
    known = {**state_bytes(state, plan), "batch": num_slots * _nbytes(batch)}
    if update + gathered > accumulators + moment.total_bytes:
        return Memory(**known, gradients=update, activations=0, temporary=0, communication=gathered)
    return Memory(**known, **_parts(moment, plan, gradient, accumulators))


def estimate_exact_memory(
    declared: Declared, plan: Plan, state: StateLeaves, batch: Shapes, num_slots: int, num_microbatches: int, lean: bool = False
) -> Memory:
    """Of a step of exact mode, with a whole copy of the parameters and one whole gradient, or (`lean`) one block at a time.
    `batch`: one microbatch of a virtual worker; `num_slots`: virtual workers of each replica."""
    gradient: Layout = "update" if lean else "compute"
    moment = worst_moment(trace_share(declared, plan, batch, gradient, gathers=lean).jaxpr)
    wide = partial(plan.param_bytes_per_device, without=declared.frozen, dtype="float32")
    accumulators = (int(math.log2(num_slots)) + 1) * wide("update")
    accumulators += wide(gradient) if num_microbatches > 1 else 0
    copy = plan.param_bytes_per_device("compute") if not lean and plan.policy == "fsdp" and plan.mesh.fsdp > 1 else 0
    parts = _parts(moment, plan, gradient, accumulators)
    parts["communication"] += copy
    return Memory(**state_bytes(state, plan), batch=num_slots * num_microbatches * _nbytes(batch), **parts)


def _nbytes(batch: Shapes) -> int:
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in batch.values())


def _parts(moment: Moment, plan: Plan, gradient: Layout, accumulators: int) -> dict[str, int]:
    """The worst moment by what its buffers are for."""
    shapes = {local_shape(leaf, plan, gradient) for leaf in plan.leaves.values()}
    found = {"gradients": accumulators, "activations": 0, "temporary": 0, "communication": 0}
    for b in moment.buffers:
        if b.origin in ("gather_weights", "scatter_gradients"):
            part = "communication"
        elif b.origin == "scan" and not b.in_loop:
            part = "gradients" if b.shape in shapes else "activations"
        else:
            part = "temporary"
        found[part] += b.size_bytes
    # Buffers reused in place are counted once in the total.
    found["temporary"] += accumulators + moment.total_bytes - sum(found.values())
    return found


def compiled_bytes(compiled: jax.stages.Compiled) -> int:
    """Arguments, results that take no argument's place, and scratch, of one device."""
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def measured_bytes(device: jax.Device) -> int | None:
    """The most that this device has held since the process began, or None where the backend does not count (CPU)."""
    stats = device.memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")


def largest_microbatch(total: Callable[[int], int], choices: list[int], limit_bytes: int) -> int | None:
    """The largest of ascending `choices` whose `total` bytes fit, or None where not even the first does."""
    low, high = 0, len(choices)  # choices[:low] fit, choices[high:] do not
    known: dict[int, int] = {}
    for at in (0, len(choices) - 1):
        if low <= at < high:
            known[at] = total(choices[at])
            low, high = (at + 1, high) if known[at] <= limit_bytes else (low, at)
    while low < high:
        # Nearly a straight line: guess by the two ends, and check.
        (a, size_a), (b, size_b) = sorted(known.items())[0], sorted(known.items())[-1]
        slope = max(size_b - size_a, 1) / (choices[b] - choices[a])
        guess = choices[a] + (limit_bytes - size_a) / slope
        at = min(max(bisect.bisect_right(choices, guess) - 1, low), high - 1)
        known[at] = total(choices[at])
        low, high = (at + 1, high) if known[at] <= limit_bytes else (low, at)
    return choices[low - 1] if low else None

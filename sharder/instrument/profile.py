"""Where the time of a step goes: the shares of a trace, in a step timed without the profiler, against analytic FLOPs.

Three things make a naive profile wrong. The profiler stretches what it watches, and on several threads operations overlap: so a
step takes the median of *blocked* steps outside of the profiler, and the trace gives proportions only. On CPU operations go on
after their calls have returned: so they last until their ends are marked. And the compiler's count of FLOPs has loops once: so
FLOPs are analytic. The wrong ways are kept beside the right ones.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sharder.config import UserError
from sharder.instrument.attribution import Attribution, Part
from sharder.instrument.collectives import Traffic, read_traffic
from sharder.instrument.dots import program_flops
from sharder.instrument.hlo import Program, parse
from sharder.instrument.scopes import CATEGORIES, KIND_ORDER
from sharder.instrument.trace import Trace, exposed_share, share_out


@dataclass(frozen=True)
class CompiledProgram:
    """One of the programs of a step."""

    name: str
    text: str
    runs: int
    """In a step, over all devices."""
    counted_flops: float | None
    """What the compiler's cost analysis says of one run, loops once; None where it says nothing."""


class Programs:
    """All programs of a step, by the name that the trace knows them by."""

    def __init__(self, programs: Sequence[CompiledProgram], mesh: Mapping[str, int], hosts: Sequence[int]):
        self.programs, self._by_module = programs, {}
        for program in programs:
            parsed = parse(program.text)
            traffic = read_traffic(program.text, mesh, hosts)
            axes = {c.name: "+".join(c.axes) for c in traffic.collectives}
            self._by_module[program.text.split()[1].rstrip(",")] = (program, parsed, Attribution(parsed, axes), traffic)

    def attribution(self, module: str, op: str) -> Attribution | None:
        """Of the program that has this operation; None for an operation of another program."""
        if module in self._by_module:
            found = self._by_module[module][2]
            return found if found.knows(op) else None
        if module:
            return None
        return next((found[2] for found in self._by_module.values() if found[2].knows(op)), None)

    def is_container(self, module: str, op: str) -> bool:
        found = self.attribution(module, op)
        return found is not None and found.is_container(op)

    def each(self) -> Iterator[tuple[CompiledProgram, Program, Attribution, Traffic]]:
        yield from self._by_module.values()

    @property
    def modules(self) -> str:
        return ", ".join(self._by_module)

    def is_collective(self, module: str, op: str) -> bool:
        found = self.attribution(module, op)
        return found is not None and any(part.kind == "collective" for part in found.split(op))

    @property
    def flops(self) -> float:
        """Matrix products of a step over all devices, as compiled."""
        return sum(program.runs * program_flops(parsed) for program, parsed, *_ in self._by_module.values())

    @property
    def counted_flops(self) -> float | None:
        """By the compiler's own count."""
        counts = [(p.runs, p.counted_flops) for p in self.programs]
        return None if any(c is None for _, c in counts) else sum(runs * c for runs, c in counts)


@dataclass(frozen=True)
class Timing:
    """Steps outside of the profiler, each waited for, in seconds."""

    steps_s: list[float]
    """From asking for the batch to the last result."""
    waits_s: list[float]
    """For the batch."""
    dispatch_s: list[float]
    """Until the host was free again."""

    @property
    def step_time_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def data_wait_s(self) -> float:
        return statistics.median(self.waits_s)


@dataclass(frozen=True)
class Shares:
    """Of a step; each mapping sums to 1."""

    categories: dict[str, float]
    kinds: dict[str, float]
    parts: dict[Part, float]
    """The finest split, without data wait and idle."""
    coverage: dict[str, float]
    """Busy seconds of every device, as traced, in a blocked step."""
    calls: dict[str, float]
    """`categories` where operations are taken to end with their calls: what goes on in other threads is idle time."""
    coverage_of_calls: float
    """The least coverage of those."""
    traced_sum_s: float
    """The naive step: durations of all calls, added up, per device."""
    traced_step_s: float
    """The median step while the profiler watched."""
    collective_s: float
    """Traced per device, with the time in which it waited for others."""
    exposed_share: float | None
    """Of the time of collectives, the share that nothing else hides."""

    @property
    def least_coverage(self) -> float:
        return min(self.coverage.values())


def measure_shares(trace: Trace, programs: Programs, timing: Timing) -> Shares:
    """Raises UserError for a trace of another program."""
    num_steps, calls = len(trace.steps), trace.calls
    parts, rest, coverage, collective_s = _in_a_step(trace, programs, timing)
    parts_of_calls, rest_of_calls, coverage_of_calls, _ = _in_a_step(calls, programs, timing)
    return Shares(
        categories=_ordered(_total(parts, "category") | rest, CATEGORIES),
        kinds=_ordered(_total(parts, "kind") | rest, KIND_ORDER),
        parts=parts,
        coverage=coverage,
        calls=_ordered(_total(parts_of_calls, "category") | rest_of_calls, CATEGORIES),
        coverage_of_calls=min(coverage_of_calls.values()),
        traced_sum_s=sum(e.end_s - e.start_s for e in calls.events) / num_steps / len(coverage),
        traced_step_s=statistics.median(end - start for start, end in trace.steps),
        collective_s=collective_s,
        exposed_share=exposed_share(trace, programs.is_collective, programs.is_container),
    )


def _in_a_step(trace: Trace, programs: Programs, timing: Timing) -> tuple[dict, dict, dict, float]:
    """Shares of parts, shares of data wait and idle, coverage by device, and seconds of collectives per device."""
    busy, num_steps = share_out(trace, programs.is_container), len(trace.steps)
    known: dict[Part, float] = defaultdict(float)
    foreign, unknown, busy_s = 0.0, set(), dict.fromkeys(busy, 0.0)
    for device, operations in busy.items():
        for (module, op), seconds in operations.items():
            found = programs.attribution(module, op)
            if found is not None and found.is_only_control(op):
                continue  # between two operations of a loop: nothing is computed
            busy_s[device] += seconds
            if found is None:
                foreign, unknown = foreign + seconds, unknown | {module}
                continue
            for part, share in found.split(op).items():
                known[part] += share * seconds
    total = sum(known.values()) + foreign
    if not known or foreign > 0.5 * total:
        raise UserError(
            f"the trace is of another program: {foreign / total:.0%} of its device time is in {', '.join(sorted(unknown)) or 'unnamed modules'},"
            f" and none of that in {programs.modules}. Record it again with the same recipe and options."
        )
    if foreign:
        known[Part("unattributed", "other", "", "forward")] += foreign
    devices = len(busy)
    coverage = {d: seconds / num_steps / timing.step_time_s for d, seconds in busy_s.items()}
    wait = min(timing.data_wait_s / timing.step_time_s, 1.0)
    # A profiler only slows down: where it saw shorter steps, the machine was slower without it, and no device idle for that.
    shorter = min(timing.step_time_s, sum(end - start for start, end in trace.steps) / num_steps)
    busy_share = min(sum(busy_s.values()) / devices / num_steps / shorter, 1.0 - wait)
    parts = {part: busy_share * seconds / total for part, seconds in known.items()}
    rest = {"data wait": wait, "idle": max(0.0, 1.0 - wait - busy_share)}
    collective_s = sum(seconds for part, seconds in known.items() if part.kind == "collective") / num_steps / devices
    return parts, rest, coverage, collective_s


def _total(parts: Mapping[Part, float], field: str) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for part, share in parts.items():
        found[getattr(part, field)] += share
    return dict(found)


def _ordered(shares: dict[str, float], order: Sequence[str]) -> dict[str, float]:
    place = lambda name: next((i for i, o in enumerate(order) if name.startswith(o)), len(order))  # noqa: E731
    return {name: shares[name] for name in sorted(shares, key=lambda n: (place(n), n))}


def direction_shares(shares: Shares) -> dict[str, float]:
    """Forward, backward and what is computed again, of the attributed device time."""
    found, total = _total(shares.parts, "direction"), sum(shares.parts.values())
    return {name: found.get(name, 0.0) / total for name in ("forward", "backward", "recomputed")}


VERDICTS = {
    "compute": ("matrix product",),
    "bandwidth": ("elementwise", "reduction", "copy", "other"),
    "communication": ("collective",),
    "input": ("data wait",),
    "host": ("idle",),
}
ADVICE = {
    "compute": "matrix products take the most: only more or faster devices help",
    "bandwidth": "work that only moves bytes takes the most: fuse it, or use a fused attention",
    "communication": "waiting for other devices takes the most: larger batches per device, or another policy",
    "input": "waiting for data takes the most: raise --data.prefetch, or make reading cheaper",
    "host": "the devices stand still: the host is too slow to feed them, or the trace misses operations",
}


def verdict(kinds: Mapping[str, float]) -> tuple[str, float]:
    """What bounds the step, and the share of the step that it takes."""
    totals = {bound: sum(kinds.get(kind, 0.0) for kind in of) for bound, of in VERDICTS.items()}
    bound = max(totals, key=totals.get)
    return bound, totals[bound]

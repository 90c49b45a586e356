"""A trace of steps: recorded by jax.profiler, read by its own ProfileData, and its time shared out over operations.

Events of one device overlap where several threads work for it: every moment is shared equally by the operations that run at
that moment, so that the sum is the time in which the device was busy. A loop or a call contains what it runs: it counts only
where nothing else of its device does.

On CPU an operation may go on after the call that began it has returned: a matrix product hands its tiles to other threads.
XLA's ThunkExecutor marks the end by an event "end: NAME", whose consumer id is the producer id of the call. The thread that
finds an operation done goes on with those that waited for it before it marks the end: the operation ended where the first of
them began.
"""

import bisect
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.profiler import ProfileData

from sharder.config import UserError

STEP = "sharder step"
END = "end: "
GOES_ON = "ThunkExecutor::Execute"
TASK, TASK_DONE = "ThreadpoolListener::StartRegion", "ThreadpoolListener::StopRegion"
OTHERS = {STEP, GOES_ON, TASK, TASK_DONE, "ThreadpoolListener::Record"}
"""The most frequent events that are no operations: to read what each says takes longer than all the rest."""


@dataclass(frozen=True)
class Event:
    """One execution of one instruction, in seconds since the trace began."""

    start_s: float
    end_s: float
    device: str
    module: str
    op: str
    returned_s: float | None = None
    """When the call that began it returned, where that was before its end."""


@dataclass(frozen=True)
class Trace:
    events: list[Event]
    steps: list[tuple[float, float]]
    """Start and end of every step, as the host saw it."""

    @property
    def calls(self) -> "Trace":
        """Every operation until its call returned, and no longer: what a trace shows to somebody who looks at its bars."""
        until = lambda e: e if e.returned_s is None else replace(e, end_s=e.returned_s, returned_s=None)  # noqa: E731
        return Trace([until(e) for e in self.events], self.steps)


@contextmanager
def recording(folder: Path):
    """Records what is computed meanwhile, for TensorBoard too. Python's own calls are left out: they would slow the steps."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 2
    jax.profiler.start_trace(str(folder), profiler_options=options)
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def step_annotation(number: int):
    return jax.profiler.StepTraceAnnotation(STEP, step_num=number)


def newest(folder: Path) -> Path:
    """The last recorded trace. Raises UserError where there is none."""
    found = sorted(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise UserError(f"{folder} holds no trace: sharder profile RECIPE --run-dir DIR records one.")
    return found[-1]


def read(path: Path) -> Trace:
    """Operations of all devices, and the steps around them. Raises UserError where the file holds neither."""
    try:
        data = ProfileData.from_file(str(path))
        lines = [(plane.name, line.name, list(line.events)) for plane in data.planes for line in plane.lines]
        steps = [(e.start_ns / 1e9, e.end_ns / 1e9) for *_, events in lines for e in events if e.name == STEP]
        calls = [call for plane, line, events in lines for e in events for call in _operation(plane, line, e)]
        began = {producer: event.start_s for event, producer in calls if producer is not None}
        names = {GOES_ON} | {event.op for event, _ in calls}
        ends = {producer: end_s for *_, events in lines for producer, end_s in _ends(events, began, names)}
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as a trace: {str(error).splitlines()[0]}. Record it again with sharder profile."
        ) from None
    if not calls or not steps:
        raise UserError(
            f"{path} holds {len(steps)} steps and {len(calls)} operations of devices: it is no trace of sharder profile."
        )
    return Trace([until_its_end(event, ends.get(producer)) for event, producer in calls], sorted(steps))


def _ends(events: list, began: Mapping[int, float], names: set[str]) -> Iterator[tuple[int, float]]:
    """(producer id of a call, when it ended) for every end that a thread marks. `names`: of events that go on with others."""
    tasks: list[list[float]] = [[]]  # for each task within a task: when calls began in it
    for event in sorted(events, key=lambda e: (e.start_ns, -e.end_ns)):
        now = event.start_ns / 1e9
        if event.name == TASK:
            tasks.append([])
        elif event.name == TASK_DONE:
            tasks = tasks[:-1] or [[]]
        elif event.name.startswith(END):
            for producer in _stats(event, "_c").values():
                later = bisect.bisect_right(tasks[-1], began.get(producer, now))
                yield producer, min([now, *tasks[-1][later : later + 1]])
        elif event.name in names:
            tasks[-1].append(now)


def until_its_end(event: Event, ended_s: float | None) -> Event:
    """The whole operation, from its call and the mark of its end, where there is one."""
    return event if ended_s is None or ended_s <= event.end_s else replace(event, end_s=ended_s, returned_s=event.end_s)


def _stats(event, *keys: str) -> dict:
    return {key: value for key, value in event.stats if key in keys}


def _operation(plane: str, line: str, event) -> list[tuple[Event, int | None]]:
    """A call and the id that its end will name; nothing for an event of another sort."""
    if event.name in OTHERS or event.name.startswith(END):
        return []
    stats = _stats(event, "hlo_op", "hlo_module", "device_ordinal", "_p")
    if "hlo_op" in stats:
        op, module = str(stats["hlo_op"]), str(stats.get("hlo_module", ""))
    elif line == "XLA Ops":  # TPU: the event's name is the instruction
        op, module = event.name.split(" = ")[0].lstrip("%"), ""
    else:
        return []
    device = plane if plane.startswith("/device:") else f"cpu:{stats.get('device_ordinal', 0)}"
    return [(Event(event.start_ns / 1e9, event.end_ns / 1e9, device, module.split("(")[0], op), stats.get("_p"))]


Busy = dict[str, dict[tuple[str, str], float]]
"""Seconds by device and (module, operation)."""


def share_out(trace: Trace, is_container: Callable[[str, str], bool]) -> Busy:
    """Busy seconds of every device, inside of steps only, shared out over operations."""
    by_device: dict[str, list[Event]] = defaultdict(list)
    for event in trace.events:
        by_device[event.device].append(event)
    return {device: _share_out(clip(events, trace.steps), is_container) for device, events in sorted(by_device.items())}


def clip(events: Iterable[Event], windows: list[tuple[float, float]]) -> list[Event]:
    """The parts of events that lie inside of the windows, which are sorted and do not overlap."""
    found = []
    for e in events:
        for start, end in windows:
            if e.end_s > start and e.start_s < end:
                found.append(Event(max(e.start_s, start), min(e.end_s, end), e.device, e.module, e.op))
    return found


def exposed_share(
    trace: Trace, is_collective: Callable[[str, str], bool], is_container: Callable[[str, str], bool]
) -> float | None:
    """Of the time in which collectives run, the share in which nothing else of their device does; None without collectives."""
    alone = whole = 0.0
    for device in {e.device for e in trace.events}:
        events = clip([e for e in trace.events if e.device == device and not is_container(e.module, e.op)], trace.steps)
        chosen = [is_collective(e.module, e.op) for e in events]
        others = covered(e for e, c in zip(events, chosen) if not c)
        whole += covered(e for e, c in zip(events, chosen) if c)
        alone += covered(events) - others
    return alone / whole if whole else None


def covered(events: Iterable[Event]) -> float:
    """Seconds in which at least one of them runs."""
    total, until = 0.0, float("-inf")
    for e in sorted(events, key=lambda e: e.start_s):
        total += max(0.0, e.end_s - max(e.start_s, until))
        until = max(until, e.end_s)
    return total


def _share_out(events: list[Event], is_container: Callable[[str, str], bool]) -> dict[tuple[str, str], float]:
    """A sweep over the moments at which an event begins or ends."""
    busy: dict[tuple[str, str], float] = defaultdict(float)
    starts = sorted(events, key=lambda e: e.start_s)
    active: list[tuple[float, int, tuple[str, str], bool]] = []  # a heap by end
    now = at = 0
    while at < len(starts) or active:
        until = active[0][0] if active else float("inf")
        until = min(until, starts[at].start_s) if at < len(starts) else until
        if active and until > now:
            keys = [key for _, _, key, contains in active if not contains] or [key for _, _, key, _ in active]
            for key in keys:
                busy[key] += (until - now) / len(keys)
        now = until
        while active and active[0][0] <= now:
            heapq.heappop(active)
        while at < len(starts) and starts[at].start_s <= now:
            e = starts[at]
            if e.end_s > now:
                heapq.heappush(active, (e.end_s, at, (e.module, e.op), is_container(e.module, e.op)))
            at += 1
    return dict(busy)

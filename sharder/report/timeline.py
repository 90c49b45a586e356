"""The attempts of a run as spans of time, from its events: starting, stepping, down; and what happened when."""

from dataclasses import dataclass

ORDINARY = {
    "start",
    "compiled",
    "restored",
    "first_step",
    "save",
    "saved",
    "snapshot",
    "mirrored",
    "end",
    "phase",
    "spawn",
    "launch",
    "restart",
    "new_step",
    "closed",
}
"""Events that are part of every run, or follow from others. Any other is worth a mark."""
STOPS = {"stopped", "resize"}
FAULTS = {"fault", "ended", "nonfinite", "set_aside", "save_failed", "mirror_failed", "snapshot_refused"}


@dataclass(frozen=True)
class Span:
    """Seconds since the run began."""

    kind: str
    """starting, stepping or down."""
    attempt: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Mark:
    time_s: float
    label: str
    is_fault: bool


@dataclass(frozen=True)
class Timeline:
    spans: list[Span]
    marks: list[Mark]


def make_timeline(events: list[dict], last_signs: dict[int, float] | None = None) -> Timeline | None:
    """`last_signs`: time of the last sign of life by attempt, beside its events. None where nothing was recorded.

    A supervisor's own events, and the faults that a test brings about, belong to no attempt.
    """
    timed = sorted((e for e in events if isinstance(e.get("time_s"), (int, float))), key=lambda e: e["time_s"])
    starts = [e for e in timed if e.get("kind") == "start" and isinstance(e.get("attempt"), int)]
    if not starts:
        return None
    began, spans, marks = timed[0]["time_s"], [], []
    begins = [
        _beginning(start, starts[number - 1]["time_s"] if number else began, timed) for number, start in enumerate(starts)
    ]
    for number, start in enumerate(starts):
        attempt, until = start["attempt"], begins[number + 1] if number + 1 < len(starts) else float("inf")
        meanwhile = [e for e in timed if begins[number] <= e["time_s"] < until]
        mine = [e for e in meanwhile if e.get("attempt") == attempt]
        last = min(max(mine[-1]["time_s"], (last_signs or {}).get(attempt, 0.0)), until)
        first = next((e["time_s"] for e in mine if e.get("kind") == "first_step"), last)
        spans += [
            Span("starting", attempt, begins[number] - began, first - began),
            Span("stepping", attempt, first - began, last - began),
        ]
        ended = any(e.get("kind") in ("end", "stopped") for e in mine) or any(map(_is_bad_end, meanwhile))
        if until != float("inf"):
            spans.append(Span("down", attempt, last - began, until - began))
        if not ended and (until != float("inf")):
            marks.append(Mark(last - began, f"attempt {attempt} ended without a word, after step {_last_step(mine)}", True))
    marks += [Mark(_moment(e) - began, _label(e), e.get("kind") not in STOPS) for e in timed if _is_worth_a_mark(e)]
    return Timeline([s for s in spans if s.end_s > s.start_s], sorted(marks, key=lambda m: m.time_s))


def _beginning(start: dict, earliest_s: float, timed: list[dict]) -> float:
    """When the processes of an attempt began, which it wrote down only when it had a folder to write to."""
    return min(e["time_s"] for e in timed if e.get("attempt") == start["attempt"] and e["time_s"] >= earliest_s)


def _is_bad_end(event: dict) -> bool:
    """Whether a supervisor saw an attempt fail."""
    return event.get("kind") == "ended" and event.get("code") not in (0, 75, None)


def _moment(event: dict) -> float:
    """When it happened, which may be before it was seen."""
    failed_at = event.get("failed_at")
    return failed_at if isinstance(failed_at, (int, float)) else event["time_s"]


def _is_worth_a_mark(event: dict) -> bool:
    """Also the end of a supervised attempt, where it was no good one."""
    kind = event.get("kind")
    return kind not in ORDINARY and (kind != "ended" or _is_bad_end(event))


def _last_step(events: list[dict]) -> object:
    return next((e["step"] for e in reversed(events) if e.get("step") is not None), "none")


def _label(event: dict) -> str:
    """Who failed; else kind, step, and whatever else the event says in short."""
    culprit = event.get("culprit")
    if isinstance(culprit, dict):
        return f"process {culprit.get('process')} {culprit.get('what')}, {culprit.get('phase')} {culprit.get('step')}"
    named = {k: v for k, v in event.items() if k in ("what", "reason", "why", "code", "name", "phase") and v is not None}
    more = [str(v) if k == "what" else f"{k} {v}" for k, v in named.items()]
    step = "" if event.get("step") is None else f" at step {event['step']}"
    return f"{event.get('kind')}{step}" + (f": {', '.join(more)}" if more else "")

"""The attempts of a run as spans of time, from its events: starting, stepping, down; and what happened when."""

from dataclasses import dataclass

ORDINARY = {
    "start",
    "compiled",
    "restored",
    "first_step",
    "save",
    "saved",
    "end",
    "phase",
    "spawn",
    "launch",
    "new_step",
    "closed",
}
"""Events that are part of every run. Any other is worth a mark."""
STOPS = {"stopped"}


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
    """`last_signs`: time of the last sign of life by attempt, beside its events. None where nothing was recorded."""
    timed = sorted(
        (e for e in events if isinstance(e.get("time_s"), (int, float)) and isinstance(e.get("attempt"), int)),
        key=lambda e: e["time_s"],
    )
    starts = [e for e in timed if e.get("kind") == "start"]
    if not starts:
        return None
    began, spans, marks = starts[0]["time_s"], [], []
    for number, start in enumerate(starts):
        attempt, until = start["attempt"], starts[number + 1]["time_s"] if number + 1 < len(starts) else float("inf")
        mine = [e for e in timed if start["time_s"] <= e["time_s"] < until and e["attempt"] == attempt]
        last = min(max(mine[-1]["time_s"], (last_signs or {}).get(attempt, 0.0)), until)
        first = next((e["time_s"] for e in mine if e.get("kind") == "first_step"), last)
        spans += [
            Span("starting", attempt, start["time_s"] - began, first - began),
            Span("stepping", attempt, first - began, last - began),
        ]
        ended = any(e.get("kind") in ("end", "stopped") for e in mine)
        if until != float("inf"):
            spans.append(Span("down", attempt, last - began, until - began))
        if not ended and (until != float("inf")):
            marks.append(Mark(last - began, f"attempt {attempt} ended without a word, after step {_last_step(mine)}", True))
    marks += [Mark(e["time_s"] - began, _label(e), e.get("kind") not in STOPS) for e in timed if _is_worth_a_mark(e)]
    return Timeline([s for s in spans if s.end_s > s.start_s], sorted(marks, key=lambda m: m.time_s))


def _is_worth_a_mark(event: dict) -> bool:
    """Also the end of a supervised attempt, where it was no good one."""
    kind = event.get("kind")
    return kind not in ORDINARY and not (kind == "ended" and event.get("code") in (0, 75, None))


def _last_step(events: list[dict]) -> object:
    return next((e["step"] for e in reversed(events) if e.get("step") is not None), "none")


def _short(value: object) -> str:
    return " ".join(f"{k} {v}" for k, v in value.items() if v is not None) if isinstance(value, dict) else str(value)


def _label(event: dict) -> str:
    """Kind, step, and whatever else the event says in short."""
    more = [
        f"{k} {_short(v)}"
        for k, v in event.items()
        if k in ("reason", "culprit", "signal", "code", "cause", "fault", "name") and v is not None
    ]
    step = "" if event.get("step") is None else f" at step {event['step']}"
    return f"{event.get('kind')}{step}" + (f": {', '.join(more)}" if more else "")

"""Where the time of a run went: every second from its launch to its end belongs to one class.

A pure function of events.jsonl and metrics.jsonl. Processes note when they enter a phase, the supervisor when it starts them and
when it sees them end, so that the time between two events belongs to the earlier one. In the loop the time waited for data, and
steps that an earlier attempt had done already, are taken out by the metrics of the steps.
"""

from dataclasses import dataclass, field
from pathlib import Path

from sharder.config import UserError
from sharder.events import read_json_lines

CLASSES = (
    "start-up", "bring-up", "restore", "compile", "productive", "redone", "data wait", "evaluation", "checkpoint stall", "down", "stopped",
)  # fmt: skip

OF_PHASE = {
    "start-up": "start-up", "bring-up": "bring-up", "set-up": "start-up", "restore": "restore", "compile": "compile",
    "step": "productive", "evaluate": "evaluation", "save": "checkpoint stall", "end": "checkpoint stall",
}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """A stretch of time of one class; of the loop, with the first step in it."""

    start_s: float
    end_s: float
    kind: str
    attempt: int | None = None


@dataclass
class Restart:
    """From a failure to the next step that no attempt had done before."""

    culprit: dict | None
    faults: list[dict]
    parts_s: dict[str, float] = field(default_factory=dict)
    """detect, stop, start, import, bring-up, set-up, restore, compile, first step, redo; None where it never came so far."""
    total_s: float | None = None


@dataclass(frozen=True)
class Ledger:
    start_s: float
    end_s: float
    seconds: dict[str, float]
    """By class."""
    num_attempts: int
    num_steps: int
    restarts: list[Restart]

    @property
    def wall_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def goodput(self) -> float:
        """Productive time over all time but what the run was stopped for."""
        running = self.wall_s - self.seconds["stopped"]
        return self.seconds["productive"] / running if running > 0 else 0.0


def read_ledger(run_dir: Path) -> Ledger:
    """Raises UserError where the folder holds no events."""
    events, _ = read_json_lines(run_dir / "events.jsonl")
    metrics, _ = read_json_lines(run_dir / "metrics.jsonl")
    if not events:
        raise UserError(f"{run_dir} has no events.jsonl: it is not a run, or was never begun.")
    return make_ledger(events, metrics)


def make_ledger(events: list[dict], metrics: list[dict]) -> Ledger:
    events = sorted((e for e in events if isinstance(e.get("time_s"), int | float)), key=lambda e: e["time_s"])
    spans = list(split(events, metrics))
    seconds = dict.fromkeys(CLASSES, 0.0)
    for span in spans:
        seconds[span.kind] += span.end_s - span.start_s
    take_out(seconds, metrics)
    attempts = {e["attempt"] for e in events if isinstance(e.get("attempt"), int)}
    num_steps = max((m["step"] for m in metrics), default=0)
    return Ledger(events[0]["time_s"], events[-1]["time_s"], seconds, len(attempts), num_steps, find_restarts(events))


def split(events: list[dict], metrics: list[dict]):
    """Spans from one event to the next, of the class that holds between them.

    Where nobody saw an attempt end and another one starts, it was down since its last event, or its last logged step.
    """
    kind, attempt, previous_s, supervised, running = "start-up", None, None, False, None
    for event in events:
        time_s = event["time_s"]
        if running is not None and (event["kind"] == "launch" or _is_start(event) and not supervised):
            last_s = min(max(previous_s, running["time_s"] + _steps_s(running, metrics)), time_s)
            yield Span(previous_s, last_s, kind, attempt)
            previous_s, kind, running = last_s, "down", None
        if event["kind"] == "ended":
            time_s = min(time_s, max(event.get("failed_at") or time_s, previous_s or time_s))
        if previous_s is not None:
            yield Span(previous_s, time_s, kind, attempt)
        previous_s = time_s
        attempt = event["attempt"] if isinstance(event.get("attempt"), int) else attempt
        if event["kind"] == "phase" and event.get("process") == 0:
            kind, running = OF_PHASE[event["name"]], event
        elif event["kind"] in ("spawn", "launch"):
            kind, supervised = "start-up", True
        elif event["kind"] == "ended":
            kind, running = "down", None
            yield Span(previous_s, event["time_s"], kind, attempt)
            previous_s = event["time_s"]
        elif event["kind"] in ("stopped", "end"):
            kind, running = "down" if supervised else "stopped", None
        elif event["kind"] == "closed":
            kind, supervised, running = "stopped", False, None


def _is_start(event: dict) -> bool:
    return event["kind"] == "phase" and event.get("process") == 0 and event["name"] == "start-up"


def _steps_s(phase: dict, metrics: list[dict]) -> float:
    """Seconds of the steps that were logged since an attempt entered a phase; none but in the loop."""
    done = [m for m in metrics if m.get("attempt") == phase["attempt"]]
    since = [m for m in done if m["step"] >= (phase.get("step") or 0)]
    return sum(m["step_time_s"] for m in since) * _every(done) if phase["name"] == "step" else 0.0


def take_out(seconds: dict[str, float], metrics: list[dict]) -> None:
    """Moves waiting for data and steps done before out of the productive time; metrics may have every n-th step only."""
    best, wait_s, redone_s, attempt, of_attempt = 0, 0.0, 0.0, None, []
    for record in [*metrics, {"attempt": None}]:
        if record["attempt"] != attempt:
            every = _every(of_attempt)
            for done in of_attempt:
                wait_s += done["data_wait_s"] * every
                if done["step"] <= best:
                    redone_s += max(done["step_time_s"] - done["data_wait_s"], 0.0) * every
            best = max([best, *(done["step"] for done in of_attempt)])
            attempt, of_attempt = record["attempt"], []
        of_attempt.append(record)
    for name, found in (("data wait", wait_s), ("redone", redone_s)):
        moved = min(found, seconds["productive"])
        seconds[name] += moved
        seconds["productive"] -= moved


def _every(records: list[dict]) -> int:
    steps = [r["step"] for r in records]
    return min((b - a for a, b in zip(steps, steps[1:]) if b > a), default=1)


def find_restarts(events: list[dict]) -> list[Restart]:
    """The failures, and how long it took after each until a new step was finished."""
    found, faults = [], []
    for at, event in enumerate(events):
        if event["kind"] == "fault":
            faults.append(event)
        if event["kind"] == "ended" and event.get("code") not in (0, None):
            found.append(_restart(event, events[at + 1 :], faults))
            faults = []
    return found


def _restart(ended: dict, later: list[dict], faults: list[dict]) -> Restart:
    restart = Restart(ended.get("culprit"), faults)
    at, name = ended.get("failed_at") or ended["time_s"], "stop"
    began = faults[-1]["time_s"] if faults else at
    parts = restart.parts_s
    if faults:
        parts["detect"] = at - began
    names = {"start-up": "import", "step": "first step"}
    for event in [ended, *later]:
        parts[name] = parts.get(name, 0.0) + max(event["time_s"] - at, 0.0)
        at = max(event["time_s"], at)
        if event["kind"] == "ended" and event is not ended:
            return restart
        if event["kind"] == "new_step":
            restart.total_s = at - began
            return restart
        if event["kind"] == "ended":
            name = "start"
        elif event["kind"] == "spawn":
            name = "import"
        elif event["kind"] == "phase" and event.get("process") == 0:
            name = names.get(event["name"], event["name"])
    return restart


def describe(ledger: Ledger) -> str:
    """The classes that have any time, in seconds and as shares of the wall time."""
    wall_s = ledger.wall_s or 1.0
    rows = [f"  {name:17}{s:10.1f} s {100 * s / wall_s:5.1f} %" for name, s in ledger.seconds.items() if s >= 0.05]
    lines = [
        f"{ledger.wall_s:.1f} s in {ledger.num_attempts} attempt(s), {ledger.num_steps} steps; goodput {100 * ledger.goodput:.1f} %",
        *rows,
    ]
    for number, restart in enumerate(ledger.restarts, 1):
        lines.append(f"  failure {number}: {describe_restart(restart)}")
    return "\n".join(lines)


def describe_restart(restart: Restart) -> str:
    who = restart.culprit
    named = "stopped" if who is None else f"process {who['process']} {who['what']}, {who['phase']} {who['step']}"
    parts = ", ".join(f"{name} {s:.2f}" for name, s in restart.parts_s.items() if s >= 0.005)
    total = "no new step after it" if restart.total_s is None else f"{restart.total_s:.2f} s to the next new step"
    return f"{named}; {total} ({parts})"

"""The step ledgers of a run's processes, added up: where each spends its time, which one the others wait for.

A process that is slow on its host (reading, copying, dispatching, logging) waits little for its devices, and the others wait for
it in theirs. What its steps would take by themselves is its own time and the least that any process waits for its devices.
A device that is slow keeps every host waiting alike: `sharder profile` tells those apart by their collectives.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

from sharder.events import read_json_lines

PARTS = ("data_wait", "host_to_device", "dispatch", "device", "checkpoint", "evaluation", "logging", "other")
SLOWER = 1.1
"""Times the median process."""
PERSISTENT = 0.75
"""Share of a process's lines in which it has to be slower, to be called a straggler."""
FEWEST_LINES = 3


@dataclass(frozen=True)
class ProcessTime:
    """Of one process over a run, seconds."""

    process: int
    num_steps: int
    wall_s: float
    parts: dict[str, float]

    @property
    def own_s(self) -> float:
        """Without waiting for the devices, which is also waiting for others."""
        return self.wall_s - self.parts["device"]


@dataclass(frozen=True)
class Ledgers:
    processes: list[ProcessTime]
    slowest: int | None
    """None with a single process."""
    stragglers: list[int]
    last_signs: dict[int, float]
    """Time of the last line of every attempt, seconds since the epoch."""
    num_unreadable: int


def read_ledgers(run_dir: Path) -> Ledgers | None:
    """None where a run has none."""
    lines, unreadable = {}, 0
    for path in sorted((run_dir / "steps").glob("process_*.jsonl")):
        records, skipped = read_json_lines(path)
        unreadable += skipped
        for record in records:
            if isinstance(record.get("process"), int) and isinstance(record.get("wall_s"), (int, float)):
                lines.setdefault(record["process"], []).append(record)
    if not lines:
        return None
    processes = [_total(process, records) for process, records in sorted(lines.items())]
    alone = {p.process: p.own_s for p in processes}
    slowest = max(alone, key=alone.get) if len(processes) > 1 else None
    signs: dict[int, float] = {}
    for record in (r for records in lines.values() for r in records):
        if isinstance(record.get("attempt"), int) and isinstance(record.get("time_s"), (int, float)):
            signs[record["attempt"]] = max(record["time_s"], signs.get(record["attempt"], 0.0))
    return Ledgers(processes, slowest, find_stragglers(lines), signs, unreadable)


def _total(process: int, records: list[dict]) -> ProcessTime:
    parts = {name: sum(r.get(f"{name}_s") or 0.0 for r in records) for name in PARTS}
    return ProcessTime(process, sum(r.get("num_steps", 0) for r in records), sum(r["wall_s"] for r in records), parts)


def find_stragglers(lines: dict[int, list[dict]]) -> list[int]:
    """Processes that are slower than the median in most lines; `lines` by process, matched by attempt and step."""
    if len(lines) < 2:
        return []
    matched: dict[tuple, dict[int, dict]] = {}
    for process, records in lines.items():
        for record in records:
            matched.setdefault((record.get("attempt"), record.get("step")), {})[process] = record
    whole = [found for found in matched.values() if len(found) == len(lines)]
    slow = dict.fromkeys(lines, 0)
    for found in whole:
        device = min(r.get("device_s") or 0.0 for r in found.values())
        alone = {p: r["wall_s"] - (r.get("device_s") or 0.0) + device for p, r in found.items()}
        median = statistics.median_low(alone.values())
        for process, seconds in alone.items():
            slow[process] += seconds > SLOWER * median
    return [p for p, count in slow.items() if len(whole) >= FEWEST_LINES and count >= PERSISTENT * len(whole)]

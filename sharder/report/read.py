"""What a run has recorded, read for reports: whatever is missing or cut off is said, and stops nothing."""

import json
from dataclasses import dataclass
from pathlib import Path

from sharder.config import UserError
from sharder.events import read_json_lines
from sharder.facts import called, read_facts
from sharder.report.ledgers import Ledgers, read_ledgers


@dataclass(frozen=True)
class Recorded:
    """The files of one run; None where there is no such file."""

    run_dir: Path
    facts: dict | None
    plan: dict | None
    records: list[dict]
    """Of metrics.jsonl, in the order of writing: steps that were done again stand there twice."""
    events: list[dict]
    profile: dict | None
    ledgers: Ledgers | None
    num_unreadable: dict[str, int]
    """Lines cut off or damaged, by file."""
    name: str
    """What a report calls it."""

    @property
    def last_of_step(self) -> dict[int, dict]:
        """The last record of every step, ascending."""
        found = {r["step"]: r for r in self.records if isinstance(r.get("step"), int)}
        return dict(sorted(found.items()))

    @property
    def num_redone(self) -> int:
        """Steps that were done more than once."""
        return len([r for r in self.records if isinstance(r.get("step"), int)]) - len(self.last_of_step)

    def series(self, field: str) -> tuple[list[int], list[float]]:
        """Steps and values of the records that have a number there."""
        pairs = [(s, r[field]) for s, r in self.last_of_step.items() if isinstance(r.get(field), (int, float))]
        return [s for s, _ in pairs], [v for _, v in pairs]


def read_run(run_dir: Path) -> Recorded:
    """Raises UserError where the folder is no run, or nothing in it was recorded."""
    profile = _json(run_dir / "profile" / "profile.json", "shares", "kinds", "step_time_s", "coverage", "flops")
    # A folder may hold a profile and no run.
    facts = read_facts(run_dir) if (run_dir / "config.json").exists() or profile is None else None
    records, cut_records = read_json_lines(run_dir / "metrics.jsonl")
    events, cut_events = read_json_lines(run_dir / "events.jsonl")
    ledgers = read_ledgers(run_dir)
    if not records and profile is None:
        raise UserError(
            f"{called(run_dir)} has no metrics: metrics.jsonl is missing or empty, since no step was finished or logged, and there is no"
            " profile/profile.json. Train it for a step, or profile into it."
        )
    cut = {"metrics.jsonl": cut_records, "events.jsonl": cut_events, "steps": ledgers.num_unreadable if ledgers else 0}
    unreadable = {name: count for name, count in cut.items() if count}
    return Recorded(
        run_dir,
        facts,
        _json(run_dir / "plan.json", "bytes_per_device", "bytes_total", "params"),
        records,
        events,
        profile,
        ledgers,
        unreadable,
        run_dir.name or str(run_dir),
    )


def _json(path: Path, *needed: str) -> dict | None:
    """Raises UserError where the file is there and is no object with what is needed."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}. Remove it, or restore it from a copy.") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no object. Remove it, or restore it from a copy.")
    if missing := [name for name in needed if name not in found]:
        raise UserError(f"{path} lacks {', '.join(missing)}: another program wrote it. Remove it, or restore it from a copy.")
    return found

"""The folder of a run: begun once, resumed by attempts, never overwritten."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sharder import checkpoint
from sharder.config import RunConfig, UserError, config_hash, to_dict
from sharder.events import end_with_newline, read_json_lines
from sharder.facts import read_config
from sharder.identity import differences

Resume = Literal["auto", "never", "must"]

@dataclass(frozen=True)
class Attempt:
    """One start of a run."""

    run_dir: Path
    number: int
    """1 for the first start."""
    resume_step: int | None
    """Checkpoint to restore, or None to begin at step 0."""
    reduction: str = "auto"
    """The mode that the run was begun in; of a new run, what was asked for."""


def open_attempt(run_dir: Path, resume: Resume, config: RunConfig) -> Attempt:
    """Decides where an attempt begins; touches nothing that exists. Raises UserError where it must not begin."""
    exists = (run_dir / "config.json").exists()
    if not exists:
        if run_dir.exists() and any(run_dir.iterdir()) and {p.name for p in run_dir.iterdir()} - {"logs"}:
            raise UserError(f"{run_dir} exists and is not a run: choose another --run-dir.")
        if resume == "must":
            raise UserError(f"--resume is must, but {run_dir} holds no run.")
        return Attempt(run_dir, 1, None, config.parallel.reduction)
    if resume == "never":
        raise UserError(f"{run_dir} holds a run already: choose another --run-dir, or continue it with --resume auto.")
    was = read_config(run_dir)
    if config.parallel.reduction == "auto":
        config = replace(config, parallel=replace(config.parallel, reduction=was.parallel.reduction))
    differ = differences(was, config)
    if differ:
        listed = "".join(f"\n- {option} was {before!r}, is {after!r}" for option, before, after in differ)
        raise UserError(f"{run_dir} was started with other settings:{listed}\nUse those, or another --run-dir.")
    steps = checkpoint.list_steps(run_dir)
    if not steps and resume == "must":
        raise UserError(f"--resume is must, but {run_dir} holds no checkpoint.")
    events, _ = read_json_lines(run_dir / "events.jsonl")
    number = 1 + max((e.get("attempt", 0) for e in events), default=1)
    return Attempt(run_dir, number, steps[-1] if steps else None, config.parallel.reduction)


def begin(attempt: Attempt, config: RunConfig, facts: dict) -> list[str]:
    """Writes config.json with `facts` (versions, devices, data) and mends what a kill left; for process 0 only.

    Returns the names under which unfinished saves were set aside.
    """
    attempt.run_dir.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "events.jsonl"):
        end_with_newline(attempt.run_dir / name)
    text = json.dumps({"config": to_dict(config), "config_hash": config_hash(config), **facts}, indent=1)
    checkpoint.write_durably(attempt.run_dir / "config.json", text)
    return checkpoint.set_aside_unfinished(attempt.run_dir)

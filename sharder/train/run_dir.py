"""The folder of a run: begun once, resumed by attempts, never overwritten."""

import errno
import json
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import IO, Literal

from sharder import checkpoint
from sharder.checkpoint.save import SaveFailed
from sharder.config import RunConfig, UserError, config_hash, from_dict, to_dict
from sharder.events import end_with_newline, read_json_lines
from sharder.facts import address_of, called, config_of, is_run, read_config, read_facts
from sharder.identity import differences
from sharder.lock import InUse, take_lock
from sharder.train.attempt import Attempt, Branch, begin_branch, lasting_facts, resume_branch, rewind
from sharder.train.own_files import keep_tokenizer, with_absolute_paths

Resume = Literal["auto", "never", "must"]


class RunLock:
    """Lets one attempt at a time use the folder of a run; process 0 holds it until the process ends."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self._file: IO[str] | None = None
        self._made: list[Path] = []

    def take(self) -> None:
        """Makes the folder if need be. Raises UserError where it cannot be used, holds something else, or is in use."""
        is_run(self.run_dir)
        try:
            self._made = [p for p in (self.run_dir, *self.run_dir.parents) if not p.exists()]
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._file = take_lock(self.run_dir / ".lock")
        except InUse as holder:
            raise UserError(f"{self.run_dir} is in use by {holder}: wait for it, or choose another --run-dir.") from None
        except OSError as error:
            self.release()
            raise UserError(f"--run-dir {self.run_dir} cannot be used: {error.strerror}. Choose another folder.") from None

    def release(self) -> None:
        """Leaves no trace where no run was begun."""
        if self._file is not None and not (self.run_dir / "config.json").exists():
            (self.run_dir / ".lock").unlink(missing_ok=True)
        if self._file is not None:
            self._file.close()
            self._file = None
        for made in self._made:
            try:
                made.rmdir()
            except OSError:  # not empty, or never made
                break


def finished_saves(events: list[dict]) -> set[int]:
    """Steps whose checkpoints were whole, from the events."""
    return {e["step"] for e in events if e.get("kind") == "saved" and isinstance(e.get("step"), int)}


def mode_asked_for(run_dir: Path, config: RunConfig) -> str:
    """`--parallel.reduction`, where auto is that of a run which exists already."""
    if config.parallel.reduction != "auto" or not is_run(run_dir):
        return config.parallel.reduction
    return read_config(run_dir).parallel.reduction


def open_attempt(run_dir: Path, resume: Resume, config: RunConfig, branch: Branch | None = None) -> Attempt:
    """Decides where an attempt begins; touches nothing that exists. Raises UserError where it must not begin."""
    if not is_run(run_dir):
        if resume == "must":
            raise UserError(f"--resume is must, but {called(run_dir)} holds no run.")
        new = Attempt(run_dir, 1, None, config.parallel.reduction, secrets.token_hex(8))
        return new if branch is None else begin_branch(new, branch)
    if resume == "never":
        raise UserError(f"{called(run_dir)} holds a run already: choose another --run-dir, or continue it with --resume auto.")
    config = replace(config, parallel=replace(config.parallel, reduction=mode_asked_for(run_dir, config)))
    facts = read_facts(run_dir)
    check_settings(config_of(facts, run_dir), config, f"{called(run_dir)} was started")
    steps = checkpoint.list_steps(run_dir)
    if steps:
        check_saved_settings(run_dir, steps[-1], config)
    if not steps and resume == "must":
        raise UserError(f"--resume is must, but {called(run_dir)} holds no checkpoint.")
    events, _ = read_json_lines(run_dir / "events.jsonl")
    if not steps:
        check_nothing_lost(run_dir, events)
    numbers = [e["attempt"] for e in events if isinstance(e.get("attempt"), int)]
    number, run_id = 1 + max(numbers, default=1), facts.get("run_id") or secrets.token_hex(8)
    attempt = Attempt(
        run_dir, number, steps[-1] if steps else None, config.parallel.reduction, run_id, reached=furthest_step(run_dir)
    )
    return attempt if branch is None else resume_branch(attempt, branch, facts, steps)


def check_settings(was: RunConfig, now: RunConfig, what: str) -> None:
    """Raises UserError with what differs of the settings that decide the numbers, and what to do."""
    differ = differences(was, now)
    if differ:
        listed = "".join(f"\n- {option} was {before!r}, is {after!r}" for option, before, after in differ)
        raise UserError(
            f"{what} with other settings:{listed}\nUse those, or another --run-dir; with --resume-from RUN@STEP that begins with the state"
            " of a checkpoint."
        )


def check_saved_settings(run_dir: Path, step: int, config: RunConfig) -> None:
    """As `check_settings`, with the settings that stand in the checkpoint itself."""
    saved = checkpoint.read_manifest(run_dir, step).get("config")
    if saved is not None:
        check_settings(from_dict(saved), config, f"{checkpoint.shown(run_dir, step)} was saved")


def furthest_step(run_dir: Path) -> int:
    """That an attempt has logged; 0 where none has."""
    records, _ = read_json_lines(run_dir / "metrics.jsonl")
    return max((r["step"] for r in records if isinstance(r.get("step"), int)), default=0)


def has_fitted(attempt: Attempt, config: RunConfig, facts: dict) -> bool:
    """Whether an earlier attempt saved a checkpoint with the same model and batch on the same devices, by config.json, so that
    its memory need not be predicted again. `facts`: versions, devices and num_processes of now."""
    if attempt.resume_step is None or attempt.source is not None:
        return False
    before = read_facts(attempt.run_dir)
    now = to_dict(config)
    sections = all(before["config"].get(name) == now[name] for name in ("model", "parallel", "optimizer"))
    batch = all(
        before["config"]["train"].get(name) == now["train"][name]
        for name in ("global_batch_size", "microbatch_size", "ema_decay")
    )
    return sections and batch and all(before.get(name) == value for name, value in facts.items())


def check_nothing_lost(run_dir: Path, events: list[dict]) -> None:
    """Raises UserError where a run without a checkpoint had one: to begin it again in silence would throw its work away."""
    saved = sorted(finished_saves(events))
    others = checkpoint.list_others(run_dir)
    if not saved and not any((checkpoint.folder(run_dir) / name / "manifest.json").exists() for name in others):
        return
    had, where = f"it saved checkpoints up to step {saved[-1]}" if saved else "it had checkpoints", checkpoint.folder(run_dir)
    listed = ", ".join(f"{name} ({checkpoint.fault(where / name)})" for name in others) or "nothing"
    raise UserError(
        f"{called(run_dir)} holds no checkpoint that can be read, although {had}; in {where} there is: {listed}. Restore one"
        f" with its manifest.json under its step's name{f', in {address_of(run_dir)}' if address_of(run_dir) else ''}, or begin"
        " again in another --run-dir."
    )


def is_about_room(run_dir: Path, error: OSError) -> bool:
    """Whether a file of the run could not be written; a lost connection or a missing data file is another matter."""
    if isinstance(error, SaveFailed) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    return isinstance(error.filename, str | os.PathLike) and Path(error.filename).resolve().is_relative_to(run_dir.resolve())


def no_room(run_dir: Path, error: OSError) -> UserError:
    """What to tell where the files of a run cannot be written."""
    if isinstance(error, SaveFailed) and error.store is not None:
        return UserError(
            f"{error}. See that {error.store} answers, then give the same command: it goes on from that checkpoint."
        )
    text = str(error)
    if not isinstance(error, SaveFailed):
        text = f"{error.filename} cannot be written: {error.strerror}" if error.filename else text
        steps = checkpoint.list_steps(run_dir)
        last = f"the last whole checkpoint is of step {steps[-1]}" if steps else "there is no whole checkpoint yet"
        text = f"{text}; {last}"
    return UserError(
        f"{text}. Free space on the disk of {run_dir} (or lift the limit on file sizes), then give the same command: it"
        " sets the unfinished save aside and continues."
    )


def begin(attempt: Attempt, config: RunConfig, facts: dict) -> list[tuple[str, str]]:
    """Writes config.json with `facts` (versions, devices, data) and mends what a kill left; for process 0 only.

    Returns the names under which unfinished or damaged saves were set aside, and why.
    """
    attempt.run_dir.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "events.jsonl"):
        end_with_newline(attempt.run_dir / name)
    keep_tokenizer(attempt.run_dir, config)
    config, facts = with_absolute_paths(config), {**facts, **lasting_facts(attempt)}
    text = json.dumps({"config": to_dict(config), "config_hash": config_hash(config), **facts}, indent=1, allow_nan=False)
    checkpoint.write_durably(attempt.run_dir / "config.json", text)
    aside = checkpoint.set_aside_unfinished(attempt.run_dir)
    return aside + (rewind(attempt) if attempt.rewinds else [])

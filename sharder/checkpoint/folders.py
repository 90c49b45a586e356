"""Which checkpoints a run has, and what is done with folders that are none. Standard library only."""

import shutil
from pathlib import Path

from sharder.checkpoint.manifest import Damaged, check_files, parse
from sharder.facts import address_of, called
from sharder.fields import UserError

NEVER_FINISHED = "the save never finished: there is no manifest.json"
VERIFIED = "verified"
UNFINISHED, DAMAGED, UNCOPIED = ".unfinished", ".damaged", ".uncopied"
SET_ASIDE = (UNFINISHED, DAMAGED, UNCOPIED, ".rewound")
"""Ends of the names of folders that were set aside, by reason."""


def folder(run_dir: Path) -> Path:
    # orbax takes absolute paths only.
    return run_dir.resolve() / "checkpoints"


def entry(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder(run_dir) / str(step)


def shown(run_dir: Path, step: int) -> str:
    """The same for a user to read, who may know the run by its address."""
    address = address_of(run_dir)
    return str(entry(run_dir, step)) if address is None else f"{address}/checkpoints/{step}"


def whole_manifest(where: Path) -> dict:
    """The manifest of a whole checkpoint. Raises Damaged with the reason, FileNotFoundError where the save never finished."""
    manifest = parse(where)
    if str(manifest.get("step")) != where.name:
        raise Damaged(f"its manifest.json is of step {manifest.get('step')}")
    check_files(where, manifest)
    return manifest


def fault(where: Path) -> str | None:
    """Why a folder is no whole checkpoint; None where it is one, as far as can be told without reading its arrays."""
    try:
        whole_manifest(where)
    except FileNotFoundError:
        return NEVER_FINISHED
    except Damaged as damage:
        return str(damage)
    return None


def list_steps(run_dir: Path) -> list[int]:
    """Steps of all whole checkpoints, ascending."""
    names = [m.parent for m in folder(run_dir).glob("*/manifest.json")]
    return sorted(int(e.name) for e in names if e.name.isdecimal() and fault(e) is None)


def list_others(run_dir: Path) -> list[str]:
    """Names of the folders that are no checkpoints: unfinished, damaged, or set aside."""
    steps = {str(step) for step in list_steps(run_dir)}
    return sorted(e.name for e in folder(run_dir).glob("*") if e.is_dir() and e.name not in steps)


def choose_step(run_dir: Path, step: int | None) -> int:
    """The given step, or the latest. Raises UserError where there is no such checkpoint, Damaged where it is."""
    steps = list_steps(run_dir)
    if step is not None and step not in steps and entry(run_dir, step).exists():
        read_manifest(run_dir, step)
    if not steps:
        raise UserError(f"{called(run_dir)} holds no checkpoint: nothing to load.")
    if step is not None and step not in steps:
        raise UserError(f"{called(run_dir)} holds no checkpoint of step {step}; it has {steps}.")
    return steps[-1] if step is None else step


def read_manifest(run_dir: Path, step: int) -> dict:
    """Raises Damaged where it is, or a file is missing or cut off."""
    where = shown(run_dir, step)
    try:
        return whole_manifest(entry(run_dir, step))
    except FileNotFoundError:
        raise Damaged(f"{where} is no checkpoint: it has no manifest.json. {way_out(run_dir, step)}") from None
    except Damaged as damage:
        raise Damaged(f"{where} is damaged: {damage}. {way_out(run_dir, step)}") from None


def note_verified(where: Path) -> None:
    """Remembers that the arrays of a checkpoint were read and found to be what was saved."""
    try:
        (where / VERIFIED).touch()
    except OSError:  # the run may be somebody else's
        pass


def verified_s(where: Path) -> float | None:
    """When that was, in seconds since the epoch; None: never."""
    try:
        return (where / VERIFIED).stat().st_mtime
    except OSError:
        return None


def way_out(run_dir: Path, step: int) -> str:
    """What to do about a damaged checkpoint: go back to the one before it, where there is one."""
    address, earlier = address_of(run_dir), [s for s in list_steps(run_dir) if s < step]
    if earlier:
        return f"Use the checkpoint of step {earlier[-1]}; `sharder train` sets the damaged one aside by itself."
    if address is not None:  # here are those alone that a command asked for
        return f"Use one before it, where `sharder checkpoints {address}` lists one."
    return "There is none before it: restore it from a copy, or begin again in another --run-dir."


def set_aside(where: Path, ending: str) -> str:
    """Renames a folder, so that its step can be saved again; returns the new name, which no other folder has."""
    aside, number = where.with_name(where.name + ending), 1
    while aside.exists():
        number += 1
        aside = where.with_name(f"{where.name}{ending}.{number}")
    where.rename(aside)
    return aside.name


def set_aside_unfinished(run_dir: Path) -> list[tuple[str, str]]:
    """Renames what is no whole checkpoint. Returns (new name, reason) of each."""
    renamed = []
    for where in sorted(e for e in folder(run_dir).glob("*") if e.is_dir()):
        reason = None if any(ending in where.name for ending in SET_ASIDE) else fault(where)
        if reason == NEVER_FINISHED:
            # What never finished holds nothing of use: one such folder of a step is enough.
            shutil.rmtree(where.with_name(where.name + UNFINISHED), ignore_errors=True)
        if reason is not None:
            renamed.append((set_aside(where, UNFINISHED if reason == NEVER_FINISHED else DAMAGED), reason))
    return renamed

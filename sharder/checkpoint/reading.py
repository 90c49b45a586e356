"""Runs at an address of a store, brought to this host for commands that only read them.

They come into a folder of their own beside the staging folder: a run that goes on here is not disturbed.
"""

from pathlib import Path
from typing import Literal

from sharder.checkpoint.folders import folder
from sharder.checkpoint.remote import RemoteRun
from sharder.checkpoint.staging import filling, normal, remove_folder, staging_folder, staging_id
from sharder.config import UserError
from sharder.facts import is_address

Which = Literal["none", "newest", "all"] | int
"""Checkpoints: a number is a step."""


def fetch_run(address: str, which: Which = "newest") -> Path:
    """A folder with the run's files and the checkpoints asked for, as far as they are there. Raises UserError where there is
    no run, or it cannot be read."""
    address, run_dir = normal(address), staging_folder(address, ".read")
    run = RemoteRun(address, run_dir)
    with filling(run_dir):
        staging_id(run_dir, run.url)
        with run.reading():
            run.get_run_files(run_dir)
            steps = run.steps()
            for where in folder(run_dir).glob("*"):
                if not where.name.isdecimal() or int(where.name) not in steps:
                    remove_folder(where)
            if isinstance(which, int) and which not in steps:
                raise UserError(f"{address} holds no checkpoint of step {which}; it has {steps}.")
            for step in reversed(steps):
                # What is damaged there is so here, and the command that reads it says what it makes of it.
                if which in ("all", "newest", step) and run.bring(step, keep_damaged=True) and which == "newest":
                    break
    if not (run_dir / "config.json").exists():
        raise UserError(f"{address} is not a run: it has no config.json.")
    return run_dir


def _option(arguments: list[str], name: str) -> int | None:
    """The number that an option is given."""
    for at, argument in enumerate(arguments):
        found, _, value = argument.partition("=")
        value = value or (arguments[at + 1] if at + 1 < len(arguments) else "")
        if found == name and value.isdecimal():
            return int(value)


def bring_near(command: str, arguments: list[str]) -> list[str]:
    """The arguments of a command that reads runs, with folders of this host in place of addresses."""
    step = _option(arguments, "--step")
    if command in ("eval", "generate", "serve"):
        places, which = [0], "newest" if step is None else step
    elif arguments[:2] and command == "weights" and arguments[0] == "export":
        places, which = [1], "newest" if step is None else step
    elif command in ("verify", "report", "checkpoints"):
        places = [i for i in range(len(arguments)) if arguments[i - 1] != "--out"]
        one = step if step is not None else _option(arguments, "--fingerprint")
        which = "none" if command == "report" or command == "verify" and "--leaves" not in arguments else one or "all"
    else:
        places, which = [], "none"
    return [str(fetch_run(a, which)) if i in places and is_address(a) else a for i, a in enumerate(arguments)]


def bring_branch(text: str | None, run_dir: str) -> str | None:
    """`--resume-from` of a run at an address, with its folder here: of the run itself its staging folder, else a copy."""
    run, at, step = (text or "").rpartition("@")
    run, step = (run, step) if at else (step, "")
    if not is_address(run):
        return text
    if is_address(run_dir) and normal(run) == normal(run_dir):
        return f"{staging_folder(run)}{at}{step}"
    return f"{fetch_run(run, int(step) if step.isdecimal() else 'newest')}{at}{step}"

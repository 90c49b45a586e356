"""config.json of a run: its configuration, and what was known of the data, versions and devices when it was started."""

import json
import os
import re
from pathlib import Path

from sharder.config import RunConfig, UserError, from_dict

WAY_OUT = "Restore it from a copy, or use another run."


MARK = ".staging"
"""The file that says whose staging folder a folder is (sharder.checkpoint.staging)."""
OURS = {"logs", ".lock", MARK, "profile", "report.html", "steps"}
"""What a folder may hold before it is a run."""


def is_address(text: str) -> bool:
    """Whether it names a place in a remote store, as gs://bucket/run, and no folder."""
    return re.match(r"[a-z][a-z0-9+]+://", text) is not None


def address_of(run_dir: Path) -> str | None:
    """The address whose staging folder this is; None for any other folder."""
    try:
        return json.loads((run_dir / MARK).read_bytes())["address"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def name_of(run_dir: Path) -> str:
    """What a run is called on every host: its address, or its folder."""
    return address_of(run_dir) or str(run_dir.resolve())


def called(run_dir: Path) -> str:
    """What the user calls a run: its address, or its folder as it was given."""
    return address_of(run_dir) or str(run_dir)


def refuse_address(run_dir: Path) -> None:
    """Raises UserError for what names a place in a remote store, where a command takes a folder only."""
    scheme, *rest = run_dir.parts or [""]
    if re.fullmatch(r"[a-z][a-z0-9+]+:", scheme):
        address = f"{scheme}//{'/'.join(rest)}"
        raise UserError(
            f"{address} is an address, but this command takes the folder of a run: sharder train and sharder launch take"
            f" --run-dir {address},"
            " and verify, checkpoints, report, eval, generate, serve and weights export take such a run."
        )


def is_run(run_dir: Path) -> bool:
    """Whether the folder holds a run. Raises UserError where it cannot be one: an address, a file, or foreign files in it."""
    refuse_address(run_dir)
    try:
        if (run_dir / "config.json").exists():
            return True
        entries = {entry.name for entry in run_dir.iterdir()}
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise UserError(f"--run-dir {run_dir} is a file, or lies below one: choose another folder.") from None
    except OSError as error:
        raise UserError(f"--run-dir {run_dir} cannot be used: {error.strerror}. Choose another folder.") from None
    if entries - OURS:
        raise UserError(f"{run_dir} exists and is not a run: choose another --run-dir.")
    return False


def read_facts(run_dir: Path) -> dict:
    """All of config.json. Raises UserError where there is none, or it is damaged."""
    refuse_address(run_dir)
    path, name = run_dir / "config.json", f"{called(run_dir)}/config.json"
    if not path.exists():
        raise UserError(f"{called(run_dir)} is not a run: it has no config.json.")
    try:
        facts = json.loads(path.read_bytes(), parse_constant=_refuse)
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be read: {error}. {WAY_OUT}") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("config"), dict):
        raise UserError(f"{name} is damaged: it holds no configuration. {WAY_OUT}")
    return facts


MEMORY = Path("/dev/shm")
"""Files in it are memory, which outlives processes."""


def snapshot_place(run_id: str, memory: Path = MEMORY) -> Path:
    """Where this user's processes keep snapshots of a run."""
    return memory / f"sharder-{os.getuid()}" / run_id


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def read_config(run_dir: Path) -> RunConfig:
    """The configuration that a run was started with. Raises UserError as `read_facts`, or where it is of another version."""
    return config_of(read_facts(run_dir), run_dir)


def config_of(facts: dict, run_dir: Path) -> RunConfig:
    """The configuration in facts of `run_dir`."""
    try:
        return from_dict(facts["config"])
    except UserError as error:
        raise UserError(f"{called(run_dir)}/config.json: {error} {WAY_OUT}") from None

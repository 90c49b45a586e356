"""The folder on this host in which a run lives whose --run-dir is an address of a remote store. Standard library only.

It is a run's folder like any other, beside which a lock is held while it is being filled. A file in it, `.staging`, says whose
it is, and has a number that no other folder has: the store remembers which folder the newest attempt wrote in.
"""

import contextlib
import hashlib
import json
import os
import posixpath
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sharder.config import RunConfig, UserError
from sharder.facts import MARK, OURS, is_address
from sharder.lock import InUse, take_lock, wait_for_lock

VARIABLE = "SHARDER_STAGING"
"""Names the folder for all staging folders of this host."""


def base() -> Path:
    return Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "sharder" / "runs").expanduser().absolute()


def normal(address: str) -> str:
    """The one spelling of an address, which the name of its staging folder is made of."""
    scheme, _, place = address.partition("://")
    return f"{scheme}://{posixpath.normpath(place) if scheme == 'file' else place.rstrip('/')}"


def staging_folder(address: str, ending: str = "") -> Path:
    """Where a run of this address lives here; the same for all processes of a host."""
    address = normal(address)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", address.rsplit("/", 1)[-1])
    return base() / f"{name}-{hashlib.sha256(address.encode()).hexdigest()[:12]}{ending}"


def check_address(text: str) -> None:
    """Raises UserError for what begins as an address does and names no place; as a folder it would only surprise."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):(/+)(.*)$", text)
    if found is None:
        return
    scheme, slashes, rest = found.groups()
    absolute = scheme != "file" or slashes == "///"
    if scheme != scheme.lower() or not rest.strip("/") or not absolute or len(slashes) < 2:
        raise UserError(f"--run-dir {text} is no address: write gs://bucket/run, or file:///folder/run with the whole path.")
    if scheme == "memory":
        raise UserError(f"--run-dir {text} would be lost with the process: name a folder, or gs://bucket/run.")


def settle(run_dir: str | Path, config: RunConfig) -> tuple[Path, RunConfig]:
    """The folder and the configuration of a run whose --run-dir may be an address: that becomes the mirror of its staging
    folder.

    Raises UserError where another mirror was asked for, or the text is nearly an address.
    """
    check_address(str(run_dir))
    if not is_address(str(run_dir)):
        return Path(run_dir), config
    address, mirror = normal(str(run_dir)), config.checkpoint.mirror
    if mirror is not None and normal(mirror) != address:
        raise UserError(f"--run-dir {address} keeps the checkpoints there: leave out --checkpoint.mirror {mirror}.")
    return staging_folder(address), replace(config, checkpoint=replace(config.checkpoint, mirror=address))


def staging_id(run_dir: Path, address: str) -> str:
    """The number of a staging folder, which is given to it here where it has none; for one process at a time."""
    try:
        return json.loads((run_dir / MARK).read_bytes())["id"]
    except (OSError, ValueError, KeyError, TypeError):
        number = secrets.token_hex(8)
        temporary = run_dir.with_name(f"{run_dir.name}{MARK}.{os.getpid()}")
        temporary.write_text(json.dumps({"address": address, "id": number}))
        temporary.rename(run_dir / MARK)
        return number


@contextlib.contextmanager
def filling(run_dir: Path) -> Iterator[None]:
    """Made and held by one process of this host at a time. Raises UserError where the folder cannot be used."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        held = wait_for_lock(run_dir.with_name(f"{run_dir.name}.lock"))
        held.__enter__()
    except OSError as error:
        raise UserError(
            f"the staging folder {run_dir} cannot be used: {error.strerror}. Name a folder for such folders in {VARIABLE}."
        ) from None
    try:
        yield
    finally:
        held.__exit__(None, None, None)


def is_in_use(run_dir: Path) -> bool:
    """Whether an attempt of a run is going on in it."""
    try:
        take_lock(run_dir / ".lock").close()
    except InUse:
        return True
    return False


def _contents(run_dir: Path) -> list[Path]:
    """Of a run, but for what whoever started this process may be writing already."""
    return [p for p in sorted(run_dir.iterdir()) if p.name not in OURS - {"steps"}]


def move_aside(run_dir: Path) -> Path:
    """Moves a run into a folder beside it, where it is a run of its own; returns that."""
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.aside-{number}")).exists():
        number += 1
    aside.mkdir()
    for path in _contents(run_dir):
        path.rename(aside / path.name)
    return aside


def remove_folder(where: Path) -> None:
    """The mark goes first: a half-removed checkpoint must not count."""
    (where / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(where, ignore_errors=True)


def clear(run_dir: Path, keep: set[int]) -> None:
    """Removes a run, but for the checkpoints of these steps."""
    for path in _contents(run_dir):
        if path.name == "checkpoints":
            for entry in path.iterdir():
                if entry.name not in {str(step) for step in keep}:
                    remove_folder(entry)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

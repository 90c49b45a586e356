"""manifest.json: the mark of a whole checkpoint, and what must be true of its files. Standard library only."""

import hashlib
import json
import os
from pathlib import Path

from sharder.fields import UserError

NAME = "manifest.json"


class Damaged(UserError):
    """A checkpoint is not what was saved."""


def write_durably(path: Path, text: str) -> None:
    """The file appears whole or not at all, and survives a power cut once it has appeared."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def checksum(manifest: dict) -> str:
    """SHA-256 of everything but the checksum itself."""
    rest = {k: v for k, v in manifest.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def file_sizes(entry: Path) -> dict[str, int]:
    """Bytes of every file of a checkpoint by its path in it, but for the manifest."""
    files = sorted(p for p in entry.rglob("*") if p.is_file() and not p.name.startswith(NAME))
    return {str(p.relative_to(entry)): p.stat().st_size for p in files}


def write_manifest(entry: Path, manifest: dict) -> None:
    """Makes a folder a checkpoint; everything else in it must be there."""
    whole = {**manifest, "files": file_sizes(entry)}
    write_durably(entry / NAME, json.dumps({**whole, "sha256": checksum(whole)}, indent=1))


def parse(entry: Path) -> dict:
    """The manifest of a folder. Raises Damaged saying what is wrong with it, FileNotFoundError where there is none."""
    try:
        manifest = json.loads((entry / NAME).read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise Damaged(f"its {NAME} cannot be read: {error}") from None
    if (
        not isinstance(manifest, dict)
        or not isinstance(manifest.get("leaves"), dict)
        or not isinstance(manifest.get("files"), dict)
    ):
        raise Damaged(f"its {NAME} describes no leaves and files")
    if manifest.get("sha256") != checksum(manifest):
        raise Damaged(f"its {NAME} is not what was written: the SHA-256 in it is of other content")
    return manifest


def check_files(entry: Path, manifest: dict) -> None:
    """Raises Damaged naming a file that is missing or of another size; contents are verified when they are restored."""
    for name, size in manifest["files"].items():
        try:
            found = (entry / name).stat().st_size
        except OSError:
            raise Damaged(f"{name} is missing") from None
        if found != size:
            raise Damaged(f"{name} has {found:,} bytes, but {size:,} were written")

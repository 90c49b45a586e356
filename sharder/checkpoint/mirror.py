"""A second place for whole checkpoints: any address that fsspec opens (gs://, s3://, file://, memory://).

Saves go to the run's own folder first, and from there to the mirror, one checkpoint at a time and the manifest last: that
folder is all the staging there is. A run whose folder is gone goes on from its mirror. Every operation is tried again a few times; a
mirror that does not answer costs the copy, never the run.
"""

import errno
import json
import posixpath
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from sharder.checkpoint.folders import entry, fault
from sharder.config import CheckpointConfig, UserError

RUN_FILES = ("metrics.jsonl", "events.jsonl", "plan.json", "config.json")
"""Copied with every checkpoint; config.json last: with it a folder is a run."""
ATTEMPTS, FIRST_DELAY_S = 5, 1.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk of this machine is at fault, not the mirror."""


def open_mirror(config: CheckpointConfig) -> "Mirror | None":
    """What `--checkpoint.mirror` asks for. Raises UserError where nothing can open such an address."""
    return None if config.mirror is None else Mirror(config.mirror)


class Mirror:
    """The mirror of one run, in the hands of process 0."""

    def __init__(self, url: str, sleep: Callable[[float], None] = time.sleep):
        """Raises UserError where nothing can open such an address."""
        import fsspec

        self.url, self._sleep = url, sleep
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            packages = "gs:// takes the package gcsfs, s3:// s3fs"
            raise UserError(f"--checkpoint.mirror {url} cannot be opened: {error} ({packages}).") from None

    def _at(self, *parts: str) -> str:
        return posixpath.join(self._root, *parts)

    def _try(self, action: Callable, *arguments, **options):
        """Up to ATTEMPTS times, with growing pauses. Raises the last error; a missing file is an answer, not a failure, and room
        does not come by waiting."""
        for number in range(ATTEMPTS):
            try:
                return action(*arguments, **options)
            except FileNotFoundError:
                raise
            except Exception as error:  # stores raise errors of their own
                if number == ATTEMPTS - 1 or getattr(error, "errno", None) in NO_ROOM:
                    raise
                self._sleep(FIRST_DELAY_S * 2**number)

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints there, ascending."""
        try:
            names = self._try(self._fs.ls, self._at("checkpoints"), detail=False)
        except FileNotFoundError:
            return []
        steps = sorted(int(n) for n in (posixpath.basename(name.rstrip("/")) for name in names) if n.isdecimal())
        return [s for s in steps if self._try(self._fs.exists, self._at("checkpoints", str(s), "manifest.json"))]

    def check_owner(self, run_id: str) -> None:
        """Raises UserError where the address holds another run."""
        try:
            owner = json.loads(self._try(self._fs.cat_file, self._at("config.json"))).get("run_id")
        except FileNotFoundError:
            return
        if owner != run_id:
            raise UserError(
                f"--checkpoint.mirror {self.url} holds another run: choose another address, or the --run-dir that it mirrors."
            )

    def upload(self, run_dir: Path, step: int) -> None:
        """Copies a whole checkpoint and the run's files."""
        where, there = entry(run_dir, step), self._at("checkpoints", str(step))
        self.set_aside([step])
        manifest = json.loads((where / "manifest.json").read_text())
        for name in (*manifest["files"], "manifest.json"):
            self._put(where / name, posixpath.join(there, name))
        for name in RUN_FILES:
            if (run_dir / name).exists():
                self._put(run_dir / name, self._at(name))

    def _put(self, path: Path, there: str) -> None:
        self._try(self._fs.makedirs, posixpath.dirname(there), exist_ok=True)
        self._try(self._fs.put_file, str(path), there)

    def fetch(self, run_dir: Path) -> int | None:
        """Copies the newest checkpoint that is whole, and the run's files, into an empty folder; returns its step.

        Raises UserError where the mirror cannot be read, or holds checkpoints of which none is whole, and OSError where the
        folder has no room.
        """
        try:
            steps = self.steps()
            for step in reversed(steps):
                where = entry(run_dir, step)
                for name in self._try(self._fs.find, self._at("checkpoints", str(step))):
                    target = where / posixpath.relpath(name, self._at("checkpoints", str(step)))
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._try(self._fs.get_file, name, str(target))
                if fault(where) is None:
                    for name in RUN_FILES:
                        if self._try(self._fs.exists, self._at(name)):
                            self._try(self._fs.get_file, self._at(name), str(run_dir / name))
                    return step
                shutil.rmtree(where)
        except Exception as error:  # as above
            if getattr(error, "errno", None) in NO_ROOM:
                raise
            raise UserError(f"--checkpoint.mirror {self.url} cannot be read: {error}") from error
        if steps:
            raise UserError(f"--checkpoint.mirror {self.url} has checkpoints of steps {steps}, but none is whole.")
        return None

    def set_aside(self, steps: list[int]) -> None:
        """Unmarks checkpoints: what was uploaded stays, but is none any more."""
        for step in steps:
            mark = self._at("checkpoints", str(step), "manifest.json")
            if self._try(self._fs.exists, mark):
                self._try(self._fs.mv, mark, f"{mark}.set-aside")

    def keep(self, steps: set[int]) -> None:
        """Removes all but these."""
        for step in set(self.steps()) - steps:
            self.set_aside([step])
            self._try(self._fs.rm, self._at("checkpoints", str(step)), recursive=True)

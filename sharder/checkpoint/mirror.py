"""A second place for whole checkpoints: any address that fsspec opens (gs://, s3://, file://, memory://).

Saves go to the run's own folder first, and from there to the mirror, one checkpoint at a time and the manifest last: that
folder is all the staging there is. A run whose folder is gone goes on from its mirror. Every operation is tried again a few times; a
mirror that does not answer costs the copy, never the run.
"""

import contextlib
import errno
import json
import posixpath
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sharder.checkpoint.folders import entry, fault
from sharder.checkpoint.manifest import Damaged, checksum
from sharder.checkpoint.retention import retained
from sharder.config import CheckpointConfig, UserError
from sharder.facts import is_run

RUN_FILES = ("plan.json", "metrics.jsonl", "events.jsonl", "tokenizer*", "assets/**/*", "steps/*.jsonl", "config.json")
"""Copied with every checkpoint; config.json last: with it a folder is a run."""
ATTEMPTS, FIRST_DELAY_S = 5, 1.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk of this machine is at fault, not the mirror."""


class Mirror:
    """The mirror of one run, in the hands of process 0."""

    option = "--checkpoint.mirror"
    apart = False
    """Whether processes of the run do not see the folder of process 0."""

    def __init__(self, url: str, say: Callable[[str], None] = print):
        """Raises UserError where nothing can open such an address."""
        import fsspec

        self.url, self.say = url, say
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            packages = "gs:// takes the package gcsfs, s3:// s3fs"
            raise UserError(f"{self.option} {url} cannot be opened: {error} ({packages}).") from None
        self._unchecked: str | None = None
        """The run whose address it should be, until that is known."""
        self._metrics: dict[int, dict] = {}
        """Of the checkpoints there, as far as they are known."""

    # What a run asks of it.

    def come_near(self) -> None:
        """Of every process, before it knows the others: what it must have read by then."""

    def bring_newest(self, run_dir: Path, wanted: int | None = None) -> None:
        """Before an attempt is chosen: the newest checkpoint, where the folder holds no run. Raises UserError where it cannot
        be read."""
        if not is_run(run_dir):
            fetched = self.fetch(run_dir)
            if fetched is not None:
                self.say(f"the checkpoint of step {fetched} was fetched from {self.url}")

    def is_elsewhere(self) -> bool:
        """Whether the newest attempt had another folder, so that one may go on there."""
        return False

    def begin(self, run_id: str, number: int, back_to: int | None) -> int:
        """Once it is chosen; returns its number. With `back_to` later checkpoints count no more. Raises UserError where the
        address is another run's, or does not answer when the run goes back."""
        self._unchecked = run_id
        try:
            self._check_owner()
        except UserError:
            raise
        except Exception as error:  # stores raise errors of their own
            self.say(f"{self.url} does not answer: {error}. Training goes on, and every save tries it again.")
        if back_to is not None:
            with self.reading():
                self._check_owner()
                self.set_aside(s for s in self.steps() if s > back_to)
        return number

    def opened(self) -> None:
        """Of process 0, when the run's files are written."""

    def bring_to_all(self, step: int | None) -> None:
        """Of all processes: the checkpoint to go on from, where they do not see the folder of process 0."""

    def bring_another(self, run_dir: Path, step: int, before: int | None) -> int | None:
        """After the checkpoint of `step` was found damaged and set aside: which to take, given the one that the folder has."""
        return before

    def finish(self, uncopied: int | None) -> str | None:
        """At the end, given the step of a checkpoint that is not there: what is missing there; None: nothing that a mirror
        promises."""

    # Its operations.

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
                time.sleep(FIRST_DELAY_S * 2**number)

    def _read(self, *parts: str) -> dict | None:
        """A JSON file; None where there is none. Raises Damaged where it is something else."""
        try:
            content = self._try(self._fs.cat_file, self._at(*parts))
        except FileNotFoundError:
            return None
        try:
            value = json.loads(content)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise Damaged(f"{'/'.join(parts)} is no JSON object")
        return value

    def _names(self, *parts: str) -> list[str]:
        """What is in a folder there."""
        self._fs.invalidate_cache()  # others write there too
        try:
            names = self._try(self._fs.ls, self._at(*parts), detail=False)
        except FileNotFoundError:
            return []
        return [posixpath.basename(name.rstrip("/")) for name in names]

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints there, ascending."""
        steps = sorted(int(name) for name in self._names("checkpoints") if name.isdecimal())
        return [s for s in steps if self._try(self._fs.exists, self._at("checkpoints", str(s), "manifest.json"))]

    def manifest(self, step: int) -> dict | None:
        """Of a checkpoint there; None where there is none. Raises Damaged where it is not what was written."""
        found = self._read("checkpoints", str(step), "manifest.json")
        if found is not None and (found.get("sha256") != checksum(found) or not isinstance(found.get("files"), dict)):
            raise Damaged(f"checkpoints/{step}/manifest.json is not what was written")
        return found

    def _check_owner(self) -> None:
        if self._unchecked is None:
            return
        owner = self._read("config.json")
        if owner is not None and owner.get("run_id") != self._unchecked:
            raise UserError(
                f"{self.option} {self.url} holds another run: choose another address, or the --run-dir that it mirrors."
            )
        self._unchecked = None

    def upload(self, run_dir: Path, step: int) -> None:
        """Copies a whole checkpoint and the run's files."""
        where = entry(run_dir, step)
        manifest = json.loads((where / "manifest.json").read_text())
        self.make_room(step)
        self.put(where, manifest["files"], "checkpoints", str(step))
        # Before the mark: what is fetched has the metrics up to its step.
        self.put_run_files(run_dir)
        self.mark(where, manifest)

    def make_room(self, step: int) -> None:
        """Removes what is there of a step already, also of an upload that was cut off."""
        self._check_owner()
        self.remove([step])

    def mark(self, where: Path, manifest: dict) -> None:
        """Makes what was copied a checkpoint; `where` holds its manifest.json."""
        self.put(where, ["manifest.json"], "checkpoints", str(manifest["step"]))
        self._metrics[manifest["step"]] = manifest.get("metrics", {})

    def put(self, folder: Path, names: Iterable[str], *parts: str) -> None:
        """Copies files of a folder."""
        for name in names:
            there = self._at(*parts, name)
            self._try(self._fs.makedirs, posixpath.dirname(there), exist_ok=True)
            self._try(self._fs.put_file, str(folder / name), there)

    def put_run_files(self, run_dir: Path, patterns: Iterable[str] = RUN_FILES) -> None:
        for pattern in patterns:
            self.put(run_dir, [str(p.relative_to(run_dir)) for p in sorted(run_dir.glob(pattern)) if p.is_file()])

    def get_run_files(self, run_dir: Path) -> None:
        """Those of a run there; config.json comes last, as it was written."""
        top = self._names()
        names = [n for n in top if Path(n).match("tokenizer*") or n in RUN_FILES and n != "config.json"]
        for folder in {"assets", "steps"} & set(top):
            names += [posixpath.relpath(n, self._root.rstrip("/")) for n in self._try(self._fs.find, self._at(folder))]
        for name in (*names, *{"config.json"} & set(top)):
            target = run_dir / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # Others may be reading what is there.
            self._try(self._fs.get_file, self._at(name), f"{target}.new")
            Path(f"{target}.new").rename(target)

    def fetch(self, run_dir: Path) -> int | None:
        """Copies the newest checkpoint that is whole, and the run's files, into an empty folder; returns its step.

        Raises UserError where the mirror cannot be read, or holds checkpoints of which none is whole, and OSError where the
        folder has no room.
        """
        with self.reading():
            steps = self.steps()
            for step in reversed(steps):
                if self.get(run_dir, step) is None:
                    self.get_run_files(run_dir)
                    return step
        if steps:
            raise UserError(f"{self.option} {self.url} has checkpoints of steps {steps}, but none is whole.")
        return None

    def get(self, run_dir: Path, step: int) -> str | None:
        """As `copy`, and leaves nothing of what is not whole."""
        damage = self.copy(run_dir, step)
        if damage is not None:
            shutil.rmtree(entry(run_dir, step))
        return damage

    def copy(self, run_dir: Path, step: int) -> str | None:
        """Copies what is there of a checkpoint, the manifest last. Returns what is wrong with it.

        Raises UserError with the numbers where there is no room for it.
        """
        where = entry(run_dir, step)
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir(parents=True)
        try:
            files = (self.manifest(step) or {"files": {}})["files"]
        except Damaged:
            files = {}  # the manifest alone, in which `fault` finds the same
        needed, free = sum(files.values()), shutil.disk_usage(where).free
        if needed > free:
            shutil.rmtree(where)
            raise UserError(
                f"the checkpoint of step {step} of {self.url} takes {needed:,} bytes, and {free:,} are free on the disk of"
                f" {run_dir}: free"
                " some, or use a folder on another disk."
            )
        for name in (*files, "manifest.json"):
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # which `fault` names
                self._try(self._fs.get_file, self._at("checkpoints", str(step), name), str(where / name))
        return fault(where)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Errors of the store become a UserError; those of this machine's disk stay what they are."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # as above
            if getattr(error, "errno", None) in NO_ROOM:
                raise
            raise UserError(
                f"{self.option} {self.url} cannot be used: {str(error) or type(error).__name__}. See that it answers, and"
                f" that this host may"
                " use it, then give the same command again."
            ) from error

    def set_aside(self, steps: Iterable[int]) -> None:
        """Unmarks checkpoints: what was uploaded stays, but is none any more."""
        for step in steps:
            mark = self._at("checkpoints", str(step), "manifest.json")
            if self._try(self._fs.exists, mark):
                self._try(self._fs.mv, mark, f"{mark}.set-aside")

    def remove(self, steps: Iterable[int]) -> None:
        """The mark goes first: a half-removed checkpoint must not count."""
        for step in steps:
            self.set_aside([step])
            where = self._at("checkpoints", str(step))
            if self._try(self._fs.exists, where):
                self._try(self._fs.rm, where, recursive=True)

    def keep(self, config: CheckpointConfig) -> None:
        """Removes the checkpoints that need not stay: some of those that do may be there alone."""
        steps = self.steps()
        for step in set(steps) - self._metrics.keys():
            self._metrics[step] = (self._read("checkpoints", str(step), "manifest.json") or {}).get("metrics", {})
        self.remove(set(steps) - retained({s: self._metrics[s].get(config.best) for s in steps}, config))

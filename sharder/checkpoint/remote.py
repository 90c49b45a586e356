"""A run at an address of a store, in the hands of one of its processes: a mirror that is the run, and a staging folder before
it.

At the start the store is the truth. It holds `attempt.json`, which says in which staging folder the newest attempt wrote:
where that is this one, all that is here is at least as new; everywhere else what is here gives way to what is there, and where
it holds a checkpoint that never got there it is moved aside, not removed. Whoever began last owns the run: an attempt that
finds another one's number there stops before it makes its next checkpoint.

Where all processes see one staging folder, that is all. Where they do not, each folder gets a part of every checkpoint; its
first process copies it, process 0 writes the manifest over all parts when all have said that theirs are there, and what was
copied goes. A host that restores fetches the whole of it, and joins the parts itself.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sharder.agreement import exchange
from sharder.checkpoint.folders import UNCOPIED, entry, fault, folder, list_steps, whole_manifest
from sharder.checkpoint.folders import set_aside as rename
from sharder.checkpoint.manifest import Damaged, checksum, file_sizes, write_durably
from sharder.checkpoint.mirror import RUN_FILES, Mirror
from sharder.checkpoint.staging import (
    clear,
    filling,
    is_in_use,
    move_aside,
    remove_folder,
    staging_folder,
    staging_id,
)
from sharder.config import CheckpointConfig, UserError
from sharder.facts import address_of

ATTEMPT = "attempt.json"
NOT_COPIED = "it was not copied to"
OF_PROCESS_0 = tuple(pattern for pattern in RUN_FILES if not pattern.startswith("steps/"))
"""Of the files of a run; the others are of each process."""
FETCH_TIMEOUT_S = 3600
"""How long processes wait for the slowest host to fetch a checkpoint."""


class TakenOver(UserError):
    """Another attempt of the run began elsewhere."""


def open_store(config: CheckpointConfig, run_dir: Path, say: Callable[[str], None] = print) -> Mirror | None:
    """What is to be done with checkpoints beside keeping them in the run's folder; None: nothing.

    Raises UserError where nothing can open the address, or the folder is the staging folder of one that was not named.
    """
    address = address_of(run_dir)
    if address is not None and address != config.mirror:
        raise UserError(f"{run_dir} is where the run {address} is staged on this host: use --run-dir {address}.")
    if config.mirror is None:
        return None
    return RemoteRun(config.mirror, run_dir, say) if run_dir == staging_folder(config.mirror) else Mirror(config.mirror, say)


class RemoteRun(Mirror):
    """Of one process."""

    option = "--run-dir"

    def __init__(self, url: str, run_dir: Path, say: Callable[[str], None] = print):
        super().__init__(url, say)
        self.run_dir = run_dir
        self.leads = True
        """Of the processes that share the staging folder, this one copies."""
        self._id = ""
        self._attempt: dict = {}
        self.brought: list[int] = []
        """Steps of checkpoints that the store is known to have, in the order of their making."""
        self._fetched: set[int] = set()
        self._num_fetches = 0
        self._files = RUN_FILES
        """Of the run, those that the processes of this staging folder write."""

    # At the start.

    def come_near(self) -> None:
        """Makes the staging folder what the store says, but for its checkpoints. Raises UserError where the store cannot be
        read, or holds something else."""
        with filling(self.run_dir):
            self._id = staging_id(self.run_dir, self.url)
            if is_in_use(self.run_dir):  # process 0 was here before, or another attempt is, which it will find
                return
            with self.reading():
                newest = self._newest_attempt()
                if newest.get("staging") != self._id:
                    self._give_way()
                    self.get_run_files(self.run_dir)

    def _read_attempt(self) -> dict | None:
        try:
            return self._read(ATTEMPT)
        except Damaged:
            raise UserError(
                f"{self.url}/{ATTEMPT} is damaged, which says whose the run is: where no attempt of it goes on, remove that file and"
                " give the same command again; it begins with the newest checkpoint there."
            ) from None

    def _newest_attempt(self) -> dict:
        """Raises UserError where the address holds something else than a run."""
        found = self._read_attempt()
        if found is None:
            names = set(self._names()) - {"checkpoints", "config.json"}
            if names and not self._try(self._fs.exists, self._at("config.json")):
                raise UserError(f"{self.url} holds {', '.join(sorted(names)[:3])}, and is not a run: choose another --run-dir.")
        return found or {}

    def _give_way(self) -> None:
        """Of what is here nothing is kept but copies of what is there."""
        here = set(list_steps(self.run_dir))
        same = {step for step in here if self._is_same(step)}
        if here - same:
            aside = move_aside(self.run_dir)
            print(  # in whichever process comes first, before any knows its number
                f"{self.run_dir} held checkpoints that {self.url} does not have (of steps"
                f" {', '.join(map(str, sorted(here - same)))}), and the run"
                f" has been elsewhere since: they are kept in {aside}, a run of its own.",
                file=sys.stderr,
                flush=True,
            )
        else:
            clear(self.run_dir, keep=same)

    def _is_same(self, step: int) -> bool:
        """Whether a checkpoint here is whole and the one that is there."""
        try:
            here = whole_manifest(entry(self.run_dir, step))
            there = self.manifest(step)
        except (OSError, Damaged):
            return False
        return there is not None and there["sha256"] == here["sha256"]

    def bring_newest(self, run_dir: Path, wanted: int | None = None) -> None:
        """Of process 0: the newest checkpoint there, unless a newer one is here that never got there; and the `wanted` one."""
        with self.reading():
            there = self.steps()
            whole = bool(self._not_there()) or not there
            for step in reversed(there):
                whole = whole or self.bring(step)
            if wanted in there:
                self.bring(wanted)
        if not whole:
            raise UserError(f"{self.option} {self.url} has checkpoints of steps {there}, but none is whole.")

    def _not_there(self) -> list[int]:
        """Steps of checkpoints here that should be the newest there: only what the newest attempt wrote is still here."""
        newest = max(self.steps(), default=0)
        return [s for s in list_steps(self.run_dir) if s >= newest and not self._is_same(s)]

    def bring(self, step: int, keep_damaged: bool = False) -> bool:
        """Whether the checkpoint is here now, whole."""
        if self._is_same(step):
            return True
        damage = (self.copy if keep_damaged else self.get)(self.run_dir, step)
        if damage is None:
            self._fetched.add(step)
            self.say(f"the checkpoint of step {step} was fetched from {self.url}")
        else:
            self.say(f"the checkpoint of step {step} of {self.url} is no good: {damage}")
        return damage is None

    def is_elsewhere(self) -> bool:
        with self.reading():
            return self._newest_attempt().get("staging") not in (None, self._id)

    def begin(self, run_id: str, number: int, back_to: int | None) -> int:
        """As the mirror's, and takes the run over from whoever had it."""
        self._unchecked = run_id
        with self.reading():
            self._check_owner()
            self._attempt = {
                "run_id": run_id, "attempt": max(number, 1 + self._newest_attempt().get("attempt", 0)), "staging": self._id,
                "host": socket.gethostname(), "process": os.getpid(), "time_s": time.time(),
            }  # fmt: skip
            self._try(self._fs.makedirs, self._root, exist_ok=True)
            self._try(self._fs.pipe_file, self._at(ATTEMPT), json.dumps(self._attempt).encode())
            if back_to is not None:
                self.set_aside(s for s in self.steps() if s > back_to)
            self.put_run_files(self.run_dir, OF_PROCESS_0)
            for step in [s for s in self._not_there() if back_to is None or s <= back_to]:
                self.say(f"the checkpoint of step {step} had not got to {self.url}: it is copied now")
                self.upload(self.run_dir, step)
        return self._attempt["attempt"]

    def opened(self) -> None:
        """Of process 0, when the run's files are written: from now on the address is a run. Raises UserError where it does not
        answer."""
        with self.reading():
            self.put_run_files(self.run_dir, self._files)

    def bring_to_all(self, step: int | None) -> None:
        """The checkpoint of a step in every staging folder. Raises UserError, in all processes, where one cannot have it."""
        import jax

        self._num_fetches += 1
        ids = exchange(f"staging/ids/{self._num_fetches}", self._id)
        self.leads, self.apart = ids.index(self._id) == jax.process_index(), len(set(ids)) > 1
        if self.apart:
            ledgers = [f"steps/process_{i}.jsonl" for i, other in enumerate(ids) if other == self._id]
            self._files = (*ledgers, *(OF_PROCESS_0 if jax.process_index() == 0 else ()))
        problem = None
        if self.apart and self.leads:
            try:
                with filling(self.run_dir), self.reading():
                    if jax.process_index() != 0:  # which sets aside what it finds, and says so
                        self._free_all_but(step)
                    if step is not None and not self.bring(step):
                        problem = f"{socket.gethostname()} cannot have the checkpoint of step {step} of {self.url}"
            except (UserError, OSError) as error:
                problem = str(error)
        problem = next(filter(None, exchange(f"staging/brought/{self._num_fetches}", problem, FETCH_TIMEOUT_S)), None)
        if problem is not None:
            raise UserError(problem)
        self.brought += [] if step is None else [step]

    def bring_another(self, run_dir: Path, step: int, before: int | None) -> int | None:
        """What lay here may have been damaged here: it is fetched again once, and counts no more when that is damaged too."""
        with self.reading():
            if step in self._fetched:
                self.set_aside([step])
            there = [s for s in self.steps() if s <= step]
            for candidate in reversed(there):
                if self.bring(candidate):
                    return candidate
        return before

    def copy(self, run_dir: Path, step: int) -> str | None:
        """As the mirror's, and joins the parts of processes that did not share a folder."""
        damage = super().copy(run_dir, step)
        if damage is not None:
            return damage
        from sharder.checkpoint.orbax import join_parts

        return join_parts(entry(run_dir, step))

    # While it goes on.

    def check_ours(self) -> None:
        """Raises TakenOver where another attempt has begun."""
        found = self._read_attempt() or {}
        if (found.get("attempt"), found.get("staging")) != (self._attempt["attempt"], self._id):
            raise TakenOver(
                f"{self.url} was taken over: attempt {found.get('attempt')} began on {found.get('host')} while this one,"
                f" attempt"
                f" {self._attempt['attempt']}, went on. This one stops, and makes no more checkpoints there."
            )

    def make_room(self, step: int) -> None:
        self.check_ours()
        super().make_room(step)

    def mark(self, where: Path, manifest: dict) -> None:
        self.check_ours()
        super().mark(where, manifest)
        self.brought.append(manifest["step"])

    def hand_over(self, manifest: dict, timeout_s: float) -> list[str | None]:
        """Of all processes, when each has written its part: makes the parts a checkpoint of the store. Returns what went
        wrong, by process; the same in all. Raises TakenOver, PeerLost."""
        import jax

        step, index = manifest["step"], jax.process_index()
        problem = self._caught(lambda: self.make_room(step)) if index == 0 else None
        faults, files = exchange(f"save/{step}/room-there", problem, timeout_s), {}
        if not any(faults):
            if self.leads:
                problem, files = self._caught(lambda: self._put_part(step)), file_sizes(entry(self.run_dir, step))
            parts = exchange(f"save/{step}/uploaded", [problem, files], timeout_s)
            faults, files = [p[0] for p in parts], [p[1] for p in parts]
        if not any(faults):
            problem = self._caught(lambda: self._commit(manifest, files)) if index == 0 else None
            faults = exchange(f"save/{step}/committed", problem, timeout_s)
        return faults

    def _caught(self, action: Callable[[], None]) -> str | None:
        """What goes wrong in it."""
        try:
            action()
        except TakenOver:
            raise
        except Exception as error:  # stores raise errors of their own
            return f"{NOT_COPIED} {self.url}: {str(error) or type(error).__name__}"

    def _put_part(self, step: int) -> None:
        where = entry(self.run_dir, step)
        self.put(where, file_sizes(where), "checkpoints", str(step))
        self.put_run_files(self.run_dir, self._files)

    def _commit(self, manifest: dict, parts: list[dict[str, int]]) -> None:
        """Raises ValueError where two folders hold the same file."""
        files = {name: size for part in parts for name, size in part.items()}
        if len(files) != sum(map(len, parts)):
            raise ValueError("two hosts wrote the same file")
        whole = {**manifest, "files": files}
        where = entry(self.run_dir, manifest["step"])
        write_durably(where / "manifest.json", json.dumps({**whole, "sha256": checksum(whole)}, indent=1))
        self.mark(where, whole)

    def free(self) -> None:
        """Removes the checkpoints of this staging folder: all are in the store."""
        for where in folder(self.run_dir).glob("*"):
            if where.name.isdecimal():
                remove_folder(where)

    def finish(self, uncopied: int | None) -> str | None:
        """Of the leading processes, when all is written: copies what the run noted last, and the checkpoint that is not there;
        says what is not there after that."""
        try:
            if self._attempt:
                self.check_ours()
            if uncopied is not None:
                self.upload(self.run_dir, uncopied)
            self.put_run_files(self.run_dir, self._files)
        except Exception as error:  # stores raise errors of their own
            what = "what the run noted last" if uncopied is None else f"the checkpoint of step {uncopied}"
            why = str(error) or type(error).__name__
            return f"{what} is not in {self.url} ({why}), but in {self.run_dir}: the same command copies it"

    def _free_all_but(self, step: int | None) -> None:
        """Of a host that is not process 0's; what the store never got stays under another name."""
        for where in folder(self.run_dir).glob("*"):
            if where.name.isdecimal() and fault(where) is None and not self._is_same(int(where.name)):
                name = rename(where, UNCOPIED)
                print(f"the checkpoint {where} had not got to {self.url}: it stays as {name}", file=sys.stderr, flush=True)
            elif where.name != str(step) and UNCOPIED not in where.name:
                remove_folder(where)

"""RAM snapshots: every few steps each process copies its shards into memory files of its host, for a restart of processes there.

The folder is private, holds two generations, and goes when the run has ended well. A generation that some process does not have,
or whose fingerprints are not those of its step, is not used: the run then goes on from its last checkpoint, and says so.
"""

import math
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np

from sharder.agreement import exchange, forget
from sharder.checkpoint.save import available_bytes
from sharder.checkpoint.shards import Generation, ShardFile, generations, local_bytes
from sharder.config import CheckpointConfig, UserError
from sharder.events import EventLog
from sharder.facts import MEMORY, snapshot_place
from sharder.train.attempt import Attempt
from sharder.train.fingerprint import differing, hex_digest
from sharder.train.setup import Setup
from sharder.train.state import TrainState, declare_state, from_paths, with_shardings

COST = 0.01
"""Share of the time that snapshots may take where nobody says how often."""
FIRST_AFTER = 3
"""Steps of an attempt before the first one, which measures what they cost."""


class Snapshots:
    """Of one process of a run."""

    def __init__(self, attempt: Attempt, config: CheckpointConfig, events: EventLog, say: Callable[[str], None]):
        self.attempt, self.events, self.say = attempt, events, say
        self.every = config.snapshot_every
        """Steps between two; None: not yet known; 0: never."""
        self.asked_for = bool(config.snapshot_every)
        self.place = snapshot_place(attempt.run_id, MEMORY)
        self._files: list[ShardFile] = []
        self._size = self._number = 0
        self._last_step: int | None = None
        self._stale: list[Path] | None = None

    def restore(self, setup: Setup) -> tuple[TrainState, int] | None:
        """The state of the newest snapshot that all processes have, where none of the run's checkpoints is newer, and its step.

        None where there is none, or it is in doubt, which is said.
        """
        if self.attempt.source is not None or self.attempt.rewinds:
            return None
        abstract = declare_state(setup.config, setup.declared)
        target = with_shardings(abstract, setup.state_shardings)
        least, (found, faults) = self.attempt.resume_step or 0, generations(self.place)
        usable = {(g.facts["step"], g.facts["attempt"]): g for g in found if g.covers(target) and g.facts["step"] >= least}
        offer = {"steps": sorted(usable), "any": bool(found or faults), "faults": faults}
        offers = exchange(f"snapshot/{self.attempt.number}/offers", offer)
        common = set.intersection(*({tuple(s) for s in offer["steps"]} for offer in offers))
        if not common:
            newest = max((g.facts["step"] for g in found), default=least)
            if any(offer["any"] for offer in offers) and (newest > least or any(offer["faults"] for offer in offers)):
                faults = [fault for offer in offers for fault in offer["faults"]]
                self._doubt(None, faults[0] if faults else "no step that all processes have whole, divided as this run is now")
            return None
        key = max(common)
        leaves = self._read(usable[key], target, setup)
        if leaves is None:
            return None
        # Until this attempt has one of its own, another one goes on from what this one was restored from.
        kept = {path for file, _ in usable[key].files for path in (file, file.with_suffix(".json"))}
        self._stale = [path for path in self.place.glob("*") if path not in kept]
        self.say(f"step {key[0]} was in the memory of this host: restored from the snapshot, verified")
        return from_paths(abstract, leaves), key[0]

    def _read(self, generation: Generation, target: Mapping, setup: Setup) -> dict[str, jax.Array] | None:
        """The leaves, verified in all processes alike; None where they are in doubt."""
        step, leaves, fault = generation.facts["step"], {}, None
        try:
            leaves = generation.read(target)
        except (OSError, ValueError) as error:
            fault = f"it cannot be read: {error}"
        faults = exchange(f"snapshot/{self.attempt.number}/read", fault)
        if any(faults):
            return self._doubt(step, next(filter(None, faults)))
        differ = differing(leaves, generation.facts["fingerprints"], setup.replicated())
        if differ:
            return self._doubt(step, f"{len(differ)} of {len(leaves)} leaves are not what was copied ({', '.join(differ[:3])})")
        if int(leaves["step"]) != step:
            return self._doubt(step, f"its state is of step {int(leaves['step'])}")
        return leaves

    def _doubt(self, step: int | None, why: str) -> None:
        self.events.write("snapshot_refused", step, reason=why)
        which = "the snapshots in memory are" if step is None else f"the snapshot of step {step} in memory is"
        self.say(f"{which} not used: {why}. The run goes on from its last checkpoint, or from the start where it has none.")

    def prepare(self, leaves: dict[str, jax.Array]) -> None:
        """Makes the place, once the state is there. Raises UserError with the numbers where memory does not do, if it was asked for."""
        for path in self.place.glob("*") if self._stale is None else self._stale:
            path.unlink(missing_ok=True)
        if self.every == 0:
            self.remove()
            return
        remove_orphans(self.place.parent)
        self._size = local_bytes(leaves)
        hosts = exchange(f"snapshot/{self.attempt.number}/hosts", {"host": socket.gethostname(), "bytes": self._size})
        fault = self._make_place() or no_memory(sum(h["bytes"] for h in hosts if h["host"] == socket.gethostname()))
        faults = exchange(f"snapshot/{self.attempt.number}/room", fault)
        if not any(faults):
            return
        why = f"no snapshots in memory: {next(filter(None, faults))}"
        if self.asked_for:
            raise UserError(f"{why}. Use --checkpoint.snapshot-every 0, or more devices or hosts.")
        self.say(why)
        self.every = 0
        self.remove()

    def _make_place(self) -> str | None:
        """Returns why it cannot be."""
        if not MEMORY.is_dir():
            return f"there is no {MEMORY}"
        try:
            for path in (self.place.parent, self.place):
                path.mkdir(mode=0o700, exist_ok=True)
                seen = path.lstat()
                if seen.st_uid != os.getuid() or stat.S_IMODE(seen.st_mode) != 0o700 or not stat.S_ISDIR(seen.st_mode):
                    return f"{path} is not a private folder of this user"
            (self.place / "run_dir").write_text(str(self.attempt.run_dir.resolve()))
        except OSError as error:
            return f"{error.filename}: {error.strerror}"

    def due(self, step: int, first_step: int) -> bool:
        if self.every is None:
            return step == first_step + FIRST_AFTER
        return self.every > 0 and step - (self._last_step or first_step) >= self.every

    def take(self, step: int, leaves: dict[str, jax.Array], leaf_digests: np.ndarray, step_time_s: float) -> None:
        """Copies the state of a step; returns when its arrays may be donated. Raises PeerLost where a process is gone."""
        began = time.perf_counter()
        facts = {
            "step": step, "attempt": self.attempt.number, "process": jax.process_index(),
            "fingerprints": {p: hex_digest(d) for p, d in zip(sorted(leaves), leaf_digests)},
        }  # fmt: skip
        fault = None
        try:
            self._next_file().write(leaves, facts)
        except OSError as error:
            fault = f"{error.strerror or error}"
        stall_s = time.perf_counter() - began
        # From here on every process knows that all have this generation, and the one before it may be overwritten.
        seen = exchange(self._name(step), {"stall_s": stall_s, "step_time_s": step_time_s, "fault": fault})
        if self._last_step is not None:
            forget(self._name(self._last_step))
        self._last_step = step
        faults = [x["fault"] for x in seen if x["fault"]]
        if faults:
            self.say(f"no snapshots in memory from here on: {faults[0]}")
            self.events.write("snapshot_refused", step, reason=faults[0])
            self.every = 0
            return
        for path in self._of_other_attempts():
            path.unlink(missing_ok=True)
        if not self.asked_for:
            self.every = interval(max(x["stall_s"] for x in seen), min(x["step_time_s"] for x in seen))
        self.events.write(
            "snapshot", step, stall_s=round(time.perf_counter() - began, 6), local_bytes=self._size, every=self.every
        )

    def _name(self, step: int) -> str:
        return f"snapshot/{self.attempt.number}/{step}"

    def _next_file(self) -> ShardFile:
        if len(self._files) < 2:
            path = self.place / f"{self.attempt.number}-{jax.process_index()}-{len(self._files)}.bin"
            self._files.append(ShardFile(path, self._size))
            return self._files[-1]
        self._number = 1 - self._number
        return self._files[1 - self._number]

    def _of_other_attempts(self) -> list[Path]:
        return [p for p in self.place.glob("*-*-*.*") if not p.name.startswith(f"{self.attempt.number}-")]

    def remove(self) -> None:
        """Leaves nothing behind; for a run that has ended well."""
        shutil.rmtree(self.place, ignore_errors=True)


def interval(stall_s: float, step_time_s: float) -> int:
    """The least number of steps between snapshots that cost no more than COST of the time."""
    return max(math.ceil(stall_s / (COST * max(step_time_s, 1e-9))), 1)


def no_memory(host_bytes: int) -> str | None:
    """Why two generations of all processes of this host do not fit; None where they do."""
    needed, available = 2 * host_bytes, available_bytes()
    free = os.statvfs(MEMORY).f_bavail * os.statvfs(MEMORY).f_frsize
    room = free if available is None else min(free, available)
    return None if needed <= room else f"two of them take {needed:,} bytes on this host, and {room:,} are free in {MEMORY}"


def remove_orphans(base: Path) -> None:
    """Frees what killed runs left whose folder is gone: nobody will resume them."""
    for run_dir in base.glob("*/run_dir"):
        try:
            if not Path(run_dir.read_text()).exists():
                shutil.rmtree(run_dir.parent, ignore_errors=True)
        except OSError:  # another process was faster
            pass

"""Saving while training goes on: the devices' copies are taken at once, all else happens in a thread.

Every process writes its own shards through orbax; what each of them met with is exchanged, so that a checkpoint becomes one for
all or for none. A save that storage refuses costs nothing but itself: the checkpoints before it stay, and training goes on.
"""

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax

from sharder.agreement import exchange
from sharder.checkpoint.folders import entry, folder, list_steps, read_manifest
from sharder.checkpoint.manifest import write_manifest
from sharder.checkpoint.mirror import Mirror
from sharder.checkpoint.orbax import PARTS, items, quietly, reason, streaming_handlers, write_small_arrays_whole
from sharder.checkpoint.remote import NOT_COPIED, TakenOver
from sharder.checkpoint.restore import Leaves
from sharder.checkpoint.retention import remove_others
from sharder.config import CheckpointConfig
from sharder.events import EventLog

SAVE_TIMEOUT_S = 1800
"""How long processes wait for one another's files."""


class SaveFailed(OSError):
    """A checkpoint could not be written; those before it are whole. The text says why, and which is the last of those."""

    store: str | None = None
    """The address where it should have been copied to, where that was the trouble."""


@dataclass
class _Pending:
    """A save in flight."""

    step: int
    copied: threading.Event = field(default_factory=threading.Event)
    announced: threading.Event = field(default_factory=threading.Event)
    """The event `save` is written."""
    thread: threading.Thread | None = None
    fault: str | None = None
    """Why it is none; the same in every process."""
    lost: BaseException | None = None
    """Another process is gone."""


class Saver:
    """Writes checkpoints in the background, at most one at a time."""

    def __init__(
        self, run_dir: Path, config: CheckpointConfig, events: EventLog, say: Callable[[str], None] = print, store: Mirror | None = None
    ):  # fmt: skip
        self.run_dir, self.config, self.events, self.say, self.store = run_dir, config, events, say, store
        self._apart = store is not None and store.apart
        """No process sees the files of all: what is written here is a part."""
        self._leads = store.leads if self._apart else jax.process_index() == 0
        """Of the processes that share a folder, this one keeps it."""
        self.uncopied: int | None = None
        """Step of the last checkpoint, where the store does not have it."""
        self._pending: _Pending | None = None
        self._failed: str | None = None
        """Why the last save asked for is no checkpoint."""
        self._has_said = False

    def save(self, step: int, leaves: Leaves, manifest: dict) -> None:
        """Starts a save; returns when the devices' copies are taken, so that the arrays may be donated.

        Where storage refuses it, that is said once, and the next save tries again. Raises PeerLost where a process is gone.
        """
        began = time.perf_counter()
        self.wait()
        wait_s, self._failed = time.perf_counter() - began, None
        num_bytes, local_bytes = sum(x.nbytes for x in leaves.values()), bytes_to_copy(leaves)
        here = socket.gethostname()
        num_sharing = exchange(f"save/{step}/host", here).count(here)
        at_once = bytes_at_once(local_bytes, available_bytes(), num_sharing)
        largest = max(bytes_to_copy({p: x}) for p, x in leaves.items())
        part = local_bytes * num_sharing if self._apart else None
        faults = exchange(f"save/{step}/room", no_room(self.run_dir, num_bytes, largest, at_once, self._leads, part))
        if any(faults):
            self._failed_to_save(step, next(filter(None, faults)))
            return
        quietly()
        write_small_arrays_whole()
        began, self._pending = time.perf_counter(), _Pending(step)
        target = (leaves, describe(step, leaves, manifest), self._pending, at_once)
        self._pending.thread = threading.Thread(target=self._write, args=target, name="saver")
        self._pending.thread.start()
        self._pending.copied.wait()
        stall_s = time.perf_counter() - began
        try:
            sizes = {"bytes": num_bytes, "local_bytes": local_bytes, "bytes_at_once": at_once}
            self.events.write("save", step, **sizes, stall_s=round(stall_s, 6), wait_s=round(wait_s, 6))
        finally:
            self._pending.announced.set()

    def _write(self, leaves: Leaves, manifest: dict, pending: _Pending, at_once: int | None) -> None:
        began, where = time.perf_counter(), entry(self.run_dir, pending.step)
        try:
            fault = self._write_own(where, leaves, pending, at_once)
            pending.fault = _first(exchange(f"save/{pending.step}/written", fault, SAVE_TIMEOUT_S))
            if pending.fault is None and self._apart:
                pending.fault = _first(self.store.hand_over(manifest, SAVE_TIMEOUT_S))
            elif pending.fault is None:
                fault = _commit(where, manifest) if jax.process_index() == 0 else None
                pending.fault = _first(exchange(f"save/{pending.step}/committed", fault, SAVE_TIMEOUT_S))
            if self._leads and pending.fault is not None:
                shutil.rmtree(where, ignore_errors=True)  # what could be written takes room that others may need
            elif self._leads and self._apart:
                self.store.free()
            if jax.process_index() == 0 and pending.fault is None:
                pending.announced.wait()
                self.events.write("saved", pending.step, save_s=round(time.perf_counter() - began, 6))
                remove_others(self.run_dir, self.config)
                self._tell_store(pending.step)
        except BaseException as error:  # noqa: BLE001  raised in the training thread by `wait`
            pending.lost = error
        finally:
            pending.copied.set()

    def _write_own(self, where: Path, leaves: Leaves, pending: _Pending, at_once: int | None) -> str | None:
        """Writes this process's shards; returns what went wrong."""
        try:
            futures = asyncio.run(_copy(where, leaves, at_once))
        except Exception as error:  # orbax and tensorstore raise many kinds
            return reason(error)
        finally:
            pending.copied.set()
        # All of them end before the folder may be removed.
        return next(filter(None, [_outcome(future) for future in futures]), None)

    def _tell_store(self, step: int) -> None:
        """Copies the checkpoint, where it is not there yet, and has removed there what need not stay. The next save waits for
        it: what is not copied yet is one checkpoint at most. Raises TakenOver."""
        if self.store is None:
            return
        began, self.uncopied = time.perf_counter(), None if self._apart else step
        try:
            if not self._apart:
                self.store.upload(self.run_dir, step)
                self.uncopied = None
            self.store.keep(self.config)
        except TakenOver:
            raise
        except Exception as error:  # stores raise errors of their own
            self.events.write("mirror_failed", step, reason=reason(error))
            what = "was not copied" if self.uncopied else "is there, but what need not be kept was not removed"
            self.say(f"{self.store.url}: the checkpoint of step {step} {what}: {reason(error)}. Training goes on.")
        else:
            self.events.write("mirrored", step, copy_s=round(time.perf_counter() - began, 6))

    def _failed_to_save(self, step: int, fault: str) -> None:
        self._failed = f"{entry(self.run_dir, step)} cannot be written: {fault}"
        if self._leads:
            shutil.rmtree(entry(self.run_dir, step), ignore_errors=True)  # orbax may have gone on writing when it had failed
        self.events.write("save_failed", step, reason=fault)
        if not self._has_said:
            self._has_said = True
            self.say(f"{self._failed}; {self._last_whole()}. Training goes on, and the next save tries again.")

    def _last_whole(self) -> str:
        steps = self.store.brought if self._apart else list_steps(self.run_dir)
        return f"the last whole checkpoint is of step {steps[-1]}" if steps else "there is no whole checkpoint yet"

    def wait(self) -> None:
        """Blocks until the save in flight, if any, is whole on disk, or is known not to be. Raises PeerLost."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.thread.join()
        if pending.lost is not None:
            raise pending.lost
        if pending.fault is not None:
            self._failed_to_save(pending.step, pending.fault)

    def finish(self) -> str | None:
        """When the run's files are closed: what its store lacks of them; None: nothing."""
        return self.store.finish(self.uncopied) if self.store is not None and self._leads else None

    def close(self) -> None:
        """Waits. Raises SaveFailed where the last save is no checkpoint."""
        self.wait()
        if self._failed is not None:
            failed = SaveFailed(f"{self._failed}; {self._last_whole()}")
            failed.store = self.store.url if NOT_COPIED in self._failed else None
            raise failed


def _first(faults: list[str | None]) -> str | None:
    return next((f"process {i}: {fault}" if len(faults) > 1 else fault for i, fault in enumerate(faults) if fault), None)


def _outcome(future) -> str | None:
    """Waits; returns what went wrong."""
    try:
        future.result()
    except Exception as error:  # as above
        return reason(error)


async def _copy(where: Path, leaves: Leaves, at_once: int | None) -> list:
    """Takes the devices' copies; what is returned writes them. With `at_once` it copies and writes so many bytes at a time, a
    larger array alone, and returns when all are written."""
    import orbax.checkpoint as ocp
    from etils import epath

    futures, options = [], {}
    if at_once is not None:
        options = {"save_device_host_concurrent_gb": at_once / 1e9, "type_handler_registry": streaming_handlers()}
    for name, tree in items(leaves).items():
        handler = ocp.PyTreeCheckpointHandler(**options)
        begun = await handler.async_save(epath.Path(where / name), args=ocp.args.PyTreeSave(tree))
        if at_once is not None:  # the arrays must not be donated before their turn has come
            for future in begun:
                future.result()
        futures += begun
    return futures


def _commit(where: Path, manifest: dict) -> str | None:
    """Joins what the processes wrote, and makes it a checkpoint; returns what went wrong."""
    import orbax.checkpoint as ocp
    from etils import epath

    try:
        for name in PARTS:
            ocp.PyTreeCheckpointHandler().finalize(epath.Path(where / name))
        write_manifest(where, manifest)
    except Exception as error:  # as above
        return reason(error)


def describe(step: int, leaves: Leaves, manifest: dict) -> dict:
    """The whole manifest: with the step, and shape, dtype and fingerprint by leaf."""
    fingerprints = manifest["leaf_fingerprints"]
    described = {
        p: {"shape": list(x.shape), "dtype": str(x.dtype), "fingerprint": fingerprints.get(p)} for p, x in leaves.items()
    }
    return {"format": 1, "step": step} | {k: v for k, v in manifest.items() if k != "leaf_fingerprints"} | {"leaves": described}


def bytes_to_copy(leaves: Leaves) -> int:
    """What this process takes from its devices: of copies of a shard the first alone is saved."""
    return sum(s.data.nbytes for x in leaves.values() for s in x.addressable_shards if s.replica_id == 0)


def available_bytes() -> int | None:
    """Memory of this machine that can be had; None where it is not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def bytes_at_once(local_bytes: int, available: int | None, num_sharing: int) -> int | None:
    """How much of its shards each of `num_sharing` processes of a host copies to its memory at a time; None where all of them
    fit. The other half of what is available is for what is being compressed and written."""
    if available is None or local_bytes * num_sharing <= available:
        return None
    return available // num_sharing // 2


def no_room(
    run_dir: Path, num_bytes: int, largest: int, at_once: int | None, prepares: bool, part_bytes: int | None = None
) -> str | None:  # fmt: skip
    """Why a save is not even begun; None where there is room. `largest`: bytes of an array in this process. One process of a
    folder `prepares` it; `part_bytes`: what goes there, where that is a part of the save."""
    if at_once is not None and largest > at_once:
        return (
            f"it takes a copy of {largest:,} bytes in host memory for its largest array alone, and half of the memory available to this"
            f" process is {at_once:,}: free memory of this host, or divide the state among more hosts"
        )
    if not prepares:
        return None
    try:
        folder(run_dir).mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder(run_dir)).free
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    steps = list_steps(run_dir) if part_bytes is None else []
    # Arrays are compressed: the last checkpoint says better than their bytes what the next one takes.
    needed = sum(read_manifest(run_dir, steps[-1])["files"].values()) if steps else part_bytes or num_bytes
    return f"it takes about {needed:,} bytes, and {free:,} are free" if needed > free else None

"""Checkpoints of a run: saved while training goes on, counted only when whole, restored into any plan.

RUN_DIR/checkpoints/<step>/ holds two orbax items, `params` and `train_state`, and `manifest.json`, which process 0
writes last and renames into place: a folder without it is no checkpoint, whatever orbax says of it (orbax lists empty
and torn folders as good). The manifest records what the run was, and a fingerprint of every leaf, since orbax
accepts flipped bytes and casts dtypes in silence.
"""

import json
import logging
import os
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from sharder.config import CheckpointConfig, UserError
from sharder.models.build import flatten, unflatten

MIN_REPLICA_SLICE_BYTES = 64 << 20

Leaves = dict[str, jax.Array]
"""A state by path, "params/..." and the rest, as `sharder.train.state.by_path` gives it."""


def folder(run_dir: Path) -> Path:
    # orbax takes absolute paths only.
    return run_dir.resolve() / "checkpoints"


def list_steps(run_dir: Path) -> list[int]:
    """Steps of all whole checkpoints, ascending; one whose manifest cannot be read is none."""
    entries = [m.parent for m in folder(run_dir).glob("*/manifest.json")]
    return sorted(int(e.name) for e in entries if e.name.isdecimal() and _parse_manifest(e) is not None)


def list_others(run_dir: Path) -> list[str]:
    """Names of the folders that are no checkpoints: unfinished, damaged, or set aside."""
    steps = {str(step) for step in list_steps(run_dir)}
    return sorted(e.name for e in folder(run_dir).glob("*") if e.is_dir() and e.name not in steps)


def choose_step(run_dir: Path, step: int | None) -> int:
    """The given step, or the latest. Raises UserError where there is no such checkpoint."""
    steps = list_steps(run_dir)
    if not steps:
        raise UserError(f"{run_dir} holds no checkpoint: nothing to load.")
    if step is not None and step not in steps:
        raise UserError(f"{run_dir} holds no checkpoint of step {step}; it has {steps}.")
    return steps[-1] if step is None else step


def read_manifest(run_dir: Path, step: int) -> dict:
    """Raises UserError where it is missing or damaged."""
    manifest = _parse_manifest(folder(run_dir) / str(step))
    if manifest is None:
        raise UserError(f"{folder(run_dir) / str(step) / 'manifest.json'} cannot be read. {way_out(run_dir, step)}")
    return manifest


def _parse_manifest(entry: Path) -> dict | None:
    try:
        manifest = json.loads((entry / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("leaves"), dict) else None


def way_out(run_dir: Path, step: int) -> str:
    """What to do about a damaged checkpoint: go back to the one before it, where there is one."""
    earlier = [s for s in list_steps(run_dir) if s < step]
    if earlier:
        return f"Remove it to use the checkpoint of step {earlier[-1]}."
    return "There is none before it: restore it from a copy, or begin again in another --run-dir."


def reason(error: BaseException | None) -> str:
    """The first line of an error, or of what it came from, that was written for people (orbax prints functions)."""
    kind = ""
    while error is not None:
        line = (str(error).splitlines() or [""])[0]
        if line and " method " not in line and "<function" not in line:
            return line if len(line) <= 240 else f"{line[:80]} ... {line[-140:]}"
        kind, error = type(error).__name__, error.__cause__ or error.__context__
    return kind


def _items(leaves: dict) -> dict[str, dict]:
    params = {p.removeprefix("params/"): x for p, x in leaves.items() if p.startswith("params/")}
    return {"params": unflatten(params), "train_state": unflatten({p: x for p, x in leaves.items() if not p.startswith("params/")})}


def check_leaves(manifest: dict, target: dict[str, jax.ShapeDtypeStruct], where: str) -> None:
    """Raises UserError where shapes, dtypes or names differ from what was saved."""
    saved = {p: (tuple(x["shape"]), x["dtype"]) for p, x in manifest["leaves"].items()}
    wanted = {p: (tuple(x.shape), str(x.dtype)) for p, x in target.items()}
    differ = [p for p in sorted(saved.keys() | wanted.keys()) if saved.get(p) != wanted.get(p)]
    if differ:
        rows = "".join(f"\n  {p}: saved {saved.get(p, 'nothing')}, wanted {wanted.get(p, 'nothing')}" for p in differ[:10])
        more = f"\n  and {len(differ) - 10} more" if len(differ) > 10 else ""
        raise UserError(f"{where} does not fit the model and optimizer of this command; {len(differ)} leaves differ:{rows}{more}")


def restore(run_dir: Path, step: int, target: dict[str, jax.ShapeDtypeStruct]) -> Leaves:
    """The leaves named in `target`, placed as it says; either all of the state or parameters only.

    Raises UserError where the checkpoint does not fit or cannot be read.
    """
    import orbax.checkpoint as ocp

    where = folder(run_dir) / str(step)
    manifest = read_manifest(run_dir, step)
    only_params = all(p.startswith("params/") for p in target)
    saved = {p: x for p, x in manifest["leaves"].items() if p.startswith("params/") or not only_params}
    check_leaves({"leaves": saved}, target, str(where))
    items = {name: tree for name, tree in _items(target).items() if tree}
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            args = {name: ocp.args.StandardRestore(tree) for name, tree in items.items()}
            restored = checkpointer.restore(where, args=ocp.args.Composite(**args))
    except Exception as error:  # orbax and tensorstore raise many kinds, among them bare Exception
        raise UserError(f"{where} cannot be read: {reason(error)}. {way_out(run_dir, step)}") from error
    leaves = {f"params/{p}": x for p, x in flatten(restored["params"]).items()}
    return leaves if only_params else leaves | flatten(restored["train_state"])


def restore_numpy(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """The whole state in host memory, without regard to any device. Raises UserError where it cannot be read."""
    leaves: dict[str, np.ndarray] = {}
    manifest, where = read_manifest(run_dir, step), folder(run_dir) / str(step)
    for name, tree in _items(dict.fromkeys(manifest["leaves"])).items():
        try:
            item = _read_item(where / name, tree)
        except Exception as error:  # as in `restore`
            raise UserError(f"{where / name} cannot be read: {reason(error)}. {way_out(run_dir, step)}") from error
        leaves |= {f"params/{p}" if name == "params" else p: np.asarray(x) for p, x in flatten(item).items()}
    return leaves


def _read_item(where: Path, tree: dict) -> dict:
    import orbax.checkpoint as ocp

    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree, is_leaf=lambda x: x is None)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(where, args=ocp.args.PyTreeRestore(restore_args=args))


SET_ASIDE = (".unfinished", ".damaged")


def set_aside_unfinished(run_dir: Path) -> list[str]:
    """Renames what is no checkpoint, so that its step can be saved again: saves that never finished, and those whose manifest
    is damaged. Returns the new names.
    """
    renamed = []
    for entry in sorted(folder(run_dir).glob("*")):
        if entry.name.endswith(SET_ASIDE) or _parse_manifest(entry) is not None:
            continue
        aside = entry.with_name(entry.name + (".damaged" if (entry / "manifest.json").exists() else ".unfinished"))
        shutil.rmtree(aside, ignore_errors=True)
        entry.rename(aside)
        renamed.append(aside.name)
    return renamed


def retained(steps: list[int], config: CheckpointConfig) -> set[int]:
    """Which of these steps stay: the last `keep_last`, and every multiple of `keep_every`."""
    every = {s for s in steps if config.keep_every and s % config.keep_every == 0}
    return set(sorted(steps)[-config.keep_last :]) | every


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


def _write_small_arrays_whole(ocp) -> None:
    """Lets orbax divide the writing of a replicated array among its replicas only where the pieces are large.

    Each piece is cut by a program compiled for it alone: 82 of them held up the first save of a small model by 4 s.
    """
    handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_REPLICA_SLICE_BYTES)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)


def _silence_orbax() -> None:
    """Leaves it to us to say why a save failed: orbax logs the traceback of each of its threads, and for each array that it no
    longer waits for tensorstore prints one from an event loop that is closed already."""
    logging.getLogger("absl").addFilter(lambda record: not record.exc_info and "overriding jax.Array" not in record.getMessage())
    previous = sys.excepthook

    def hook(kind, error, trace):
        if not (kind is RuntimeError and str(error) == "Event loop is closed"):
            previous(kind, error, trace)

    sys.excepthook = hook


class SaveFailed(OSError):
    """A checkpoint could not be written; those before it are whole."""


@dataclass
class _Pending:
    thread: threading.Thread
    error: BaseException | None = None


class Saver:
    """Writes checkpoints in the background, at most one at a time."""

    def __init__(self, run_dir: Path, config: CheckpointConfig):
        self.run_dir, self.config = run_dir, config
        self._orbax = None
        self._pending: _Pending | None = None

    def save(self, step: int, leaves: Leaves, manifest: dict) -> None:
        """Starts a save; returns when the devices' copies are taken, so that the arrays may be donated.

        Raises SaveFailed where it, or the save before it, cannot be written.
        """
        import orbax.checkpoint as ocp

        self.wait()
        if self._orbax is None:
            _silence_orbax()
            _write_small_arrays_whole(ocp)
            self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        args = {name: ocp.args.StandardSave(tree) for name, tree in _items(leaves).items()}
        try:
            folder(self.run_dir).mkdir(parents=True, exist_ok=True)
            self._orbax.save(folder(self.run_dir) / str(step), args=ocp.args.Composite(**args))
        except Exception as error:  # orbax and tensorstore raise many kinds
            raise self._failed(step, error) from error
        described = {p: {"shape": list(x.shape), "dtype": str(x.dtype)} for p, x in leaves.items()}
        for path, fingerprint in manifest.pop("leaf_fingerprints").items():
            described[path]["fingerprint"] = fingerprint
        text = json.dumps({"step": step, **manifest, "leaves": described}, indent=1)
        self._pending = pending = _Pending(threading.Thread(target=lambda: self._finish(step, text, pending), name="saver"))
        pending.thread.start()

    def _finish(self, step: int, manifest: str, pending: _Pending) -> None:
        try:
            self._orbax.wait_until_finished()
            if jax.process_index() == 0:
                write_durably(folder(self.run_dir) / str(step) / "manifest.json", manifest)
                steps = list_steps(self.run_dir)
                for old in set(steps) - retained(steps, self.config):
                    # The mark goes first: a half-removed checkpoint must not count.
                    (folder(self.run_dir) / str(old) / "manifest.json").unlink()
                    shutil.rmtree(folder(self.run_dir) / str(old), ignore_errors=True)
        except BaseException as error:  # noqa: BLE001  raised in the training thread by `wait`
            pending.error = self._failed(step, error)
            pending.error.__cause__ = error

    def _failed(self, step: int, error: BaseException) -> SaveFailed:
        return SaveFailed(f"{folder(self.run_dir) / str(step)} cannot be written: {reason(error)}")

    def wait(self) -> None:
        """Blocks until the save in flight, if any, is whole on disk. Raises SaveFailed."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.thread.join()
            if pending.error is not None:
                raise pending.error

    def close(self) -> None:
        self.wait()
        if self._orbax is not None:
            self._orbax.close()

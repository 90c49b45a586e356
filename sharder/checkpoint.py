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
    """Steps of all whole checkpoints, ascending."""
    found = folder(run_dir).glob("*/manifest.json")
    return sorted(int(m.parent.name) for m in found if m.parent.name.isdigit())


def choose_step(run_dir: Path, step: int | None) -> int:
    """The given step, or the latest. Raises UserError where there is no such checkpoint."""
    steps = list_steps(run_dir)
    if not steps:
        raise UserError(f"{run_dir} holds no checkpoint: nothing to load.")
    if step is not None and step not in steps:
        raise UserError(f"{run_dir} holds no checkpoint of step {step}; it has {steps}.")
    return steps[-1] if step is None else step


def read_manifest(run_dir: Path, step: int) -> dict:
    return json.loads((folder(run_dir) / str(step) / "manifest.json").read_text())


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
        raise UserError(f"{where} cannot be read: {str(error).splitlines()[0]}. Remove it to use the one before it.") from error
    leaves = {f"params/{p}": x for p, x in flatten(restored["params"]).items()}
    return leaves if only_params else leaves | flatten(restored["train_state"])


def restore_numpy(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """The whole state in host memory, without regard to any device."""
    import orbax.checkpoint as ocp

    leaves: dict[str, np.ndarray] = {}
    manifest = read_manifest(run_dir, step)
    for name, tree in _items(dict.fromkeys(manifest["leaves"])).items():
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree, is_leaf=lambda x: x is None)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            item = checkpointer.restore(folder(run_dir) / str(step) / name, args=ocp.args.PyTreeRestore(restore_args=args))
        leaves |= {f"params/{p}" if name == "params" else p: np.asarray(x) for p, x in flatten(item).items()}
    return leaves


def set_aside_unfinished(run_dir: Path) -> list[str]:
    """Renames folders of saves that never finished, so that their steps can be saved again; returns their new names."""
    renamed = []
    for entry in sorted(folder(run_dir).glob("*")):
        if entry.name.endswith(".unfinished") or (entry / "manifest.json").exists():
            continue
        aside = entry.with_name(entry.name + ".unfinished")
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
    logging.getLogger("absl").addFilter(lambda record: "overriding jax.Array" not in record.getMessage())
    handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_REPLICA_SLICE_BYTES)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)


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

        Raises whatever the save before it met.
        """
        import orbax.checkpoint as ocp

        self.wait()
        if self._orbax is None:
            _write_small_arrays_whole(ocp)
            self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        folder(self.run_dir).mkdir(parents=True, exist_ok=True)
        args = {name: ocp.args.StandardSave(tree) for name, tree in _items(leaves).items()}
        self._orbax.save(folder(self.run_dir) / str(step), args=ocp.args.Composite(**args))
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
            pending.error = error

    def wait(self) -> None:
        """Blocks until the save in flight, if any, is whole on disk. Raises what it met."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.thread.join()
            if pending.error is not None:
                raise pending.error

    def close(self) -> None:
        self.wait()
        if self._orbax is not None:
            self._orbax.close()

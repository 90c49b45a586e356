"""Between a checkpoint and a state: what is recorded with a save, and what is verified at a restore."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np
from jax.sharding import NamedSharding

from sharder import __version__, checkpoint
from sharder.agreement import decide, exchange
from sharder.checkpoint.folders import DAMAGED, note_verified
from sharder.checkpoint.mirror import Mirror
from sharder.checkpoint.remote import FETCH_TIMEOUT_S
from sharder.checkpoint.restore import check_leaves, restore
from sharder.config import UserError, config_hash, to_dict
from sharder.data.dataset import Dataset
from sharder.events import EventLog
from sharder.facts import called
from sharder.models.build import unflatten
from sharder.train.fingerprint import differing, hex_digest
from sharder.train.setup import Setup
from sharder.train.state import TrainState, declare_state, from_paths, with_shardings

METRICS = ("loss", "validation_loss")
"""What a checkpoint remembers of its step, so that the best of them can be kept."""


def describe_save(
    setup: Setup, dataset: Dataset, state_paths: list[str], fingerprint: str, leaf_digests: np.ndarray, record: Mapping = MappingProxyType({})
) -> dict:  # fmt: skip
    """The manifest of a save, but for what `sharder.checkpoint.save.Saver` adds."""
    config, mesh = setup.config, setup.plan.mesh
    return {
        "fingerprint": fingerprint,
        "config": to_dict(config),
        "config_hash": config_hash(config),
        "versions": {"sharder": __version__, "jax": jax.__version__},
        "policy": setup.plan.policy,
        "mesh": {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor},
        "num_processes": jax.process_count(),
        "virtual_workers": config.parallel.virtual_workers if config.parallel.reduction == "exact" else None,
        "metrics": {name: record[name] for name in METRICS if name in record},
        "data": {
            "fingerprint": dataset.fingerprint,
            "num_examples": len(dataset),
            "global_batch_size": config.train.global_batch_size,
            "seed": config.train.seed,
            "shuffle_rounds": config.data.shuffle_rounds,
        },
        "leaf_fingerprints": {path: hex_digest(digest) for path, digest in zip(state_paths, leaf_digests)},
    }


def check_data(run_dir: Path, step: int, dataset: Dataset) -> None:
    """Raises UserError where the data of a resumed run is not what it was."""
    saved = checkpoint.read_manifest(run_dir, step).get("data")
    if not isinstance(saved, dict) or not {"fingerprint", "num_examples"} <= saved.keys():
        where = f"{checkpoint.shown(run_dir, step)}/manifest.json"
        raise UserError(f"{where} does not say what data the run was trained on. {checkpoint.way_out(run_dir, step)}")
    if (saved["fingerprint"], saved["num_examples"]) != (dataset.fingerprint, len(dataset)):
        raise UserError(
            f"{called(run_dir)} was trained on other data: {saved['num_examples']} examples, SHA-256 {str(saved['fingerprint'])[:16]}...; now"
            f" there are {len(dataset)}, SHA-256 {dataset.fingerprint[:16]}.... Give the run's own --data.path and settings of the"
            " data (--data.seq-len, --data.validation-fraction, --data.validation-split, --data.tokenizer), or another --run-dir."
        )


def restore_newest(
    setup: Setup, run_dir: Path, step: int, events: EventLog, store: Mirror | None = None
) -> tuple[TrainState, int]:
    """The state of the checkpoint of `step`, or of the newest before it that is what was saved, and its step. Those that are
    not are set aside, which is said. Raises UserError where none is good."""
    damage, newest = [], step
    while step is not None:
        try:
            state = restore_state(setup, run_dir, step)
            if jax.process_index() == 0:
                note_verified(checkpoint.entry(run_dir, step))
                if damage:
                    print(f"resumed at step {step} in its place", flush=True)
            return state, step
        except checkpoint.Damaged as error:
            damage.append(str(error))
        found = decide(lambda: _set_aside(run_dir, step, store), FETCH_TIMEOUT_S)  # noqa: B023  called at once
        events.write("set_aside", step, name=found["name"], reason=damage[-1])
        if jax.process_index() == 0:
            print(f"{damage[-1]}\nIt was set aside as checkpoints/{found['name']}.", flush=True)
        step = found["before"]
        if store is not None:
            store.bring_to_all(step)
    raise UserError(
        f"no checkpoint of {called(run_dir)} is what was saved, from step {newest} down; all were set aside. Restore one from a copy, or begin"
        " again in another --run-dir."
    )


def _set_aside(run_dir: Path, step: int, store: Mirror | None) -> dict:
    """Of process 0: the new name, and the newest whole checkpoint that is left."""
    name = checkpoint.set_aside(checkpoint.entry(run_dir, step), DAMAGED)
    before = max((s for s in checkpoint.list_steps(run_dir) if s < step), default=None)
    return {"name": name, "before": before if store is None else store.bring_another(run_dir, step, before)}


def restore_state(setup: Setup, run_dir: Path, step: int) -> TrainState:
    """The state of a checkpoint on this mesh, its fingerprints recomputed on the devices and compared.

    Raises Damaged naming the leaves that are not what was saved, UserError where it does not fit; in all processes alike.
    """
    abstract = declare_state(setup.config, setup.declared)
    leaves = read_together(setup, run_dir, step, with_shardings(abstract, setup.state_shardings))
    if int(leaves["step"]) != step:
        raise checkpoint.Damaged(f"{checkpoint.shown(run_dir, step)} is damaged: its state is of step {int(leaves['step'])}.")
    return from_paths(abstract, leaves)


def check_fits(setup: Setup, run_dir: Path, step: int) -> None:
    """Raises UserError where a checkpoint has other leaves than the state of this configuration."""
    target = with_shardings(declare_state(setup.config, setup.declared), setup.state_shardings)
    check_leaves(checkpoint.read_manifest(run_dir, step), target, checkpoint.shown(run_dir, step))


def restore_params(setup: Setup, run_dir: Path, step: int) -> dict:
    """The parameters of a checkpoint on this mesh, verified; nothing else is read."""
    wanted = with_shardings(declare_state(setup.config, setup.declared), setup.state_shardings)
    leaves = read_together(setup, run_dir, step, {p: x for p, x in wanted.items() if p.startswith("params/")})
    return unflatten(leaves)["params"]


def read_together(setup: Setup, run_dir: Path, step: int, target: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Leaves of a checkpoint, verified. What one process cannot read is an error in all of them: none goes on alone."""
    leaves, fault = {}, None
    try:
        leaves = restore(run_dir, step, target)
    except checkpoint.Damaged as error:
        fault = str(error)
    fault = next(filter(None, exchange(f"restore/{next(_READS)}", fault)), None)
    if fault is not None:
        raise checkpoint.Damaged(fault)
    verify_leaves(run_dir, step, leaves, setup.replicated())
    return leaves


_READS = itertools.count()
"""Numbers the restores of this process; all processes take the same ones in the same order."""


def verify_leaves(run_dir: Path, step: int, leaves: dict[str, jax.Array], replicated: NamedSharding | None) -> None:
    """Raises Damaged where a leaf is not what was saved; `replicated` places the result over several devices."""
    saved = {path: x["fingerprint"] for path, x in checkpoint.read_manifest(run_dir, step)["leaves"].items()}
    differ = differing(leaves, saved, replicated)
    if differ:
        raise checkpoint.Damaged(
            f"{checkpoint.shown(run_dir, step)} is damaged: {len(differ)} of {len(leaves)} leaves are not what was saved"
            f" ({', '.join(differ[:5])}). {checkpoint.way_out(run_dir, step)}"
        )

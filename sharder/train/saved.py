"""Between a checkpoint and a state: what is recorded with a save, and what is verified at a restore."""

from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding

from sharder import __version__, checkpoint
from sharder.config import UserError, config_hash
from sharder.data.dataset import Dataset
from sharder.models.build import unflatten
from sharder.train.fingerprint import digests, hex_digest
from sharder.train.setup import Setup
from sharder.train.state import TrainState, declare_state, from_paths, with_shardings


def describe_save(setup: Setup, dataset: Dataset, state_paths: list[str], fingerprint: str, leaf_digests: np.ndarray) -> dict:
    """The manifest of a save, but for what `checkpoint.Saver` adds."""
    config, mesh = setup.config, setup.plan.mesh
    return {
        "fingerprint": fingerprint,
        "config_hash": config_hash(config),
        "versions": {"sharder": __version__, "jax": jax.__version__},
        "policy": setup.plan.policy,
        "mesh": {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor},
        "num_processes": jax.process_count(),
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
        where = checkpoint.folder(run_dir) / str(step) / "manifest.json"
        raise UserError(f"{where} does not say what data the run was trained on. {checkpoint.way_out(run_dir, step)}")
    if (saved["fingerprint"], saved["num_examples"]) != (dataset.fingerprint, len(dataset)):
        raise UserError(
            f"{run_dir} was trained on other data: {saved['num_examples']} examples, SHA-256 {str(saved['fingerprint'])[:16]}...; now"
            f" there are {len(dataset)}, SHA-256 {dataset.fingerprint[:16]}.... Give the run's own --data.path and settings of the"
            " data (--data.seq-len, --data.validation-fraction, --data.validation-split, --data.tokenizer), or another --run-dir."
        )


def restore_state(setup: Setup, run_dir: Path, step: int) -> TrainState:
    """The state of a checkpoint on this mesh, its fingerprints recomputed on the devices and compared.

    Raises UserError naming the leaves that are not what was saved.
    """
    abstract = declare_state(setup.config, setup.declared)
    leaves = checkpoint.restore(run_dir, step, with_shardings(abstract, setup.state_shardings))
    verify_leaves(run_dir, step, leaves, setup.replicated())
    return from_paths(abstract, leaves)


def restore_params(setup: Setup, run_dir: Path, step: int) -> dict:
    """The parameters of a checkpoint on this mesh, verified; nothing else is read."""
    wanted = with_shardings(declare_state(setup.config, setup.declared), setup.state_shardings)
    leaves = checkpoint.restore(run_dir, step, {p: x for p, x in wanted.items() if p.startswith("params/")})
    verify_leaves(run_dir, step, leaves, setup.replicated())
    return unflatten(leaves)["params"]


def verify_leaves(run_dir: Path, step: int, leaves: dict[str, jax.Array], replicated: NamedSharding | None) -> None:
    """Raises UserError where a leaf is not what was saved; `replicated` places the result over several devices."""
    found = np.asarray(jax.jit(digests, out_shardings=replicated)(leaves))
    saved = checkpoint.read_manifest(run_dir, step)["leaves"]
    differ = [path for path, digest in zip(sorted(leaves), found) if hex_digest(digest) != saved[path]["fingerprint"]]
    if differ:
        raise UserError(
            f"{checkpoint.folder(run_dir) / str(step)} is damaged: {len(differ)} of {len(leaves)} leaves are not what was saved"
            f" ({', '.join(differ[:5])}). {checkpoint.way_out(run_dir, step)}"
        )

"""A checkpoint read into any layout, or into host memory."""

from pathlib import Path

import jax
import numpy as np

from sharder.checkpoint.folders import entry, read_manifest, way_out
from sharder.checkpoint.manifest import Damaged
from sharder.checkpoint.orbax import items, quietly, reason
from sharder.fields import UserError
from sharder.models.build import flatten

Leaves = dict[str, jax.Array]
"""A state by path, "params/..." and the rest, as `sharder.train.state.by_path` gives it."""


def check_leaves(manifest: dict, target: dict[str, jax.ShapeDtypeStruct], where: str) -> None:
    """Raises UserError where shapes, dtypes or names differ from what was saved."""
    saved = {p: (tuple(x["shape"]), x["dtype"]) for p, x in manifest["leaves"].items()}
    wanted = {p: (tuple(x.shape), str(x.dtype)) for p, x in target.items()}
    differ = [p for p in sorted(saved.keys() | wanted.keys()) if saved.get(p) != wanted.get(p)]
    if differ:
        rows = "".join(f"\n  {p}: saved {saved.get(p, 'nothing')}, wanted {wanted.get(p, 'nothing')}" for p in differ[:10])
        more = f"\n  and {len(differ) - 10} more" if len(differ) > 10 else ""
        raise UserError(
            f"{where} does not fit the model and optimizer of this command; {len(differ)} leaves differ:{rows}{more}"
        )


def restore(run_dir: Path, step: int, target: dict[str, jax.ShapeDtypeStruct]) -> Leaves:
    """The leaves named in `target`, placed as it says, not yet verified; either all of the state or parameters only.

    Every process reads what its own devices hold, and none waits for another. Raises UserError where the checkpoint does not fit,
    Damaged where it cannot be read.
    """
    import orbax.checkpoint as ocp

    where, manifest = entry(run_dir, step), read_manifest(run_dir, step)
    only_params = all(p.startswith("params/") for p in target)
    check_leaves(
        {"leaves": {p: x for p, x in manifest["leaves"].items() if p.startswith("params/") or not only_params}},
        target,
        str(where),
    )
    leaves: Leaves = {}
    for name, tree in items(target).items():
        if tree:
            args = ocp.args.PyTreeRestore(tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
            leaves |= _read(run_dir, step, name, args)
    return leaves


def restore_numpy(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """The whole state in host memory, without regard to any device. Raises Damaged where it cannot be read."""
    import orbax.checkpoint as ocp

    leaves: dict[str, np.ndarray] = {}
    manifest = read_manifest(run_dir, step)
    for name, tree in items(dict.fromkeys(manifest["leaves"])).items():
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree, is_leaf=lambda x: x is None)
        leaves |= {p: np.asarray(x) for p, x in _read(run_dir, step, name, ocp.args.PyTreeRestore(restore_args=args)).items()}
    return leaves


def _read(run_dir: Path, step: int, name: str, args) -> dict:
    """One item, by the paths of a state."""
    import orbax.checkpoint as ocp

    where = entry(run_dir, step) / name
    quietly()
    try:
        tree = ocp.PyTreeCheckpointHandler().restore(_epath(where), args=args)
    except Exception as error:  # orbax and tensorstore raise many kinds, among them bare Exception
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise  # nothing is wrong with the files
        raise Damaged(f"{where} cannot be read: {reason(error)}. {way_out(run_dir, step)}") from error
    return {f"params/{p}" if name == "params" else p: x for p, x in flatten(tree).items()}


def _epath(path: Path):
    from etils import epath

    return epath.Path(path)

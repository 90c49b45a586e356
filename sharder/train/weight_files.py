"""Where weights come from: orbax trees (ours, openpi's), .npz and safetensors, read leaf by leaf onto the devices that want them."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sharder import checkpoint
from sharder.checkpoint.reading import fetch_run
from sharder.config import ModelConfig, Pi0Config, UserError, model_from_dict
from sharder.facts import is_address
from sharder.models import lerobot_weights
from sharder.models.build import flatten, unflatten
from sharder.models.openpi_weights import LLM, detect, without_value
from sharder.train.fingerprint import differing
from sharder.train.lerobot_file import FILE, LeRobotFile, open_lerobot

Target = Mapping[str, jax.ShapeDtypeStruct]
"""By path: shape, dtype and sharding of what is wanted."""


class WeightFile(Protocol):
    """A tree of arrays on disk."""

    kind: str
    """`sharder`, `openpi`, `lerobot` or `paligemma`."""
    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def read(self, target: Target) -> dict[str, jax.Array]:
        """These leaves, cast and placed as `target` says; nothing else is read."""
        ...


@dataclass(frozen=True)
class OrbaxTree:
    """The folder of an orbax item that holds a tree; openpi puts it under `params` and may end every path with `value`."""

    kind: str
    path: Path
    names: dict[str, str]
    """Path in the folder by plain path."""
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    digests: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Of weights of our own: by plain path, the path in the state and the fingerprint of what was saved."""

    def read(self, target: Target) -> dict[str, jax.Array]:
        """Raises UserError naming what is not what was saved, where that is known."""
        if not self.digests:
            return self._read(target)
        saved = {p: jax.ShapeDtypeStruct(x.shape, jnp.dtype(self.dtypes[p]), sharding=x.sharding) for p, x in target.items()}
        found, sharding = self._read(saved), next(iter(target.values())).sharding
        replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
        differ = differing({self.digests[p][0]: x for p, x in found.items()}, dict(self.digests.values()), replicated)
        if differ:
            raise UserError(
                f"{self.path} is damaged: {len(differ)} of {len(found)} leaves are not what was saved ({', '.join(differ[:5])})."
            )
        return {p: x.astype(target[p].dtype) for p, x in found.items()}

    def _read(self, target: Target) -> dict[str, jax.Array]:
        import orbax.checkpoint as ocp

        item = unflatten({self.names[path]: x for path, x in target.items()})
        args = ocp.args.PyTreeRestore(
            item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
        )
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                found = flatten(checkpointer.restore(self.path, args=args))
        except Exception as error:  # orbax and tensorstore raise many kinds, among them bare Exception
            raise UserError(f"{self.path} cannot be read: {str(error).splitlines()[0]}") from error
        return {path: found[self.names[path]] for path in target}


@dataclass(frozen=True)
class NpzFile:
    """big_vision's PaliGemma: openpi's tree below `params`, without actions, state and their expert."""

    path: Path
    names: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    kind: str = field(default="paligemma")

    def read(self, target: Target) -> dict[str, jax.Array]:
        with np.load(self.path) as file:
            return {path: place(file[self.names[path]], x) for path, x in target.items()}


def place(array: np.ndarray, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """Every device gets its own part of an array in host memory."""
    if wanted.sharding is None:
        return jax.numpy.asarray(array, wanted.dtype)
    return jax.make_array_from_callback(wanted.shape, wanted.sharding, lambda index: array[index].astype(wanted.dtype))


def _orbax_tree(kind: str, folder: Path) -> OrbaxTree:
    import orbax.checkpoint as ocp

    logging.getLogger("absl").addFilter(lambda record: "Metadata file does not exist" not in record.getMessage())
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.metadata(folder.resolve())
    except Exception as error:
        raise UserError(f"{folder} cannot be read: {str(error).splitlines()[0]}") from error
    tree = getattr(found.item_metadata, "tree", None) if hasattr(found, "item_metadata") else found
    if tree is None:
        raise UserError(f"{folder} cannot be read: what it holds is not described in it, or that is damaged.")
    leaves = flatten(dict(tree))
    plain = without_value(leaves)
    names = {p.removeprefix("params/") if kind == "openpi" else p: original for original, p in plain.items()}
    return OrbaxTree(
        kind,
        folder.resolve(),
        names,
        {p: tuple(leaves[o].shape) for p, o in names.items()},
        {p: str(leaves[o].dtype) for p, o in names.items()},
    )


def _npz_file(path: Path) -> NpzFile:
    names, shapes, dtypes = {}, {}, {}
    with np.load(path) as file:
        for name in file.files:
            plain = "PaliGemma/" + name.removeprefix("params/")
            array = file[name]  # one at a time: shapes stand in no index
            names[plain], shapes[plain], dtypes[plain] = name, array.shape, str(array.dtype)
    if LLM + "embedder/input_embedding" not in shapes:
        raise UserError(
            f"{path} is not PaliGemma's: it holds no params/llm/embedder/input_embedding, but {', '.join(list(names.values())[:3])}."
        )
    return NpzFile(path, names, shapes, dtypes)


def locate(path: Path) -> tuple[str, Path]:
    """Kind and place of the tree behind a path that a user may give. Raises UserError where there is none."""
    if path.suffix == ".npz" and path.is_file():
        return "paligemma", path
    if path.suffix == ".safetensors" and path.is_file():
        return "lerobot", path
    if (path / FILE).is_file():
        return "lerobot", path / FILE
    if (path / "checkpoints").is_dir():
        path = checkpoint.folder(path) / str(checkpoint.choose_step(path, None))
    if (path / "manifest.json").is_file():
        return "sharder", path / "params"
    for folder in (path / "params", path):
        if (folder / "_METADATA").is_file():
            return "openpi", folder
    what = "does not exist" if not path.exists() else "holds no weights"
    raise UserError(
        f"{path} {what}: give a run, one of its checkpoints, what `sharder weights import` wrote, a checkpoint of openpi (a folder"
        f" with params/) or of LeRobot (a folder with {FILE}), or PaliGemma's .npz."
    )


def open_weights(path: str | Path) -> WeightFile:
    """The tree behind a path, or of the newest checkpoint of a run at an address; only shapes and dtypes are read. Raises
    UserError where there is none."""
    if is_address(str(path)):
        path = fetch_run(str(path))
    kind, place = locate(Path(path))
    if kind == "paligemma":
        return _npz_file(place)
    if kind == "lerobot":
        return open_lerobot(place)
    tree = _orbax_tree(kind, place)
    return replace(tree, digests=_digests(place, {p: f"params/{p}" for p in tree.names})) if kind == "sharder" else tree


def _digests(item: Path, state_paths: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """From the manifest beside an item of ours."""
    leaves = json.loads((item.parent / "manifest.json").read_text())["leaves"]
    return {plain: (path, leaves[path]["fingerprint"]) for plain, path in state_paths.items()}


def saved_model(file: WeightFile) -> dict | None:
    """The model's configuration that stands beside or in weights of our own, as JSON values."""
    if isinstance(file, LeRobotFile):
        return file.saved_model
    if file.kind != "sharder":
        return None
    manifest = json.loads((file.path.parent / "manifest.json").read_text())
    if "model" in manifest:
        return manifest["model"]
    config = file.path.parents[2] / "config.json"
    return json.loads(config.read_text())["config"]["model"] if config.is_file() else None


def described_model(file: WeightFile) -> ModelConfig:
    """The model whose weights these are, as it stands with them or as their shapes tell."""
    saved = saved_model(file)
    if saved is not None:
        return model_from_dict(saved)
    return lerobot_weights.detect(file.shapes) if file.kind == "lerobot" else detect(file.shapes)


def model_of(file: WeightFile) -> Pi0Config:
    """`described_model`. Raises UserError where it is not pi0 or pi0.5."""
    model = described_model(file)
    if not isinstance(model, Pi0Config):
        raise UserError(f"{file.path} holds weights of a {type(model).__name__}, not of pi0 or pi0.5.")
    return model


def open_average(path: str | Path) -> OrbaxTree:
    """The moving average that a run keeps of its parameters. Raises UserError where it keeps none."""
    kind, place = locate(Path(path))
    folder = place.parent / "train_state"
    tree = _orbax_tree("sharder", folder) if kind == "sharder" and folder.is_dir() else None
    names = {} if tree is None else {p.removeprefix("ema/"): p for p in tree.names if p.startswith("ema/")}
    if not names:
        raise UserError(f"{path} holds no moving average of its parameters: it was trained without --train.ema-decay.")
    shapes, dtypes = {p: tree.shapes[o] for p, o in names.items()}, {p: tree.dtypes[o] for p, o in names.items()}
    return OrbaxTree("sharder", tree.path, names, shapes, dtypes, _digests(folder, names))

"""Weights in LeRobot's naming: one safetensors file, of which every device reads its own part."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from sharder.config import UserError
from sharder.models.lerobot_weights import plain_names, stacked

FILE = "model.safetensors"
MODEL = "sharder_model"
"""In the header of a file of our own: the model's configuration as JSON."""
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class LeRobotFile:
    """The tensors of a file; those of all layers count as one, stacked, where they are all there and alike."""

    path: Path
    names: dict[str, list[str]]
    """By path in `lerobot_weights.tensors`: tensors of the file, in the order of the layers."""
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    saved_model: dict | None
    """The model's configuration, which stands in a file of our own."""
    kind: str = field(default="lerobot")

    def read(self, target) -> dict[str, jax.Array]:
        """These leaves, cast and placed as `target` says; nothing else is read."""
        from safetensors import safe_open

        with safe_open(self.path, framework="numpy") as file:
            return {path: self._read(file, path, wanted) for path, wanted in target.items()}

    def _read(self, file, path: str, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        names = self.names[path]

        def part(index: tuple[slice, ...]) -> np.ndarray:
            if "*" in path:
                array = np.stack([file.get_slice(name)[index[1:]] for name in names[index[0]]])
            else:
                array = file.get_slice(names[0])[index]
            return array.astype(wanted.dtype)

        if wanted.sharding is None:
            return jax.numpy.asarray(part((slice(None),) * len(wanted.shape)))
        return jax.make_array_from_callback(wanted.shape, wanted.sharding, part)


def open_lerobot(path: Path) -> LeRobotFile:
    """Reads names, shapes and dtypes only. Raises UserError where it is no safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            saved = (file.metadata() or {}).get(MODEL)
            found = {name: file.get_slice(name) for name in file.keys()}
            tensors = {name: (tuple(x.get_shape()), DTYPES.get(x.get_dtype(), x.get_dtype())) for name, x in found.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    names, shapes, dtypes = stacks({name: shape for name, (shape, _) in tensors.items()}), {}, {}
    for key, of_layers in names.items():
        shape, dtype = tensors[of_layers[0]]
        shapes[key] = (len(of_layers), *shape) if "*" in key else shape
        dtypes[key] = dtype if {tensors[name][1] for name in of_layers} == {dtype} else "float32"
    return LeRobotFile(path, names, shapes, dtypes, None if saved is None else json.loads(saved))


def stacks(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Names of the file, in the order of the layers, by path in `lerobot_weights.tensors`.

    Where a layer lacks its tensor, or has one of another shape, each stands for itself.
    """
    groups: dict[str, dict[int, str]] = {}
    depths: dict[str, int] = {}
    for name, plain in plain_names(shapes).items():
        key, layer = stacked(plain)
        groups.setdefault(key, {})[layer] = name
        root = key.partition("*")[0]
        depths[root] = max(depths.get(root, 0), layer + 1)
    found: dict[str, list[str]] = {}
    for key, group in groups.items():
        layers = range(depths[key.partition("*")[0]])
        if set(group) == set(layers) and len({shapes[name] for name in group.values()}) == 1:
            found[key] = [group[layer] for layer in layers]
        else:
            found |= {key.replace("*", str(layer)): [name] for layer, name in group.items()}
    return found

"""Writes weights in LeRobot's naming, leaf by leaf, so that no second copy of them is ever whole in memory."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from sharder.config import Pi0Config, model_to_dict
from sharder.models.lerobot_weights import EXPERT_OUTPUT, file_names, tensors
from sharder.train.lerobot_file import DTYPES, MODEL

CODES = {dtype: code for code, dtype in DTYPES.items()}


def write_lerobot(path: Path, model: Pi0Config, leaves: Mapping[str, jax.Array]) -> int:
    """A safetensors file, and the number of tensors in it.

    The format: the length of the header in 8 bytes, the header as JSON, then all tensors without a gap.
    """
    order = tensors(model).items()
    # LeRobot's model has an output projection of the action expert, which it never uses: without it, its loading complains.
    unused = np.zeros((model.vocab_size, model.action_expert.embed_dim), leaves["llm/tokens"].dtype)
    rows = [(tensor.path, tensor.layout(leaves[ours].shape), leaves[ours].dtype) for ours, tensor in order]
    header, end = {"__metadata__": {"format": "pt", MODEL: json.dumps(model_to_dict(model))}}, 0
    for their_path, shape, dtype in [*rows, (EXPERT_OUTPUT, unused.shape, unused.dtype)]:
        for name in file_names(their_path, shape[0]):
            of_one = shape[1:] if "*" in their_path else shape
            start, end = end, end + math.prod(of_one) * dtype.itemsize
            header[name] = {"dtype": CODES[dtype.name], "shape": of_one, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for ours, tensor in order:
            # Stacked, so that its layers come one after the other.
            file.write(np.ascontiguousarray(tensor.untake(np.asarray(leaves[ours]))).view(np.uint8))
        file.write(unused.view(np.uint8))
    return len(header) - 1

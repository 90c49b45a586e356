"""Which parameters of pi0 and pi0.5 are trained: presets by name, and a table of what they leave."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from sharder.sharding.axes import ParamDecl


def _lora(path: str) -> bool:
    return path.endswith(("/lora_a", "/lora_b"))


PRESETS: dict[str, Callable[[str], bool]] = {
    "none": lambda path: False,
    "vision": lambda path: path.startswith("vision/"),
    "backbone": lambda path: path.startswith("llm/") and not path.startswith("llm/action/"),
    "vision-and-backbone": lambda path: path.startswith(("vision/", "llm/")) and not path.startswith("llm/action/"),
    # What openpi freezes with low-rank additions in both experts: image encoder and projections stay trainable.
    "language-but-lora": lambda path: path.startswith("llm/") and not _lora(path),
    "all-but-lora": lambda path: not _lora(path),
}
"""True for the paths that a preset freezes."""


def frozen_paths(config, paths) -> frozenset[str]:
    """Paths that the model's preset freezes; models without presets freeze nothing."""
    frozen = PRESETS[getattr(config, "freeze", "none")]
    return frozenset(path for path in paths if frozen(path))


def describe(params: Mapping[str, ParamDecl], frozen: frozenset[str]) -> str:
    """Trained and frozen parameters and their bytes, by part of the model; what is trained adds the optimizer's moments."""
    parts: dict[str, list[int]] = {}
    for path, decl in params.items():
        names = path.split("/")
        part = "/".join(names[:2]) if names[0] == "llm" else names[0]
        row, count = parts.setdefault(part, [0, 0, 0, 0]), math.prod(decl.shape)
        at = 2 if path in frozen else 0
        row[at] += count
        row[at + 1] += count * np.dtype(decl.dtype).itemsize
    rows = [*sorted(parts.items()), ("total", [sum(row[i] for row in parts.values()) for i in range(4)])]
    lines = [f"{'part':16} {'trained':>15} {'bytes':>15} {'frozen':>15} {'bytes':>15}"]
    return "\n".join(lines + [f"{name:16} " + " ".join(f"{x:15,}" for x in row) for name, row in rows])

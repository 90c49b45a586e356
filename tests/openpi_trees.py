"""Weights in openpi's tree: a checkpoint of the original trainer, and random ones of a model that compiles in moments."""

from pathlib import Path

import numpy as np

from sharder.config import ExpertConfig, Pi0Config, SiglipConfig
from sharder.models.build import declare, unflatten
from sharder.models.openpi_weights import openpi_shapes
from sharder.weights.convert import write_tree

ORIGINAL = Path(__file__).parent / "data" / "openpi_checkpoint"
TINY = Pi0Config(
    vision=SiglipConfig(embed_dim=16, num_layers=2, mlp_dim=32, num_heads=2, patch_size=2), backbone=ExpertConfig(16, 32),
    action_expert=ExpertConfig(16, 16), num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=32, action_dim=6,
    image_size=(4, 4),
)  # fmt: skip


def openpi_tree(config: Pi0Config, dtype="float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = openpi_shapes(config, {p: d.shape for p, d in declare(config).params.items()})
    return {p: rng.standard_normal(s).astype(dtype) for p, s in shapes.items()}


def write_openpi(folder: Path, tree: dict, value: bool = True) -> Path:
    write_tree(folder / "params", {"params": unflatten({p + ("/value" if value else ""): x for p, x in tree.items()})})
    return folder

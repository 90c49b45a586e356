"""A model that compiles and steps in moments, as a recipe of its own and for runs inside the tests."""

import dataclasses
import os
import subprocess
import sys
from importlib import metadata

import pytest

from sharder.config import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    TransformerConfig,
)
from sharder.exactness import TESTED_JAX

RECIPE = f"{__file__}:small"

needs_tested_jax = pytest.mark.skipif(
    not metadata.version("jax").startswith(TESTED_JAX), reason=f"exact mode is tested with jax {TESTED_JAX}x"
)


def small() -> RunConfig:
    """Two layers of dimension 64 on synthetic tokens; an epoch of 10 steps; fast mode."""
    return RunConfig(
        model=TransformerConfig(max_seq_len=32, embed_dim=64, num_heads=4, mlp_dim=128, num_layers=2),
        parallel=ParallelConfig(reduction="fast"),
        data=DataConfig(source="synthetic", num_examples=160, seq_len=32, validation_fraction=0.1),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=5, decay_steps=100),
        train=TrainConfig(steps=12, global_batch_size=16, validate_every=0),
        checkpoint=CheckpointConfig(every=5),
    )


def small_dropout() -> RunConfig:
    config = small()
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dropout_rate=0.1),
        train=dataclasses.replace(config.train, ema_decay=0.9 if metadata.version("jax").startswith(TESTED_JAX) else None),
    )


def environment(**extra: str) -> dict[str, str]:
    """Of a started command: no setting of this process leaks in but its home folder."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return kept | {"JAX_PLATFORMS": "cpu"} | extra


def sharder(*arguments, timeout: float = 300, **extra: str) -> subprocess.CompletedProcess:
    """Runs the command line as a user would; `extra` goes into its environment."""
    command = [sys.executable, "-m", "sharder", *map(str, arguments)]
    return subprocess.run(command, env=environment(**extra), capture_output=True, text=True, timeout=timeout)


ROBOT_RECIPE = f"{__file__}:small_robot"


def small_robot() -> RunConfig:
    """pi0 as small as it gets, with changed pictures; give it --data.path."""
    from sharder.config import ExpertConfig, ParallelConfig, Pi0Config, SiglipConfig

    return RunConfig(
        model=Pi0Config(
            vision=SiglipConfig(embed_dim=16, num_layers=1, mlp_dim=32, num_heads=2, patch_size=14),
            backbone=ExpertConfig(embed_dim=16, mlp_dim=32), action_expert=ExpertConfig(embed_dim=16, mlp_dim=32),
            num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, vocab_size=257, max_prompt_len=8, action_dim=8, action_horizon=8,
            cameras=("base_0_rgb",), image_size=(14, 14), augment=True, compute_dtype="float32", remat="none",
        ),
        data=DataConfig(validation_fraction=0.25),
        parallel=ParallelConfig(replicate=("action_out/bias",)),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=5, decay_steps=100),
        train=TrainConfig(steps=9, global_batch_size=16, validate_every=0),
        checkpoint=CheckpointConfig(every=5),
    )  # fmt: skip

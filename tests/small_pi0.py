"""pi0 small enough to compile in moments, and steps of it outside of a run."""

import jax
import numpy as np

from sharder.config import (
    CheckpointConfig,
    DataConfig,
    ExpertConfig,
    OptimizerConfig,
    ParallelConfig,
    Pi0Config,
    RunConfig,
    SiglipConfig,
    TrainConfig,
)


def small_pi0() -> RunConfig:
    """Two layers of dimension 32, two cameras of four patches; an epoch of 5 steps."""
    return RunConfig(
        model=Pi0Config(
            vision=SiglipConfig(embed_dim=32, num_layers=2, mlp_dim=32, num_heads=2, patch_size=4), backbone=ExpertConfig(32, 64),
            action_expert=ExpertConfig(32, 32), num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=272, max_prompt_len=8,
            action_dim=4, action_horizon=4, cameras=("front", "wrist"), image_size=(8, 8), loss_mask="padded", compute_dtype="float32",
            remat="none",
        ),
        data=DataConfig(source="synthetic", num_examples=80, validation_fraction=0.1),
        parallel=ParallelConfig(replicate=("action_out/bias",)),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=1, decay_steps=100),
        train=TrainConfig(steps=6, global_batch_size=16, validate_every=0, ema_decay=0.9),
        checkpoint=CheckpointConfig(every=0),
    )  # fmt: skip


def take_steps(config: RunConfig, num_steps: int):
    """(loss, fingerprint) of every step, and the last state."""
    from sharder.data.loader import read_step
    from sharder.data.open import open_datasets
    from sharder.data.order import Order
    from sharder.train.exact import ExactStep
    from sharder.train.fingerprint import combine
    from sharder.train.setup import prepare
    from sharder.train.state import by_path, create_state
    from sharder.train.step import compile_step
    from sharder.train.stepping import Stepper

    setup = prepare(config)
    training, _ = open_datasets(config)
    order, layout = Order(len(training), config.train.global_batch_size, config.train.seed), setup.train_batch
    state = create_state(config, setup.declared, setup.state_shardings)
    stepper = Stepper(setup, None, [], None)
    arguments = stepper.arguments(state, layout.abstract(training.read(np.arange(1))), False)
    step = ExactStep(setup, setup.workers, arguments) if setup.workers else compile_step(setup, arguments)
    paths, found = list(by_path(state)), []
    for number in range(num_steps):
        state, metrics = step(*stepper.arguments(state, layout.to_devices(read_step(training, order, layout, number)), False))
        metrics = jax.device_get(metrics)
        found.append((float(metrics["loss"]), combine(metrics["digests"], paths)))
    return found, state

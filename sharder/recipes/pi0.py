"""pi0 and pi0.5. Sizes, learning rate and average of openpi's defaults (github.com/Physical-Intelligence/openpi)."""

from dataclasses import replace

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


def _full(model: Pi0Config) -> RunConfig:
    return RunConfig(
        model=model,
        data=DataConfig(),
        # The bias of the last projection has one element for each action dimension, and no other axis to divide.
        parallel=ParallelConfig(policy="fsdp", replicate=("action_out/bias",)),
        optimizer=OptimizerConfig(
            learning_rate=2.5e-5, initial_lr_fraction=1 / 1001, warmup_steps=1000, decay_steps=30_000, weight_decay=1e-10
        ),
        train=TrainConfig(steps=30_000, global_batch_size=32, ema_decay=0.99, log_every=10, validate_every=1000),
        checkpoint=CheckpointConfig(every=1000, keep_last=1, keep_every=5000),
    )


def pi0() -> RunConfig:
    """pi0, 3.24 B parameters."""
    return _full(Pi0Config(augment=True))


def pi05() -> RunConfig:
    """pi0.5, 3.35 B parameters; the state is part of the prompt."""
    return _full(Pi0Config(variant="pi05", max_prompt_len=200, augment=True))


def _with_lora(config: RunConfig) -> RunConfig:
    model = replace(
        config.model,
        backbone=replace(config.model.backbone, lora_rank=16, lora_alpha=16.0),
        action_expert=replace(config.model.action_expert, lora_rank=32, lora_alpha=32.0),
    )
    model = replace(model, freeze="language-but-lora")
    return replace(config, model=model, train=replace(config.train, ema_decay=None))


def pi0_lora() -> RunConfig:
    """pi0 with low-rank additions to attention and feed-forward of both experts."""
    return _with_lora(pi0())


def pi05_lora() -> RunConfig:
    """pi0.5 with low-rank additions to attention and feed-forward of both experts."""
    return _with_lora(pi05())


def _tiny(variant: str) -> RunConfig:
    model = Pi0Config(
        variant=variant,
        vision=SiglipConfig(embed_dim=128, num_layers=3, mlp_dim=512, num_heads=4, patch_size=14),
        backbone=ExpertConfig(embed_dim=192, mlp_dim=768),
        action_expert=ExpertConfig(embed_dim=128, mlp_dim=512, lora_alpha=16.0),
        num_layers=4, num_heads=8, num_kv_heads=1, head_dim=16, vocab_size=512, max_prompt_len=48 if variant == "pi0" else 96,
        action_dim=8, action_horizon=8, cameras=("base_0_rgb", "left_wrist_0_rgb"), image_size=(28, 28),
        compute_dtype="float32", remat="none",
    )  # fmt: skip
    return RunConfig(
        model=model,
        data=DataConfig(source="synthetic", num_examples=4096, validation_fraction=1 / 64),
        parallel=ParallelConfig(replicate=("action_out/bias",)),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=20, decay_steps=1000, weight_decay=1e-10),
        train=TrainConfig(steps=300, global_batch_size=16, validate_every=100),
        checkpoint=CheckpointConfig(every=100),
    )


def pi0_tiny() -> RunConfig:
    """pi0 at 3.8 M parameters and 28 x 28 pixels, for laptops and tests."""
    return _tiny("pi0")


def pi05_tiny() -> RunConfig:
    """pi0.5 at 4.2 M parameters and 28 x 28 pixels, for laptops and tests."""
    return _tiny("pi05")


def pi0_small() -> RunConfig:
    """pi0 at 1.5 M parameters, two cameras of 96 x 96 pixels: learns a task in a simulator on two cores (docs/robot-run.md)."""
    model = Pi0Config(
        vision=SiglipConfig(embed_dim=128, num_layers=3, mlp_dim=256, num_heads=4, patch_size=16),
        backbone=ExpertConfig(embed_dim=128, mlp_dim=256), action_expert=ExpertConfig(embed_dim=128, mlp_dim=256),
        num_layers=3, num_heads=4, num_kv_heads=1, head_dim=32, vocab_size=512, max_prompt_len=40, action_dim=4,
        action_horizon=8, cameras=("base_0_rgb", "left_wrist_0_rgb"), image_size=(96, 96), loss_mask="padded",
        compute_dtype="float32", remat="none",
    )  # fmt: skip
    return RunConfig(
        model=model,
        data=DataConfig(validation_fraction=0.05),
        parallel=ParallelConfig(replicate=("action_out/bias",)),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup_steps=100, decay_steps=3000, final_lr_fraction=0.02, weight_decay=1e-10
        ),
        train=TrainConfig(steps=3000, global_batch_size=32, ema_decay=0.99, log_every=20, validate_every=250),
        checkpoint=CheckpointConfig(every=250),
    )

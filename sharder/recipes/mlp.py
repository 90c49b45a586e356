from sharder.config import CheckpointConfig, DataConfig, MlpConfig, OptimizerConfig, RunConfig, TrainConfig


def mlp() -> RunConfig:
    """The weak-scaling MLP: 1024 examples per device on eight devices; give 1024 x devices on another number."""
    return RunConfig(
        model=MlpConfig(input_dim=256, hidden_dim=512, num_layers=4, output_dim=16),
        data=DataConfig(source="synthetic", num_examples=1 << 20, validation_fraction=1 / 128),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=20, decay_steps=1000, weight_decay=0.0),
        train=TrainConfig(steps=100, global_batch_size=8192, validate_every=0),
        checkpoint=CheckpointConfig(every=0),
    )

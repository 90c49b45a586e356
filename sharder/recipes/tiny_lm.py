from sharder.config import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig, TransformerConfig


def tiny_lm() -> RunConfig:
    """The Tiny Transformer: 3.3 M parameters on bytes, minutes on a laptop."""
    return RunConfig(
        model=TransformerConfig(
            vocab_size=256, padded_vocab_size=256, max_seq_len=128, embed_dim=256, num_heads=4, mlp_dim=1024, num_layers=4
        ),
        data=DataConfig(seq_len=128),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=30, decay_steps=300),
        train=TrainConfig(steps=300, global_batch_size=32, validate_every=100),
        checkpoint=CheckpointConfig(every=100),
    )

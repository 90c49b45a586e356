"""The GPT-2 family. Sizes: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2;
feed-forward 4 x the model dimension, 1024 positions, vocabulary 50257, padded to 50432 = 256 x 197."""

from sharder.config import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig, TransformerConfig


def _gpt(num_layers: int, embed_dim: int, num_heads: int, learning_rate: float) -> RunConfig:
    # Learning rates by size: Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1.
    return RunConfig(
        model=TransformerConfig(
            vocab_size=50257, padded_vocab_size=50432, max_seq_len=1024, embed_dim=embed_dim, num_heads=num_heads,
            mlp_dim=4 * embed_dim, num_layers=num_layers, tie_embeddings=True, compute_dtype="bfloat16", remat="block",
        ),
        data=DataConfig(seq_len=1024),
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=2000, decay_steps=600_000),
        train=TrainConfig(steps=600_000, global_batch_size=512, log_every=10, validate_every=1000, validation_batches=20),
        checkpoint=CheckpointConfig(every=1000, keep_last=3),
    )  # fmt: skip


def gpt() -> RunConfig:
    """GPT-2 small, 124 M parameters."""
    return _gpt(12, 768, 12, 6e-4)


def gpt_medium() -> RunConfig:
    """GPT-2 medium, 355 M parameters."""
    return _gpt(24, 1024, 16, 3e-4)


def gpt_large() -> RunConfig:
    """GPT-2 large, 774 M parameters."""
    return _gpt(36, 1280, 20, 2.5e-4)


def gpt_xl() -> RunConfig:
    """GPT-2 XL, 1.56 B parameters."""
    return _gpt(48, 1600, 25, 2e-4)

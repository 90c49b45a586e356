"""The Llama 3 family. Sizes: the published config.json of Llama 3.2 1B and Llama 3.1 8B, which transformers' LlamaConfig
reads (hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, rope_theta, rope_scaling);
vocabulary 128256 = 256 x 501. Learning rate of 8B: "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3."""

from sharder.config import CheckpointConfig, DataConfig, LlamaConfig, OptimizerConfig, RunConfig, TrainConfig


def llama_tiny() -> RunConfig:
    """The Llama block at 0.8 M parameters on bytes, minutes on a laptop."""
    return RunConfig(
        model=LlamaConfig(max_seq_len=128),
        data=DataConfig(seq_len=128),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=30, decay_steps=300),
        train=TrainConfig(steps=300, global_batch_size=32, validate_every=100),
        checkpoint=CheckpointConfig(every=100),
    )


def _llama3(learning_rate: float, **model) -> RunConfig:
    return RunConfig(
        model=LlamaConfig(
            vocab_size=128256, padded_vocab_size=128256, max_seq_len=8192, num_heads=32, num_kv_heads=8, rope_theta=500_000.0,
            norm_eps=1e-5, compute_dtype="bfloat16", remat="block", **model,
        ),
        data=DataConfig(seq_len=8192),
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=8000, decay_steps=1_200_000, final_lr_fraction=0.01),
        train=TrainConfig(steps=1_200_000, global_batch_size=512, log_every=10, validate_every=1000, validation_batches=20),
        checkpoint=CheckpointConfig(every=1000, keep_last=3),
    )  # fmt: skip


def llama() -> RunConfig:
    """Llama 3.2 1B, 1.24 B parameters."""
    # No source gives the 1B's learning rate; that of the 8B is used.
    return _llama3(3e-4, embed_dim=2048, head_dim=64, mlp_dim=8192, num_layers=16, tie_embeddings=True, rope_factor=32.0)


def llama_8b() -> RunConfig:
    """Llama 3.1 8B, 8.03 B parameters."""
    return _llama3(3e-4, embed_dim=4096, head_dim=128, mlp_dim=14336, num_layers=32, rope_factor=8.0)

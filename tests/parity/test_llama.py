"""Against transformers, where it is installed (make test-parity installs it)."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from sharder.config import LlamaConfig
from sharder.models.build import declare, unflatten
from sharder.models.llama_weights import read_params, write_params

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")

CONFIG = LlamaConfig(
    vocab_size=60, padded_vocab_size=64, max_seq_len=64, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=48, num_layers=3,
    rope_theta=1000.0,
)  # fmt: skip
CONFIGS = {
    "own output": CONFIG,
    "tied": replace(CONFIG, tie_embeddings=True),
    "stretched": replace(
        CONFIG, rope_factor=8.0, rope_low_freq_factor=1.0, rope_high_freq_factor=4.0, rope_original_seq_len=32
    ),
}


def our_logits(params: dict, config: LlamaConfig, tokens: np.ndarray) -> np.ndarray:
    run = jax.jit(lambda p, t: nnx.merge(declare(config).graphdef, p)(t))
    return np.asarray(run(unflatten(params), tokens))[..., : config.vocab_size]


def their_logits(folder, tokens: np.ndarray) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_of_exported_weights_are_those_of_transformers(tmp_path, config):
    rng = np.random.default_rng()
    params = {p: (0.2 * rng.standard_normal(d.shape)).astype(np.float32) for p, d in declare(config).params.items()}
    tokens = rng.integers(0, config.vocab_size, (2, 48)).astype(np.int32)
    write_params(tmp_path / "model", config, params)
    np.testing.assert_allclose(
        our_logits(params, config, tokens), their_logits(tmp_path / "model", tokens), rtol=1e-3, atol=2e-4
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_weights_that_transformers_saved_are_imported(tmp_path, config):
    from sharder.models.llama_weights import their_config

    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**their_config(config), initializer_range=0.2))
    theirs.save_pretrained(str(tmp_path / "model"), max_shard_size="20KB")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    tokens = np.random.default_rng().integers(0, config.vocab_size, (2, 48)).astype(np.int32)
    params = read_params(tmp_path / "model", config, declare(config).params)
    np.testing.assert_allclose(
        our_logits(params, config, tokens), their_logits(tmp_path / "model", tokens), rtol=1e-3, atol=2e-4
    )

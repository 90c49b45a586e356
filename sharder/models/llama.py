"""Decoder-only transformer of the Llama family: RMS norms, rotary positions, grouped queries, gated feed-forward (SwiGLU).

Shape letters: B batch, T positions, D model dimension, N query heads, K key-value heads, H head dimension, F feed-forward
dimension, V vocabulary (padded).
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sharder.config import LlamaConfig
from sharder.models.language_model import HEADS, KV_HEADS, Attend, LanguageModel
from sharder.models.layers import normal, ones, param, stack
from sharder.ops.layout import Layout
from sharder.ops.linear import linear
from sharder.ops.widen import widened
from sharder.sharding.axes import AxisRules

INIT_STD = 0.02
"""initializer_range of the published configurations."""


@partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation over the last dimension in float32, in the dtype of `x` (arXiv:1910.07467)."""
    x = x_BTD.astype(jnp.float32)
    normed = (x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)).astype(x_BTD.dtype)
    # A product in float32 that is rounded once has the bits of one in bfloat16.
    return (widened(scale_D) * normed.astype(jnp.float32)).astype(x_BTD.dtype)


@partial(jax.checkpoint, prevent_cse=False)
def gated_linear(gate_BTF: jax.Array, up_BTF: jax.Array, weight_FD: jax.Array) -> jax.Array:
    """SwiGLU (arXiv:2002.05202) and the matrix product after it; only the inputs are kept for the backward pass."""
    return linear(jax.nn.silu(gate_BTF) * up_BTF, weight_FD)


def rotary_frequencies(config: LlamaConfig) -> np.ndarray:
    """Radians per position of each pair, (H/2,) float32 (arXiv:2104.09864); low ones divided by rope_factor as in Llama 3.1.

    Between the wavelengths that stay and those that are stretched the two are mixed in proportion (arXiv:2407.21783 uses the
    scheme; its formula is that of the published reference, `rope_scaling` of type llama3).
    """
    H = config.head_dim
    frequencies = config.rope_theta ** -(np.arange(0, H, 2) / H)
    if config.rope_factor is not None:
        turns = config.rope_original_seq_len * frequencies / (2 * math.pi)
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = frequencies * (kept + (1.0 - kept) / config.rope_factor)
    return frequencies.astype(np.float32)


def rotate(x_BTNH: jax.Array, positions_BT: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Turns the pairs (i, i + H/2) of every head by position x frequency, in float32."""
    angles = positions_BT[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)


class Block(nnx.Module):
    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        D, N, K, H, F = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim, config.mlp_dim
        init, dtype = normal(INIT_STD), config.param_dtype
        self.norm1_scale = param(rngs, ones, dtype, (D,), ("embed",))
        self.q = param(rngs, init, dtype, (D, N, H), ("embed", "heads", "head_dim"))
        self.k = param(rngs, init, dtype, (D, K, H), ("embed", "kv_heads", "head_dim"))
        self.v = param(rngs, init, dtype, (D, K, H), ("embed", "kv_heads", "head_dim"))
        self.attn_out = param(rngs, init, dtype, (N, H, D), ("heads", "head_dim", "embed"))
        self.norm2_scale = param(rngs, ones, dtype, (D,), ("embed",))
        self.gate = param(rngs, init, dtype, (D, F), ("embed", "mlp"))
        self.up = param(rngs, init, dtype, (D, F), ("embed", "mlp"))
        self.down = param(rngs, init, dtype, (F, D), ("mlp", "embed"))
        self.norm_eps = config.norm_eps

    def __call__(self, x_BTD: jax.Array, attend: Attend, keys_B: jax.Array | None, layout: Layout):
        """Returns the new residual stream and what `attend` gave back."""
        x_BTD, extra = self.attention(x_BTD, attend, keys_B, layout)
        return self.feed_forward(x_BTD, keys_B, layout), extra

    def attention(self, x_BTD: jax.Array, attend: Attend, keys_B: jax.Array | None, layout: Layout):
        with jax.named_scope("attention"):
            y_BTD = rms_norm(x_BTD, self.norm1_scale[...], self.norm_eps)
            q_BTNH = layout.activation(linear(y_BTD, self.q[...]), HEADS)
            k_BTKH = layout.activation(linear(y_BTD, self.k[...]), KV_HEADS)
            v_BTKH = layout.activation(linear(y_BTD, self.v[...]), KV_HEADS)
            y_BTNH, extra = attend(q_BTNH, k_BTKH, v_BTKH)
            return layout.activation(
                x_BTD + linear(y_BTNH, self.attn_out[...], num_contracted=2), ("batch", "seq", "embed")
            ), extra

    def feed_forward(self, x_BTD: jax.Array, keys_B: jax.Array | None, layout: Layout) -> jax.Array:
        with jax.named_scope("mlp"):
            y_BTD = rms_norm(x_BTD, self.norm2_scale[...], self.norm_eps)
            gate_BTF, up_BTF = (layout.activation(linear(y_BTD, w[...]), ("batch", "seq", "mlp")) for w in (self.gate, self.up))
            y_BTD = gated_linear(gate_BTF, up_BTF, self.down[...])
            return layout.activation(x_BTD + y_BTD, ("batch", "seq", "embed"))


class Embed(nnx.Module):
    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        shape = (config.padded_vocab_size, config.embed_dim)
        self.tokens = param(rngs, normal(INIT_STD), config.param_dtype, shape, ("vocab", "embed"))


class Head(nnx.Module):
    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        D, dtype = config.embed_dim, config.param_dtype
        self.norm_scale = param(rngs, ones, dtype, (D,), ("embed",))
        if not config.tie_embeddings:
            self.out = param(rngs, normal(INIT_STD), dtype, (D, config.padded_vocab_size), ("embed", "vocab"))
        self.norm_eps = config.norm_eps

    def norm(self, x_BTD: jax.Array) -> jax.Array:
        return rms_norm(x_BTD, self.norm_scale[...], self.norm_eps)


class Llama(LanguageModel):
    """Llama 3."""

    axis_rules = AxisRules(
        names=frozenset({"layers", "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp"}),
        # The vocabulary too: logits of 128,256 entries are divided.
        tensor=("heads", "kv_heads", "mlp", "vocab"),
        storage=("embed",),
        replicable=("kv_heads",),
    )
    undecayed_axes = frozenset()

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embed(config, rngs)
        self.blocks = stack(lambda r: Block(config, r), config.num_layers, rngs)
        self.head = Head(config, rngs)

    def _positioned(self, attend: Attend, positions_BT: jax.Array) -> Attend:
        turn = partial(rotate, positions_BT=positions_BT, frequencies=rotary_frequencies(self.config))
        return lambda q, k, v: attend(turn(q), turn(k), v)

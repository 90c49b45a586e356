"""Decoder-only transformer: GPT-2's block (learned positions, pre-layer-norm, GELU) at any size.

Shape letters: B batch, T positions, D model dimension, N heads, H head dimension, F feed-forward dimension, V vocabulary
(padded).
"""

import jax
from flax import nnx

from sharder.config import TransformerConfig
from sharder.models.language_model import HEADS, KV_HEADS, Attend, LanguageModel
from sharder.models.layers import dropout, gelu_linear, layer_norm, normal, ones, param, stack, zeros
from sharder.ops.layout import Layout
from sharder.ops.linear import add_bias, linear
from sharder.sharding.axes import AxisRules


class Block(nnx.Module):
    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        D, N, F = config.embed_dim, config.num_heads, config.mlp_dim
        H, dtype = D // N, config.param_dtype
        # GPT-2: 0.02, and 1/sqrt(2 layers) smaller where a layer writes into the residual stream.
        std, out_std = 0.02, 0.02 / (2 * config.num_layers) ** 0.5
        self.norm1_scale = param(rngs, ones, dtype, (D,), ("embed",))
        self.norm1_bias = param(rngs, zeros, dtype, (D,), ("embed",))
        # Three parameters, as fast as a joint one (tiny_lm on CPU), so that dividing heads moves no data between devices.
        self.q = param(rngs, normal(std), dtype, (D, N, H), ("embed", "heads", "head_dim"))
        self.k = param(rngs, normal(std), dtype, (D, N, H), ("embed", "kv_heads", "head_dim"))
        self.v = param(rngs, normal(std), dtype, (D, N, H), ("embed", "kv_heads", "head_dim"))
        self.q_bias = param(rngs, zeros, dtype, (N, H), ("heads", "head_dim"))
        self.k_bias = param(rngs, zeros, dtype, (N, H), ("kv_heads", "head_dim"))
        self.v_bias = param(rngs, zeros, dtype, (N, H), ("kv_heads", "head_dim"))
        self.attn_out = param(rngs, normal(out_std), dtype, (N, H, D), ("heads", "head_dim", "embed"))
        self.attn_out_bias = param(rngs, zeros, dtype, (D,), ("embed",))
        self.norm2_scale = param(rngs, ones, dtype, (D,), ("embed",))
        self.norm2_bias = param(rngs, zeros, dtype, (D,), ("embed",))
        self.mlp_in = param(rngs, normal(std), dtype, (D, F), ("embed", "mlp"))
        self.mlp_in_bias = param(rngs, zeros, dtype, (F,), ("mlp",))
        self.mlp_out = param(rngs, normal(out_std), dtype, (F, D), ("mlp", "embed"))
        self.mlp_out_bias = param(rngs, zeros, dtype, (D,), ("embed",))
        self.dropout_rate = config.dropout_rate

    def __call__(self, x_BTD: jax.Array, attend: Attend, keys_B: jax.Array | None, layout: Layout):
        """Returns the new residual stream and what `attend` gave back."""
        x_BTD, extra = self.attention(x_BTD, attend, keys_B, layout)
        return self.feed_forward(x_BTD, keys_B, layout), extra

    def attention(self, x_BTD: jax.Array, attend: Attend, keys_B: jax.Array | None, layout: Layout):
        with jax.named_scope("attention"):
            y_BTD = layer_norm(x_BTD, self.norm1_scale[...], self.norm1_bias[...])
            q_BTNH = layout.activation(add_bias(linear(y_BTD, self.q[...]), self.q_bias[...]), HEADS)
            k_BTNH = layout.activation(add_bias(linear(y_BTD, self.k[...]), self.k_bias[...]), KV_HEADS)
            v_BTNH = layout.activation(add_bias(linear(y_BTD, self.v[...]), self.v_bias[...]), KV_HEADS)
            y_BTNH, extra = attend(q_BTNH, k_BTNH, v_BTNH)
            y_BTD = add_bias(linear(y_BTNH, self.attn_out[...], num_contracted=2), self.attn_out_bias[...])
            x_BTD = x_BTD + dropout(y_BTD, keys_B, 0, self.dropout_rate)
            return layout.activation(x_BTD, ("batch", "seq", "embed")), extra

    def feed_forward(self, x_BTD: jax.Array, keys_B: jax.Array | None, layout: Layout) -> jax.Array:
        with jax.named_scope("mlp"):
            y_BTD = layer_norm(x_BTD, self.norm2_scale[...], self.norm2_bias[...])
            h_BTF = add_bias(linear(y_BTD, self.mlp_in[...]), self.mlp_in_bias[...])
            h_BTF = layout.activation(h_BTF, ("batch", "seq", "mlp"))
            y_BTD = add_bias(gelu_linear(h_BTF, self.mlp_out[...]), self.mlp_out_bias[...])
            x_BTD = x_BTD + dropout(y_BTD, keys_B, 1, self.dropout_rate)
            return layout.activation(x_BTD, ("batch", "seq", "embed"))


class Embed(nnx.Module):
    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        dtype = config.param_dtype
        self.tokens = param(rngs, normal(0.02), dtype, (config.padded_vocab_size, config.embed_dim), ("vocab", "embed"))
        self.positions = param(rngs, normal(0.01), dtype, (config.max_seq_len, config.embed_dim), ("positions", "embed"))


class Head(nnx.Module):
    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        D, dtype = config.embed_dim, config.param_dtype
        self.norm_scale = param(rngs, ones, dtype, (D,), ("embed",))
        self.norm_bias = param(rngs, zeros, dtype, (D,), ("embed",))
        if not config.tie_embeddings:
            self.out = param(rngs, normal(0.02), dtype, (D, config.padded_vocab_size), ("embed", "vocab"))

    def norm(self, x_BTD: jax.Array) -> jax.Array:
        return layer_norm(x_BTD, self.norm_scale[...], self.norm_bias[...])


class Transformer(LanguageModel):
    """GPT-2."""

    axis_rules = AxisRules(
        names=frozenset({"layers", "vocab", "positions", "embed", "heads", "kv_heads", "head_dim", "mlp"}),
        # The vocabulary stays whole for computation, and is divided in storage.
        tensor=("heads", "kv_heads", "mlp"),
        # embed before heads and mlp: an odd number of heads never blocks FSDP. head_dim is left for the bias of the projections.
        storage=("vocab", "embed", "mlp", "head_dim"),
        replicable=("kv_heads",),
        optional=("head_dim",),
    )
    undecayed_axes = frozenset({"positions"})

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embed(config, rngs)
        self.blocks = stack(lambda r: Block(config, r), config.num_layers, rngs)
        self.head = Head(config, rngs)

    def _embedded(self, embed: Embed, x_BTD: jax.Array, positions_BT: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        return dropout(add_bias(x_BTD, embed.positions[...][positions_BT]), keys_B, 2, self.config.dropout_rate)

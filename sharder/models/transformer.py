"""Decoder-only transformer: GPT-2's block (learned positions, pre-layer-norm, GELU) at any size.

Shape letters: B batch, T positions, S cache length, D model dimension, N heads, H head dimension, F feed-forward
dimension, V vocabulary (padded).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sharder.config import TransformerConfig
from sharder.models.layers import dropout, fetch, gelu_linear, layer_norm, normal, ones, param, stack, zeros
from sharder.ops.attention import MASKED, attention, causal_mask
from sharder.ops.linear import linear
from sharder.ops.layout import SINGLE, Layout
from sharder.sharding.axes import AxisRules

Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, object]]
"""(q, k, v) -> (attended values, whatever the caller wants back from each layer)."""


class Block(nnx.Module):
    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        D, N, F = config.embed_dim, config.num_heads, config.mlp_dim
        H, dtype = D // N, config.param_dtype
        # GPT-2: 0.02, and 1/sqrt(2 layers) smaller where a layer writes into the residual stream.
        std, out_std = 0.02, 0.02 / (2 * config.num_layers) ** 0.5
        self.norm1_scale = param(rngs, ones, dtype, (D,), ("embed",))
        self.norm1_bias = param(rngs, zeros, dtype, (D,), ("embed",))
        self.qkv = param(rngs, normal(std), dtype, (D, N, 3, H), ("embed", "heads", "qkv", "head_dim"))
        self.qkv_bias = param(rngs, zeros, dtype, (N, 3, H), ("heads", "qkv", "head_dim"))
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
        with jax.named_scope("attention"):
            y_BTD = layer_norm(x_BTD, self.norm1_scale[...], self.norm1_bias[...])
            qkv = linear(y_BTD, self.qkv[...]) + self.qkv_bias[...]
            qkv = layout.activation(qkv, ("batch", "seq", "heads", "qkv", "head_dim"))
            y_BTNH, extra = attend(*(qkv[:, :, :, i] for i in range(3)))
            y_BTD = linear(y_BTNH, self.attn_out[...], num_contracted=2) + self.attn_out_bias[...]
            x_BTD = x_BTD + dropout(y_BTD, keys_B, 0, self.dropout_rate)
            x_BTD = layout.activation(x_BTD, ("batch", "seq", "embed"))
        with jax.named_scope("mlp"):
            y_BTD = layer_norm(x_BTD, self.norm2_scale[...], self.norm2_bias[...])
            h_BTF = linear(y_BTD, self.mlp_in[...]) + self.mlp_in_bias[...]
            h_BTF = layout.activation(h_BTF, ("batch", "seq", "mlp"))
            y_BTD = gelu_linear(h_BTF, self.mlp_out[...]) + self.mlp_out_bias[...]
            x_BTD = x_BTD + dropout(y_BTD, keys_B, 1, self.dropout_rate)
            return layout.activation(x_BTD, ("batch", "seq", "embed")), extra


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


class Transformer(nnx.Module):
    """Token ids in, next-token logits out."""

    axis_rules = AxisRules(
        names=frozenset({"layers", "vocab", "positions", "embed", "qkv", "heads", "head_dim", "mlp"}),
        tensor=("heads", "mlp"),
        # embed first: an odd number of heads never blocks FSDP. head_dim is left for the bias of the projections.
        storage=("embed", "mlp", "head_dim"),
    )
    undecayed_axes = frozenset({"positions"})
    tokens_per_example = True

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embed(config, rngs)
        self.blocks = stack(lambda r: Block(config, r), config.num_layers, rngs)
        self.head = Head(config, rngs)

    def _apply(self, tokens_BT, positions_BT, attend_of, per_layer, keys_B, layout: Layout):
        """Logits, and what the attention of each layer returned, stacked.

        `attend_of(layer_inputs)` makes the attention of one layer from its slice of `per_layer` (may be None).
        """
        config = self.config
        embed = fetch(self.embed, "embed", layout, config.compute_dtype)
        with jax.named_scope("embed"):
            x_BTD = embed.tokens[...][tokens_BT] + embed.positions[...][positions_BT]
            x_BTD = dropout(x_BTD, keys_B, 2, config.dropout_rate)
            x_BTD = layout.activation(x_BTD, ("batch", "seq", "embed"))

        graphdef, params = nnx.split(self.blocks)

        def body(x_BTD, scanned):
            index, params, inputs = scanned
            block = nnx.merge(graphdef, layout.weights("blocks", params, config.compute_dtype))
            keys = None if keys_B is None else jax.vmap(jax.random.fold_in, (0, None))(keys_B, index)
            return block(x_BTD, attend_of(inputs), keys, layout)

        layers = (jnp.arange(config.num_layers), nnx.to_pure_dict(params), per_layer)
        x_BTD, extras = jax.lax.scan(layout.scanned(body, config.remat), x_BTD, layers)

        head = fetch(self.head, "head", layout, config.compute_dtype)
        with jax.named_scope("head"):
            x_BTD = layer_norm(x_BTD, head.norm_scale[...], head.norm_bias[...])
            out_DV = embed.tokens[...].T if config.tie_embeddings else head.out[...]
            logits = linear(x_BTD, out_DV, dtype=jnp.float32)
            padding = jnp.arange(config.padded_vocab_size) >= config.vocab_size
            return jnp.where(padding, MASKED, logits), extras

    def _scale(self) -> float:
        return (self.config.embed_dim // self.config.num_heads) ** -0.5

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        keys_B: jax.Array | None = None,
        layout: Layout = SINGLE,
    ) -> jax.Array:
        """Logits (B, T, V) in float32; those of padded vocabulary entries are about -1e38.

        `segments_BT`: only positions of the same segment see one another. `positions_BT`: default 0 .. T-1.
        `keys_B`: one random key per example, turns dropout on.
        """
        T = tokens_BT.shape[1]
        mask = causal_mask(T, T)
        if segments_BT is not None:
            mask = mask & (segments_BT[:, :, None] == segments_BT[:, None, :])
        positions_BT = jnp.arange(T)[None] if positions_BT is None else positions_BT
        attend = lambda q, k, v: (attention(q, k, v, mask, scale=self._scale()), None)  # noqa: E731
        return self._apply(tokens_BT, positions_BT, lambda _: attend, None, keys_B, layout)[0]

    def losses(self, batch: dict, keys_B: jax.Array | None, layout: Layout = SINGLE) -> tuple[jax.Array, jax.Array]:
        """Per example the summed cross-entropy in nats and the summed weight of its targets, both (B,) float32."""
        logits = self(
            batch["inputs"],
            segments_BT=batch.get("segments"),
            positions_BT=batch.get("positions"),
            keys_B=keys_B,
            layout=layout,
        )
        with jax.named_scope("loss"):
            losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            weights_BT = batch.get("weights")
            if weights_BT is None:
                weights_BT = jnp.ones(losses_BT.shape, jnp.float32)
            return (losses_BT * weights_BT).sum(1), weights_BT.sum(1)

    def prefill(self, tokens_BT: jax.Array, *, layout: Layout = SINGLE) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Logits (B, T, V) and the key-value cache (layers, B, T, N, H) of a whole prompt of fixed length T."""
        T = tokens_BT.shape[1]
        mask = causal_mask(T, T)
        attend = lambda q, k, v: (attention(q, k, v, mask, scale=self._scale()), (k, v))  # noqa: E731
        return self._apply(tokens_BT, jnp.arange(T)[None], lambda _: attend, None, None, layout)

    def decode(self, token_B: jax.Array, position: jax.Array, cache, *, layout: Layout = SINGLE):
        """One token at `position` (scalar) with the cache of the positions before it: logits (B, V), and the new cache."""
        length = cache[0].shape[2]
        mask = (jnp.arange(length) <= position)[None, None]

        def attend_of(layer_cache):
            def attend(q, k, v):
                keys, values = (
                    jax.lax.dynamic_update_slice_in_dim(old, new, position, axis=1) for old, new in zip(layer_cache, (k, v))
                )
                return attention(q, keys, values, mask, scale=self._scale()), (keys, values)

            return attend

        positions_BT = jnp.full((1, 1), position)
        logits, cache = self._apply(token_B[:, None], positions_BT, attend_of, cache, None, layout)
        return logits[:, 0], cache

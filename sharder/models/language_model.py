"""What decoder-only language models share: blocks scanned over layers, the loss, prefill and decoding with a cache.

Shape letters: B batch, T positions, S cache length, D model dimension, N query heads, K key-value heads, H head dimension,
V vocabulary (padded).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from sharder.models.layers import fetch
from sharder.ops.attention import MASKED, attention, causal_mask
from sharder.ops.cross_entropy import cross_entropy
from sharder.ops.layout import SINGLE, Layout
from sharder.ops.linear import linear
from sharder.ops.summed import Summed, lookup, summed

Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, object]]
"""(q, k, v) -> (attended values, whatever the caller wants back from each layer)."""

HEADS, KV_HEADS = ("batch", "seq", "heads", "head_dim"), ("batch", "seq", "kv_heads", "head_dim")


def attend_to(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array, layout: Layout) -> jax.Array:
    """Attention with the usual scale, so that query heads never leave their device.

    Where query heads are divided and key-value heads are whole, each query head gets a copy of its own key and value, of
    which a device keeps those of its own queries.
    """
    if layout.divides("heads") and not layout.divides("kv_heads"):
        share = q_BTNH.shape[2] // k_BSKH.shape[2]
        k_BSKH, v_BSKH = (layout.activation(jnp.repeat(x, share, axis=2), HEADS) for x in (k_BSKH, v_BSKH))
    return attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale=q_BTNH.shape[-1] ** -0.5)


class LanguageModel(nnx.Module):
    """Token ids in, next-token logits out.

    A subclass has `embed.tokens`, stacked `blocks` called as block(x_BTD, attend, keys_B, layout), and a `head` with a
    `norm(x_BTD)` and, unless the embeddings are tied, a matrix `out` (D, V).
    """

    tokens_per_example = True

    def _embedded(self, embed: nnx.Module, x_BTD: jax.Array, positions_BT: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        """What enters the first block, (B, T, D), from the embeddings of the tokens."""
        return x_BTD

    def _positioned(self, attend: Attend, positions_BT: jax.Array) -> Attend:
        """An attention that knows positions, where a model tells them to every layer."""
        return attend

    def _hidden(self, tokens_BT, positions_BT, attend_of, per_layer, keys_B, layout: Layout):
        """The normalised output of the last block (B, T, D), the output matrix (D, V), and what the attention of each layer
        returned, stacked.

        `attend_of(layer_inputs)` makes the attention of one layer from its slice of `per_layer` (may be None).
        """
        config = self.config
        embed = fetch(self.embed, "embed", layout, config.compute_dtype)
        with jax.named_scope("embed"):
            table_VD = summed(embed.tokens[...], ("vocab", "embed"), layout)
            x_BTD = self._embedded(embed, lookup(table_VD, tokens_BT, layout), positions_BT, keys_B)
            x_BTD = layout.activation(x_BTD, ("batch", "seq", "embed"))

        graphdef, params = nnx.split(self.blocks)

        def body(x_BTD, scanned):
            index, params, inputs = scanned
            block = nnx.merge(graphdef, layout.weights("blocks", params, config.compute_dtype))
            keys = None if keys_B is None else jax.vmap(jax.random.fold_in, (0, None))(keys_B, index)
            return block(x_BTD, self._positioned(attend_of(inputs), positions_BT), keys, layout)

        layers = (jnp.arange(config.num_layers), nnx.to_pure_dict(params), per_layer)
        x_BTD, extras = jax.lax.scan(layout.scanned(body, config.remat), x_BTD, layers)

        head = fetch(self.head, "head", layout, config.compute_dtype)
        with jax.named_scope("head"):
            out_DV = table_VD.T if config.tie_embeddings else summed(head.out[...], ("embed", "vocab"), layout)
            return head.norm(x_BTD), out_DV, extras

    def _logits(self, x_BTD: jax.Array, out_DV: Summed, layout: Layout) -> jax.Array:
        with jax.named_scope("head"):
            logits = layout.activation(linear(x_BTD, out_DV.value, dtype=jnp.float32), ("batch", "seq", "vocab"))
            return jnp.where(jnp.arange(logits.shape[-1]) >= self.config.vocab_size, MASKED, logits)

    def _whole(self, tokens_BT, segments_BT, positions_BT, keys_B, layout: Layout):
        """`_hidden` of whole sequences."""
        T = tokens_BT.shape[1]
        mask = causal_mask(T, T)
        if segments_BT is not None:
            mask = mask & (segments_BT[:, :, None] == segments_BT[:, None, :])
        positions_BT = jnp.arange(T)[None] if positions_BT is None else positions_BT
        attend = lambda q, k, v: (attend_to(q, k, v, mask, layout), None)  # noqa: E731
        return self._hidden(tokens_BT, positions_BT, lambda _: attend, None, keys_B, layout)[:2]

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
        return self._logits(*self._whole(tokens_BT, segments_BT, positions_BT, keys_B, layout), layout)

    def losses(self, batch: dict, keys_B: jax.Array | None, layout: Layout = SINGLE) -> tuple[jax.Array, jax.Array]:
        """Per example the summed cross-entropy in nats and the summed weight of its targets, both (B,) float32."""
        x_BTD, out_DV = self._whole(batch["inputs"], batch.get("segments"), batch.get("positions"), keys_B, layout)
        with jax.named_scope("loss"):
            losses_BT = cross_entropy(x_BTD, out_DV, batch["targets"], self.config.vocab_size, layout)
            weights_BT = batch.get("weights")
            if weights_BT is None:
                weights_BT = jnp.ones(losses_BT.shape, jnp.float32)
            return (losses_BT * weights_BT).sum(1), weights_BT.sum(1)

    def prefill(self, tokens_BT: jax.Array, *, layout: Layout = SINGLE) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Logits (B, T, V) and the key-value cache (layers, B, T, K, H) of a whole prompt of fixed length T."""
        T = tokens_BT.shape[1]
        mask = causal_mask(T, T)
        attend = lambda q, k, v: (attend_to(q, k, v, mask, layout), (k, v))  # noqa: E731
        x_BTD, out_DV, cache = self._hidden(tokens_BT, jnp.arange(T)[None], lambda _: attend, None, None, layout)
        return self._logits(x_BTD, out_DV, layout), cache

    def decode(self, token_B: jax.Array, position: jax.Array, cache, *, layout: Layout = SINGLE):
        """One token at `position` (scalar) with the cache of the positions before it: logits (B, V), and the new cache."""
        length = cache[0].shape[2]
        mask = (jnp.arange(length) <= position)[None, None]

        def attend_of(layer_cache):
            def attend(q, k, v):
                keys, values = (
                    jax.lax.dynamic_update_slice_in_dim(old, new, position, axis=1) for old, new in zip(layer_cache, (k, v))
                )
                return attend_to(q, keys, values, mask, layout), (keys, values)

            return attend

        x_BTD, out_DV, cache = self._hidden(token_B[:, None], jnp.full((1, 1), position), attend_of, cache, None, layout)
        return self._logits(x_BTD, out_DV, layout)[:, 0], cache

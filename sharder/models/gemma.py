"""Gemma (arXiv:2403.08295) with several experts: token streams with weights of their own that share one attention.

Shape letters: B batch, T positions of all present experts, S key positions, D dimension of an expert, N query heads,
K key-value heads, H head dimension, F feed-forward dimension, C dimension of the condition.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from sharder.config import ExpertConfig
from sharder.models.layers import gelu, normal, param, stack, zeros
from sharder.models.lora import Projection
from sharder.ops.layout import Layout
from sharder.ops.linear import linear
from sharder.ops.summed import lookup, summed

EPS = 1e-6
"""Of its norms."""
MAX_WAVELENGTH = 10_000.0
"""Of the rotary embedding."""

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""(queries, keys, values, mask) -> attended values; see `sharder.ops.attention`."""
Streams = Mapping[str, jax.Array]
"""Tokens (B, T, D) of each expert that takes part, by its name."""
Cache = tuple[jax.Array, jax.Array]
"""Keys and values (layers, B, S, K, H)."""


def rotary(x_BTNH: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """Rotary position embedding (arXiv:2104.09864) of the two halves of the last dimension, computed in float32."""
    half = x_BTNH.shape[-1] // 2
    wavelengths = MAX_WAVELENGTH ** (jnp.arange(half, dtype=jnp.float32) / half)
    angles = (positions_BT[..., None].astype(jnp.float32) / wavelengths)[:, :, None]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BTNH.dtype)


class RmsNorm(nnx.Module):
    """Root-mean-square norm (arXiv:1910.07467) with a scale around 1, or with scale, shift and gate made from a condition."""

    def __init__(self, dim: int, adaptive: bool, dtype: str, rngs: nnx.Rngs):
        self.adaptive = adaptive
        if adaptive:
            # Zero: at first the gates are closed, and the residual stream passes unchanged.
            self.kernel = param(rngs, zeros, dtype, (dim, 3 * dim), ("embed", "modulation"))
            self.bias = param(rngs, zeros, dtype, (3 * dim,), ("modulation",))
        else:
            self.scale = param(rngs, zeros, dtype, (dim,), ("embed",))

    def __call__(self, x_BTD: jax.Array, condition_BC: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """The normalised stream and the gate of what is added to it (None: no gate), in the dtype of `x`."""
        x = x_BTD.astype(jnp.float32)
        normed = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + EPS)
        if not self.adaptive:
            return (normed * (1 + self.scale[...])).astype(x_BTD.dtype), None
        modulation = (linear(condition_BC.astype(jnp.float32), self.kernel[...]) + self.bias[...])[:, None]
        scale, shift, gate = jnp.split(modulation, 3, axis=-1)
        return (normed * (1 + scale) + shift).astype(x_BTD.dtype), gate.astype(x_BTD.dtype)


class Attention(nnx.Module):
    """An expert's projections into and out of the shared attention."""

    def __init__(self, expert: ExpertConfig, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str, rngs: nnx.Rngs):
        D, N, K, H = expert.embed_dim, num_heads, num_kv_heads, head_dim
        self.query = Projection((D, N, H), ("embed", "heads", "head_dim"), 1, expert, dtype, rngs)
        self.key = Projection((D, K, H), ("embed", "kv_heads", "head_dim"), 1, expert, dtype, rngs)
        self.value = Projection((D, K, H), ("embed", "kv_heads", "head_dim"), 1, expert, dtype, rngs)
        self.out = Projection((N, H, D), ("heads", "head_dim", "embed"), 2, expert, dtype, rngs)


class FeedForward(nnx.Module):
    """GELU-gated linear unit (arXiv:2002.05202)."""

    def __init__(self, expert: ExpertConfig, dtype: str, rngs: nnx.Rngs):
        D, F = expert.embed_dim, expert.mlp_dim
        self.gate = Projection((D, F), ("embed", "mlp"), 1, expert, dtype, rngs)
        self.up = Projection((D, F), ("embed", "mlp"), 1, expert, dtype, rngs)
        self.down = Projection((F, D), ("mlp", "embed"), 1, expert, dtype, rngs)

    def __call__(self, x_BTD: jax.Array, layout: Layout) -> jax.Array:
        h_BTF = gelu(self.gate(x_BTD)) * self.up(x_BTD)
        return self.down(layout.activation(h_BTF, ("batch", "seq", "mlp")))


class ExpertLayer(nnx.Module):
    """What one expert has of a layer."""

    def __init__(self, expert: ExpertConfig, heads: tuple[int, int, int], adaptive: bool, dtype: str, rngs: nnx.Rngs):
        self.attention_norm = RmsNorm(expert.embed_dim, adaptive, dtype, rngs)
        self.attention = Attention(expert, *heads, dtype, rngs)
        self.mlp_norm = RmsNorm(expert.embed_dim, adaptive, dtype, rngs)
        self.mlp = FeedForward(expert, dtype, rngs)


class Expert(nnx.Module):
    """All layers of one expert, stacked, and its last norm."""

    def __init__(
        self, expert: ExpertConfig, heads: tuple[int, int, int], num_layers: int, adaptive: bool, dtype: str, rngs: nnx.Rngs
    ):
        self.blocks = stack(lambda r: ExpertLayer(expert, heads, adaptive, dtype, r), num_layers, rngs)
        self.final_norm = RmsNorm(expert.embed_dim, adaptive, dtype, rngs)


def _add(x_BTD: jax.Array, y_BTD: jax.Array, gate: jax.Array | None) -> jax.Array:
    return x_BTD + (y_BTD if gate is None else y_BTD * gate)


def layer(
    experts: Mapping[str, ExpertLayer],
    xs: Streams,
    conditions: Streams,
    attend: Attend,
    positions_BT,
    mask_BTS,
    cache,
    layout: Layout,
) -> tuple[dict[str, jax.Array], Cache]:
    """One layer over the streams of the given experts, in their order, and its new keys and values (B, T, K, H)."""
    xs, new = attention(experts, xs, conditions, attend, positions_BT, mask_BTS, cache, layout)
    return feed_forward(experts, xs, conditions, layout), new


def attention(
    experts, xs, conditions, attend: Attend, positions_BT, mask_BTS, cache, layout: Layout
) -> tuple[dict[str, jax.Array], Cache]:
    with jax.named_scope("attention"):
        gates, projected = {}, []
        # Not the order of `xs`: a scan hands dicts over sorted by key.
        for name, expert in experts.items():
            with jax.named_scope(name):
                y_BTD, gates[name] = expert.attention_norm(xs[name], conditions.get(name))
                weights = expert.attention
                projected.append((weights.query(y_BTD), weights.key(y_BTD), weights.value(y_BTD)))
        q, k, v = (jnp.concatenate(parts, axis=1) for parts in zip(*projected))
        q_BTNH = layout.activation(rotary(q, positions_BT), ("batch", "seq", "heads", "head_dim"))
        new = k, v = rotary(k, positions_BT), v
        if cache is not None:
            k, v = (jnp.concatenate([old, recent], axis=1) for old, recent in zip(cache, new))
        y_BTNH = attend(q_BTNH, k, v, mask_BTS)
        out, start = {}, 0
        for name, expert in experts.items():
            stop = start + xs[name].shape[1]
            with jax.named_scope(name):
                out[name] = _add(xs[name], expert.attention.out(y_BTNH[:, start:stop]), gates[name])
                out[name], start = layout.activation(out[name], ("batch", "seq", "embed")), stop
        return out, new


def feed_forward(experts, xs, conditions, layout: Layout) -> dict[str, jax.Array]:
    out = {}
    with jax.named_scope("mlp"):
        for name, x_BTD in xs.items():
            with jax.named_scope(name):
                y_BTD, gate = experts[name].mlp_norm(x_BTD, conditions.get(name))
                out[name] = layout.activation(_add(x_BTD, experts[name].mlp(y_BTD, layout), gate), ("batch", "seq", "embed"))
    return out


class Gemma(nnx.Module):
    """Experts by name, e.g. `backbone` and `action`; a call may be for some of them only."""

    def __init__(self, experts: Mapping[str, ExpertConfig], adaptive: frozenset[str], num_layers: int, heads: tuple[int, int, int],
                 vocab_size: int, dtype: str, rngs: nnx.Rngs):  # fmt: skip
        """`heads`: query heads, key-value heads, head dimension. `adaptive`: experts whose norms take a condition."""
        self.names = tuple(experts)
        self.num_layers = num_layers
        first = experts[self.names[0]]
        self.tokens = param(rngs, normal(first.embed_dim**-0.5), dtype, (vocab_size, first.embed_dim), ("vocab", "embed"))
        for name, expert in experts.items():
            setattr(self, name, Expert(expert, heads, num_layers, name in adaptive, dtype, rngs))

    def embed(self, tokens_BT: jax.Array, name: str, dtype: str, layout: Layout) -> jax.Array:
        """Token ids to embeddings of the first expert, scaled by the root of its dimension."""
        table = layout.weights(name, {"tokens": self.tokens[...]}, dtype)["tokens"]
        rows_BTD = lookup(summed(table, ("vocab", "embed"), layout), tokens_BT, layout)
        x_BTD = rows_BTD.astype(jnp.float32) * table.shape[1] ** 0.5
        return layout.activation(x_BTD.astype(jnp.dtype(dtype)), ("batch", "seq", "embed"))

    def __call__(self, xs: Streams, conditions: Streams, attend: Attend, positions_BT: jax.Array, mask_BTS: jax.Array, *, name: str,
                 dtype: str, remat: str, layout: Layout, cache: Cache | None = None,
                 keep_cache: bool = False) -> tuple[dict[str, jax.Array], Cache | None]:  # fmt: skip
        """Streams after all layers and the last norm, and the new keys and values of every layer if `keep_cache`.

        `mask_BTS` is over the streams' positions T and, S, those of the cache followed by them. `name`: path of this module.
        """
        present = [expert for expert in self.names if expert in xs]
        split = {expert: nnx.split(getattr(self, expert).blocks) for expert in present}

        def weights(path: str, params: dict) -> dict:
            # Norms stay in float32: they are small, and 1 + scale in bfloat16 would lose half their digits.
            return {k: layout.weights(f"{path}/{k}", p, "float32" if k.endswith("norm") else dtype) for k, p in params.items()}

        def body(xs, scanned):
            params, cache = scanned
            experts = {e: nnx.merge(split[e][0], weights(f"{name}/{e}/blocks", params[e])) for e in present}
            xs, new = layer(experts, xs, conditions, attend, positions_BT, mask_BTS, cache, layout)
            return xs, new if keep_cache else None

        xs = {expert: xs[expert].astype(jnp.dtype(dtype)) for expert in present}
        layers = ({e: nnx.to_pure_dict(split[e][1]) for e in present}, cache)
        xs, new = jax.lax.scan(layout.scanned(body, remat), xs, layers)
        out = {}
        for expert in present:
            graphdef, params = nnx.split(getattr(self, expert).final_norm)
            norm = nnx.merge(graphdef, layout.weights(f"{name}/{expert}/final_norm", nnx.to_pure_dict(params), "float32"))
            out[expert] = norm(xs[expert], conditions.get(expert))[0]
        return out, new

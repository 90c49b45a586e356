"""Attention in tiles: scores of all queries and keys never exist at once, forwards or backwards.

The running maximum and sum of the softmax are those of arXiv:1805.02867, the tiles those of arXiv:2205.14135. The last tile
of a length that tiles do not divide overlaps the one before it, and what was counted there is left out: nothing is padded.

Shape letters: B batch, T queries, S keys, N query heads, K key-value heads, G heads that share one, H head dimension,
t queries and s keys of a tile.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sharder.ops.attention import MASKED

QUERY_TILE, KEY_TILE = 256, 512


class Softmax(NamedTuple):
    """What is kept of each query's softmax, (B, K, G, T) float32."""

    maximum: jax.Array
    total: jax.Array


def _tiles(length: int, tile: int) -> tuple[int, int]:
    """Number and size of the tiles of a dimension."""
    size = min(length, tile)
    return -(-length // size), size


def _start(index, size: int, length: int):
    """Where a tile begins; the last one is moved back to end with the dimension."""
    return jnp.minimum(index * size, length - size)


def _fresh(index, size: int, length: int) -> jax.Array:
    """(size,), False where the tile overlaps the one before it."""
    return _start(index, size, length) + jnp.arange(size) >= index * size


def _cut(x: jax.Array, dim: int, start, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, dim)


def _scores(q_BtKGH, k_BsKH, mask_Bts, scale: float) -> jax.Array:
    """(B, K, G, t, s) float32."""
    scores = jnp.einsum("BtKGH,BsKH->BKGts", q_BtKGH, k_BsKH, preferred_element_type=jnp.float32) * scale
    return jnp.where(mask_Bts[:, None, None], scores, MASKED)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(q_BTKGH, k_BSKH, v_BSKH, mask_BTS, scale: float) -> jax.Array:
    return _forward(q_BTKGH, k_BSKH, v_BSKH, mask_BTS, scale)[0]


def _forward(q_BTKGH, k_BSKH, v_BSKH, mask_BTS, scale: float):
    B, T, K, G, H = q_BTKGH.shape
    S = k_BSKH.shape[1]
    (num_q, t), (num_k, s) = _tiles(T, QUERY_TILE), _tiles(S, KEY_TILE)

    def query_tile(i, carry):
        out, softmax = carry
        at = _start(i, t, T)
        q = _cut(q_BTKGH, 1, at, t)
        mask_BtS = _cut(mask_BTS, 1, at, t)

        def key_tile(j, sums):
            maximum, total, values = sums
            begin = _start(j, s, S)
            scores = _scores(q, _cut(k_BSKH, 1, begin, s), _cut(mask_BtS, 2, begin, s), scale)
            scores = jnp.where(_fresh(j, s, S), scores, -jnp.inf)
            higher = jnp.maximum(maximum, scores.max(-1))
            weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(maximum - higher)
            part = jnp.einsum(
                "BKGts,BsKH->BKGtH", weights.astype(v_BSKH.dtype), _cut(v_BSKH, 1, begin, s), preferred_element_type=jnp.float32
            )
            return higher, total * shrink + weights.sum(-1), values * shrink[..., None] + part

        none = jnp.full((B, K, G, t), -jnp.inf, jnp.float32)
        zero = jnp.zeros((B, K, G, t), jnp.float32)
        maximum, total, values = jax.lax.fori_loop(0, num_k, key_tile, (none, zero, jnp.zeros((B, K, G, t, H), jnp.float32)))
        tile = (values / total[..., None]).transpose(0, 3, 1, 2, 4).astype(out.dtype)
        out = jax.lax.dynamic_update_slice_in_dim(out, tile, at, 1)
        kept = (jax.lax.dynamic_update_slice_in_dim(old, new, at, 3) for old, new in zip(softmax, (maximum, total)))
        return out, Softmax(*kept)

    empty = jnp.zeros((B, K, G, T), jnp.float32)
    return jax.lax.fori_loop(0, num_q, query_tile, (jnp.zeros(q_BTKGH.shape, v_BSKH.dtype), Softmax(empty, empty)))


def _forward_rule(q, k, v, mask, scale: float):
    out, softmax = _forward(q, k, v, mask, scale)
    return out, (q, k, v, mask, out, softmax)


def _backward_rule(scale: float, kept, grad_BTKGH):
    q_BTKGH, k_BSKH, v_BSKH, mask_BTS, out_BTKGH, softmax = kept
    T, S = q_BTKGH.shape[1], k_BSKH.shape[1]
    (num_q, t), (num_k, s) = _tiles(T, QUERY_TILE), _tiles(S, KEY_TILE)

    def query_tile(i, carry):
        dq, dk, dv = carry
        at = _start(i, t, T)
        q, grad, out = (_cut(x, 1, at, t) for x in (q_BTKGH, grad_BTKGH, out_BTKGH))
        maximum, total = (_cut(x, 3, at, t) for x in softmax)
        mask_BtS = _cut(mask_BTS, 1, at, t)
        # Rows that the tile before has done must not be counted twice in the gradients of keys and values.
        fresh_t = _fresh(i, t, T)[:, None]
        mean = jnp.einsum("BtKGH,BtKGH->BKGt", grad.astype(jnp.float32), out.astype(jnp.float32))

        def key_tile(j, sums):
            dq_tile, dk, dv = sums
            begin = _start(j, s, S)
            k, v, mask = _cut(k_BSKH, 1, begin, s), _cut(v_BSKH, 1, begin, s), _cut(mask_BtS, 2, begin, s)
            fresh = _fresh(j, s, S)
            weights = jnp.where(fresh, jnp.exp(_scores(q, k, mask, scale) - maximum[..., None]) / total[..., None], 0.0)
            dweights = jnp.einsum("BtKGH,BsKH->BKGts", grad, v, preferred_element_type=jnp.float32)
            # Masked scores are constants: nothing flows through them.
            dscores = jnp.where(mask[:, None, None], weights * (dweights - mean[..., None]), 0.0) * scale
            dq_tile = dq_tile + jnp.einsum("BKGts,BsKH->BtKGH", dscores.astype(k.dtype), k, preferred_element_type=jnp.float32)
            counted, dcounted = (jnp.where(fresh_t, x, 0.0) for x in (weights, dscores))
            dv_tile = jnp.einsum("BKGts,BtKGH->BsKH", counted.astype(grad.dtype), grad, preferred_element_type=jnp.float32)
            dk_tile = jnp.einsum("BKGts,BtKGH->BsKH", dcounted.astype(q.dtype), q, preferred_element_type=jnp.float32)
            dk = jax.lax.dynamic_update_slice_in_dim(dk, _cut(dk, 1, begin, s) + dk_tile, begin, 1)
            dv = jax.lax.dynamic_update_slice_in_dim(dv, _cut(dv, 1, begin, s) + dv_tile, begin, 1)
            return dq_tile, dk, dv

        dq_tile, dk, dv = jax.lax.fori_loop(0, num_k, key_tile, (jnp.zeros(q.shape, jnp.float32), dk, dv))
        return jax.lax.dynamic_update_slice_in_dim(dq, dq_tile.astype(dq.dtype), at, 1), dk, dv

    zeros = jnp.zeros(q_BTKGH.shape, q_BTKGH.dtype), jnp.zeros(k_BSKH.shape, jnp.float32), jnp.zeros(v_BSKH.shape, jnp.float32)
    dq, dk, dv = jax.lax.fori_loop(0, num_q, query_tile, zeros)
    return dq, dk.astype(k_BSKH.dtype), dv.astype(v_BSKH.dtype), np.zeros(mask_BTS.shape, jax.dtypes.float0)


_chunked.defvjp(_forward_rule, _backward_rule)


def chunked_attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array, *, scale: float
) -> jax.Array:
    """`sharder.ops.attention.attention` in tiles of QUERY_TILE x KEY_TILE scores.

    Beside inputs and outputs it needs one tile of scores for each head, and in the backward pass float32 gradients of keys
    and values.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    if N % K:
        raise ValueError(f"{N} query heads cannot be shared by {K} key-value heads")
    return _chunked(q_BTNH.reshape(B, T, K, N // K, H), k_BSKH, v_BSKH, mask_BTS, scale).reshape(B, T, N, H)

"""Scaled dot-product attention.

Shape letters: B batch, T query positions, S key positions, N query heads, K key-value heads, H head dimension,
M the queries of all heads that share a key-value head, G heads that share one.
"""

import jax
import jax.numpy as jnp

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Score of a masked position: finite, so that a fully masked row gives the mean of the values and no NaN."""


def attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array, *, scale: float) -> jax.Array:
    """Attention with grouped key-value heads, softmax in float32; the reference for every other implementation.

    `mask_BTS` is True where a query may look; B may be 1. Returns (B, T, N, H) in the dtype of the values.
    Raises ValueError where N is not a multiple of K.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    if N % K:
        raise ValueError(f"{N} query heads cannot be shared by {K} key-value heads")
    # Queries that share a key head are one matrix; batch and heads stay dimensions of their own, so that both may be divided.
    q_BKMH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, N // K * T, H)
    k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    scores = jnp.einsum("BKMH,BKSH->BKMS", q_BKMH, k_BKSH, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(mask_BTS[:, None, None], scores.reshape(B, K, N // K, T, -1), MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSKH.dtype).reshape(B, K, N // K * T, -1)
    out_BKGTH = jnp.einsum("BKMS,BKSH->BKMH", weights, v_BKSH).reshape(B, K, N // K, T, H)
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def causal_mask(num_queries: int, num_keys: int) -> jax.Array:
    """(1, T, S), True where the key does not lie after the query; the last query sees all keys."""
    return jnp.tril(jnp.ones((num_queries, num_keys), bool), num_keys - num_queries)[None]

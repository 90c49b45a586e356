"""Scaled dot-product attention.

Shape letters: B batch, T query positions, S key positions, N query heads, K key-value heads, H head dimension.
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
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(mask_BTS[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH).reshape(B, T, N, H)


def causal_mask(num_queries: int, num_keys: int) -> jax.Array:
    """(1, T, S), True where the key does not lie after the query; the last query sees all keys."""
    return jnp.tril(jnp.ones((num_queries, num_keys), bool), num_keys - num_queries)[None]

"""The loss of next-token prediction from the last block's output, without the logits of a whole sequence.

Sequences are cut into chunks of tokens; logits exist for one chunk at a time, forward and again backward, where they are
computed a second time instead of kept (the same exchange as Megatron's and Liger's fused losses).

Shape letters: B batch, T positions, C positions of a chunk, D model dimension, V vocabulary (padded), R replicas.
"""

from functools import partial

import jax
import jax.numpy as jnp

from sharder.ops.attention import MASKED
from sharder.ops.layout import Layout
from sharder.ops.summed import Summed

MAX_CHUNK_LOGITS = 1 << 22
"""Logits of one example in a chunk: 16 MiB in float32."""


def chunk_size(num_tokens: int, vocab_size: int) -> int:
    """Positions in a chunk: the largest divisor of the sequence up to an eighth of it within MAX_CHUNK_LOGITS."""
    most = max(1, min(num_tokens // 8, MAX_CHUNK_LOGITS // vocab_size))
    return max(c for c in range(1, most + 1) if num_tokens % c == 0)


def _logits(x_RNCD, out_DV, num_valid: int, layout: Layout) -> jax.Array:
    """float32, (R, B/R, C, V); about -1e38 beyond the first `num_valid` entries."""
    logits = jnp.einsum("RNCD,DV->RNCV", x_RNCD, out_DV, preferred_element_type=jnp.float32)
    logits = layout.activation(logits, ("replica", "row", "seq", "vocab"))
    return jnp.where(jnp.arange(out_DV.shape[1]) < num_valid, logits, MASKED)


def _is_target(targets_RNC, vocab_size: int) -> jax.Array:
    # Compared instead of gathered: where the vocabulary is divided, every device looks at its own part.
    return targets_RNC[..., None] == jnp.arange(vocab_size)


def _chunks(x: jax.Array, size: int) -> jax.Array:
    """(R, N, T, ...) to (T/C, R, N, C, ...)."""
    R, N, T = x.shape[:3]
    return jnp.moveaxis(x.reshape(R, N, T // size, size, *x.shape[3:]), 2, 0)


def _joined(chunks: jax.Array) -> jax.Array:
    """Inverse of `_chunks`."""
    x = jnp.moveaxis(chunks, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _forward(x_RNTD, out_DV, targets_RNT, num_valid: int, layout: Layout):
    size = chunk_size(x_RNTD.shape[2], out_DV.shape[1])

    def body(_, chunk):
        x_RNCD, targets_RNC = chunk
        logits = _logits(x_RNCD, out_DV, num_valid, layout)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        target = jnp.where(_is_target(targets_RNC, out_DV.shape[1]), logits, 0.0).sum(-1)
        return None, (log_z - target, log_z)

    _, (losses, log_z) = jax.lax.scan(body, None, (_chunks(x_RNTD, size), _chunks(targets_RNT, size)))
    return _joined(losses), _joined(log_z)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _losses(x_RNTD, out_DV: Summed, targets_RNT, num_valid: int, layout: Layout):
    return _forward(x_RNTD, out_DV.value, targets_RNT, num_valid, layout)[0]


def _losses_forward(x_RNTD, out_DV, targets_RNT, num_valid, layout):
    losses, log_z = _forward(x_RNTD, out_DV.value, targets_RNT, num_valid, layout)
    return losses, (x_RNTD, out_DV.value, targets_RNT, log_z)


def _losses_backward(num_valid, layout, kept, cotangent_RNT):
    x_RNTD, out_DV, targets_RNT, log_z_RNT = kept
    size = chunk_size(x_RNTD.shape[2], out_DV.shape[1])
    by_replica = lambda x: layout.activation(x, ("replica", "embed", "vocab"))  # noqa: E731

    def body(total_RDV, chunk):
        x_RNCD, targets_RNC, log_z_RNC, cotangent_RNC = chunk
        probability = jnp.exp(_logits(x_RNCD, out_DV, num_valid, layout) - log_z_RNC[..., None])
        slope = (probability - _is_target(targets_RNC, out_DV.shape[1]).astype(jnp.float32)) * cotangent_RNC[..., None]
        slope = slope.astype(out_DV.dtype)
        grad_x = jnp.einsum("RNCV,DV->RNCD", slope, out_DV)
        part_RDV = jnp.einsum("RNCD,RNCV->RDV", x_RNCD, slope, preferred_element_type=jnp.float32)
        return by_replica(total_RDV + part_RDV), grad_x

    # Every replica adds up its own chunks: the sum over replicas is formed once, not in every chunk.
    zeros = by_replica(jnp.zeros((x_RNTD.shape[0], *out_DV.shape), jnp.float32))
    arrays = (x_RNTD, targets_RNT, log_z_RNT, cotangent_RNT)
    total_RDV, grad_x = jax.lax.scan(body, zeros, tuple(_chunks(a, size) for a in arrays))
    return _joined(grad_x), Summed(jnp.zeros_like(out_DV), total_RDV), None


_losses.defvjp(_losses_forward, _losses_backward)


def cross_entropy(x_BTD: jax.Array, out_DV: Summed, targets_BT: jax.Array, num_valid: int, layout: Layout) -> jax.Array:
    """Cross-entropy in nats of each token, (B, T) float32, for logits x @ out of which the first `num_valid` entries count.

    The batch must divide over the layout's replicas. Scratch memory: the logits of one chunk, and backward one (D, V) in
    float32 on each replica. Where the layout divides the vocabulary each device has the logits of its part.
    """
    split = lambda x: x.reshape(layout.num_replicas, -1, *x.shape[1:])  # noqa: E731
    return _losses(split(x_BTD), out_DV, split(targets_BT), num_valid, layout).reshape(targets_BT.shape)

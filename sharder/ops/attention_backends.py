"""Implementations of attention by name, what each cannot do, and which one to take.

All have the signature and the meaning of `sharder.ops.attention.attention`, which is the reference. `cudnn` gives a row
without any key the mean over keys that it pads to an even length with; such rows belong to tokens that are filled up.
"""

import functools
import logging
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from sharder.config import UserError
from sharder.ops.attention import attention
from sharder.ops.chunked_attention import chunked_attention

SCORES_LIMIT_BYTES = 1 << 30
"""Above this, scores of a whole call are not kept."""
CUDNN_MAX_HEAD_DIM = {"hopper or later": 256, "earlier": 128}
"""jax/_src/cudnn/fused_attention_stablehlo.py, check_is_flash_attention (jax 0.10)."""


@dataclass(frozen=True)
class Call:
    """What decides which backend can serve."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    platform: str
    compute_capability: float | None = None
    """Of an NVIDIA device."""

    @property
    def scores_bytes(self) -> int:
        return 4 * self.batch * self.heads * self.queries * self.keys


def limit(name: str, call: Call) -> str | None:
    """Why a backend cannot serve a call, with the numbers; None: it can."""
    if name != "cudnn":
        return None
    if call.platform not in ("gpu", "cuda"):
        return f"it runs on NVIDIA GPUs, and this is {call.platform}"
    if call.dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 or float16, not {call.dtype}"
    generation = "hopper or later" if (call.compute_capability or 0) >= 9 else "earlier"
    most = CUDNN_MAX_HEAD_DIM[generation]
    if call.head_dim > most or call.head_dim % 8:
        return f"head_dim is {call.head_dim}, and on this device it takes multiples of 8 up to {most}"
    return None


def choose(call: Call) -> tuple[str, str]:
    """The backend of `auto`, and why."""
    refused = limit("cudnn", call)
    if refused is None:
        return "cudnn", "the fused kernel serves this shape"
    if call.scores_bytes > SCORES_LIMIT_BYTES:
        return "chunked", f"scores would take {call.scores_bytes >> 20} MiB over all devices; cudnn does not serve: {refused}"
    return "reference", f"scores take {call.scores_bytes >> 10} KiB over all devices; cudnn does not serve: {refused}"


def _xla(q, k, v, mask, *, scale: float) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=scale, implementation="xla")


def _cudnn(q, k, v, mask, *, scale: float) -> jax.Array:
    """Lengths are filled up to even ones, which the kernel needs."""
    T, S = q.shape[1], k.shape[1]
    odd_t, odd_s = T % 2, S % 2
    q = jnp.pad(q, ((0, 0), (0, odd_t), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, odd_s), (0, 0), (0, 0))) for x in (k, v))
    mask = jnp.pad(mask, ((0, 0), (0, odd_t), (0, odd_s)))[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation="cudnn")[:, :T]


BACKENDS = {"reference": attention, "xla": _xla, "cudnn": _cudnn, "chunked": chunked_attention}


@functools.cache
def _log(name: str, reason: str) -> None:
    logging.getLogger(__name__).info("attention: %s, since %s", name, reason)


def describe_call(q: jax.Array, k: jax.Array) -> Call:
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    return Call(
        q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], str(q.dtype), device.platform,
        float(capability) if capability else None,
    )  # fmt: skip


def attend(name: str, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, *, scale: float) -> jax.Array:
    """Attention by the backend of this name; `auto` chooses, and logs why.

    Raises UserError where the backend cannot serve the call, with the limit and what `auto` would take.
    """
    call = describe_call(q, k)
    if name == "auto":
        name, reason = choose(call)
        _log(name, reason)
    refused = limit(name, call)
    if refused is not None:
        instead, reason = choose(call)
        raise UserError(
            f"--model.attention is {name}, which cannot serve this call: {refused}. auto would take {instead} ({reason})."
        )
    return BACKENDS[name](q, k, v, mask, scale=scale)

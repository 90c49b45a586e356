"""Sums whose order of additions is fixed, so that their bits do not depend on how many devices take part.

Terms are added in a balanced binary tree over adjacent pairs. A power-of-two block of adjacent terms is a subtree of it,
so whoever adds up such a block first, one device after another or many at once, gets the bits of the whole tree.

Functions that name mesh axes are called inside `jax.shard_map` with those axes manual. n = data x fsdp is the number of
replicas, numbered r = data index x fsdp + fsdp index, as the batch is divided over them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

REPLICAS = ("data", "fsdp")

LANES = 4096
"""Partial sums of squares that run side by side; a constant, since it decides the order of additions."""


def pairwise_sum(x: jax.Array) -> jax.Array:
    """Sum over the first dimension, a power of two, by the tree over adjacent pairs: log2 elementwise additions."""
    while x.shape[0] > 1:
        assert x.shape[0] % 2 == 0, f"{x.shape[0]} is not a power of two"
        x = x[0::2] + x[1::2]
    return x[0]


@dataclass
class TreeAccumulator:
    """The same tree over terms that come one after the other, holding at most log2(number of terms) + 1 partial sums."""

    add: Callable[[Any, Any], Any]
    """Sum of two adjacent blocks, the earlier one first; may reuse the memory of both."""
    _blocks: list[tuple[int, Any]] = field(default_factory=list)

    def push(self, term: Any) -> None:
        size = 1
        while self._blocks and self._blocks[-1][0] == size:
            term = self.add(self._blocks.pop()[1], term)
            size *= 2
        self._blocks.append((size, term))

    def total(self) -> Any:
        """The sum of all terms; their number must be a power of two."""
        assert len(self._blocks) == 1, "the number of terms is not a power of two"
        return self._blocks[0][1]


def ordered_sum(x: jax.Array, dim: int | None, data: int, fsdp: int, divided: bool) -> jax.Array:
    """Sum of every replica's whole `x` over all n replicas by the tree.

    With `divided` the result is this device's fsdp-th part along `dim`, else the whole. Where `dim` divides into n parts,
    each device adds up one of them: an all-to-all that sends (n-1)/n of `x`, the traffic of a ring reduce-scatter, then
    an all-gather of the parts over `data` (and over `fsdp` for the whole), together the traffic of a ring all-reduce.
    Otherwise (`dim` None, small leaves) all n terms are gathered: (n-1) x the size of `x`.
    """
    n = data * fsdp
    if n == 1:
        return x
    if dim is None or x.shape[dim] % n:
        assert not divided or dim is not None
        whole = pairwise_sum(jax.lax.all_gather(x, REPLICAS))
        if not divided:
            return whole
        size = x.shape[dim] // fsdp
        return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index("fsdp") * size, size, dim)
    # Replica (d, f) adds up part f x data + d, so that gathering over `data` makes the f-th part of fsdp parts whole.
    part = x.shape[dim] // n
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    parts = jnp.moveaxis(x.reshape(*before, fsdp, data, part, *after), (dim + 1, dim), (0, 1))
    terms = jax.lax.all_to_all(parts.reshape(n, *before, part, *after), REPLICAS, 0, 0, tiled=True)
    mine = pairwise_sum(terms)
    if data > 1:
        mine = jax.lax.all_gather(mine, "data", axis=dim, tiled=True)
    if not divided and fsdp > 1:
        mine = jax.lax.all_gather(mine, "fsdp", axis=dim, tiled=True)
    return mine


def lane_squares(chunks: jax.Array) -> jax.Array:
    """Squares of each row of `chunks` (k, m) added up into (k, LANES) lanes, one stripe of the row after the other.

    A library reduction may choose another order for another number of rows; a loop over elementwise additions cannot.
    """
    k, m = chunks.shape
    stripes = -(-m // LANES)
    padded = jnp.pad(chunks.astype(jnp.float32), ((0, 0), (0, stripes * LANES - m)))

    def body(total, stripe):
        return total + jnp.square(stripe), None

    return jax.lax.scan(body, jnp.zeros((k, LANES), jnp.float32), padded.reshape(k, stripes, LANES).swapaxes(0, 1))[0]


def num_chunks(size: int, most: int) -> int:
    """Into how many canonical chunks a dimension is cut: the largest power of two up to `most` that divides it."""
    count = most
    while size % count:
        count //= 2
    return count


def chunk_rows(x: jax.Array, dim: int, rows: int) -> jax.Array:
    """`x` cut into `rows` equal blocks along `dim`, each flattened: (rows, x.size / rows)."""
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    return jnp.moveaxis(x.reshape(*before, rows, x.shape[dim] // rows, *after), dim, 0).reshape(rows, -1)


@dataclass(frozen=True)
class Chunking:
    """How a leaf is cut for the sum of its squares, and how much of it a device holds."""

    dim: int
    num_chunks: int
    """Canonical chunks along `dim` of the whole leaf (of one tensor shard): a power of two."""
    fsdp: int
    """Devices of the fsdp axis that hold its chunks, in order; 1: every device holds all."""
    tensor: int
    """Devices of the tensor axis that hold different parts; 1: the leaf is whole over that axis."""


def filled_pairwise_sum(x: jax.Array) -> jax.Array:
    """`pairwise_sum` for any number of terms, filled up with zeros."""
    missing = (1 << (x.shape[0] - 1).bit_length()) - x.shape[0]
    return pairwise_sum(jnp.pad(x, (0, missing)))


def ordered_sums_of_squares(leaves: Sequence[jax.Array], chunkings: Sequence[Chunking]) -> jax.Array:
    """Sum of the squares of all elements of each leaf, float32 (leaves,), the same bits however they are divided by fsdp;
    `filled_pairwise_sum` adds them up.

    Canonical chunks are summed in lanes, lanes by the tree, then chunks and tensor shards. Traffic: one scalar for each chunk.
    """
    rows = [c.num_chunks // c.fsdp for c in chunkings]
    lanes = jnp.concatenate([lane_squares(chunk_rows(x, c.dim, r)) for x, c, r in zip(leaves, chunkings, rows)])
    sums = pairwise_sum(lanes.T)
    totals, start = [], 0
    for r, c in zip(rows, chunkings):
        mine = sums[start : start + r]
        total = pairwise_sum(mine if c.fsdp == 1 else jax.lax.all_gather(mine, "fsdp", tiled=True))
        totals.append(total if c.tensor == 1 else filled_pairwise_sum(jax.lax.all_gather(total, "tensor")))
        start += r
    return jnp.stack(totals)

"""A 64-bit fingerprint of a tree of arrays: integer arithmetic on the devices, the same however they are sharded.

Each element's bits are mixed with its position in the whole array and the path of its leaf by the finaliser of
MurmurHash3 (public domain, A. Appleby), and added up modulo 2**32 in two different ways. Additions of integers
commute, so neither the sharding nor the order can change the result. One variadic reduction needs no scratch memory.
"""

import hashlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

GOLDEN, MULTIPLIER = 0x9E3779B9, 0x85EBCA77


def path_salt(path: str) -> int:
    """32 bits that tell a leaf from another of the same content."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "little")


def _mix(h, xp):
    h = (h ^ (h >> xp.uint32(16))) * xp.uint32(0x85EBCA6B)
    h = (h ^ (h >> xp.uint32(13))) * xp.uint32(0xC2B2AE35)
    return h ^ (h >> xp.uint32(16))


def _words(x: jax.Array) -> list[jax.Array]:
    """The bits of each element as one or two uint32."""
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    size = x.dtype.itemsize
    if size == 8:
        both = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return [both[..., 0], both[..., 1]]
    return [jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)]


def leaf_digest(path: str, x: jax.Array, first_row: jax.Array | int = 0) -> jax.Array:
    """(2,) uint32 digest of one array, or of the rows of a larger one that begin at `first_row`: the digests of all its
    rows add up to that of the whole, modulo 2**32."""
    index = jnp.zeros(x.shape, jnp.uint32)
    for dim in range(x.ndim):
        index = index * jnp.uint32(x.shape[dim]) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
        if dim == 0:
            index = index + jnp.asarray(first_row).astype(jnp.uint32)
    hashed = jnp.full(x.shape, path_salt(path), jnp.uint32)
    for word in _words(x):
        hashed = _mix((word + index * jnp.uint32(GOLDEN)) ^ hashed, jnp)
    terms = (hashed, hashed * ((index * jnp.uint32(MULTIPLIER)) | jnp.uint32(1)))
    zero = (jnp.uint32(0), jnp.uint32(0))
    return jnp.stack(jax.lax.reduce(terms, zero, lambda a, b: (a[0] + b[0], a[1] + b[1]), tuple(range(x.ndim))))


def digests(leaves: dict[str, jax.Array]) -> jax.Array:
    """(number of leaves, 2) uint32, in the order of the sorted paths; to be traced into the step's program."""
    return jnp.stack([leaf_digest(path, leaves[path]) for path in sorted(leaves)])


def rows_digest(batch: dict[str, jax.Array], first_row: jax.Array | int) -> jax.Array:
    """(2,) uint32 digest of examples `first_row` .. of a batch, which add up over its parts in any order."""
    return sum(leaf_digest(name, batch[name], first_row) for name in sorted(batch))


def numpy_digest(path: str, x: np.ndarray) -> np.ndarray:
    """The same digest of an array in host memory, written independently of jax."""
    flat = np.ascontiguousarray(x).reshape(-1)
    index = np.arange(flat.size, dtype=np.uint64).astype(np.uint32)
    if flat.dtype == bool:
        words = [flat.astype(np.uint32)]
    elif flat.dtype.itemsize == 8:
        both = flat.view(np.uint32).reshape(-1, 2)
        words = [both[:, 0], both[:, 1]]
    else:
        words = [flat.view(f"uint{8 * flat.dtype.itemsize}").astype(np.uint32)]
    hashed = np.full(flat.size, path_salt(path), np.uint32)
    for word in words:
        hashed = _mix((word + index * np.uint32(GOLDEN)) ^ hashed, np)
    second = hashed * ((index * np.uint32(MULTIPLIER)) | np.uint32(1))
    return np.array([hashed.sum(dtype=np.uint64), second.sum(dtype=np.uint64)]).astype(np.uint32)


def differing(leaves: dict[str, jax.Array], saved: Mapping[str, str], replicated: NamedSharding | None = None) -> list[str]:
    """Paths of the leaves whose digests, computed on the devices, are not the 16 hex digits in `saved`; `replicated` places the
    result over several devices."""
    found = np.asarray(jax.jit(digests, out_shardings=replicated)(leaves))
    return [path for path, digest in zip(sorted(leaves), found) if hex_digest(digest) != saved.get(path)]


def hex_digest(digest: np.ndarray) -> str:
    """16 hex digits of a (2,) digest."""
    return f"{(int(digest[1]) << 32) | int(digest[0]):016x}"


def combine(leaf_digests: np.ndarray, paths: list[str]) -> str:
    """The fingerprint of a tree, 16 hex digits, from the digests (n, 2) of its leaves at sorted `paths`."""
    assert paths == sorted(paths) and len(paths) == len(leaf_digests)
    h = hashlib.blake2b(digest_size=8)
    for path, digest in zip(paths, leaf_digests):
        h.update(f"{path} {hex_digest(digest)}\n".encode())
    return h.hexdigest()


def numpy_fingerprint(leaves: dict[str, np.ndarray]) -> str:
    """The fingerprint of arrays in host memory."""
    paths = sorted(leaves)
    return combine(np.stack([numpy_digest(p, leaves[p]) for p in paths]), paths)

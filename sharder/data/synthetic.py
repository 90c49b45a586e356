"""Examples made from their id by integer hashing: no files, the same on every machine."""

import hashlib

import numpy as np

from sharder.data.dataset import Batch


def hash_uint32(ids: np.ndarray, columns: int, salt: int) -> np.ndarray:
    """(n, columns) uint32 from ids (n,): murmur3's finaliser over (id, column), wrapping arithmetic."""
    x = ids.astype(np.uint64)[:, None] * np.uint64(columns) + np.arange(columns, dtype=np.uint64)
    x = (x ^ (x >> np.uint64(32))).astype(np.uint32) * np.uint32(0x9E3779B9) + np.uint32(salt)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def describe(*what: object) -> str:
    """SHA-256 (hex) of everything that decides the examples."""
    return hashlib.sha256(repr(("synthetic", *what)).encode()).hexdigest()


class SyntheticTokens:
    """Periodic token sequences: token t of example i is (start_i + t x stride_i) mod vocab_size, so a model can learn them."""

    def __init__(self, num_examples: int, seq_len: int, vocab_size: int, salt: int = 0):
        self.num_examples, self.seq_len, self.vocab_size, self.salt = num_examples, seq_len, vocab_size, salt
        self.fingerprint = describe("tokens", num_examples, seq_len, vocab_size, salt)

    def __len__(self) -> int:
        return self.num_examples

    def read(self, ids: np.ndarray) -> Batch:
        start, stride = hash_uint32(ids, 2, self.salt).astype(np.int64).T
        steps = np.arange(self.seq_len + 1)
        tokens = ((start[:, None] + (1 + stride[:, None] % 7) * steps) % self.vocab_size).astype(np.int32)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


class SyntheticRegression:
    """Uniform inputs in [-1, 1) and targets from a fixed random linear map and a sine."""

    def __init__(self, num_examples: int, input_dim: int, output_dim: int, salt: int = 0):
        self.num_examples, self.input_dim, self.salt = num_examples, input_dim, salt
        self.teacher = np.random.default_rng(0).standard_normal((input_dim, output_dim)).astype(np.float32) / np.sqrt(input_dim)
        self.fingerprint = describe("regression", num_examples, input_dim, output_dim, salt)

    def __len__(self) -> int:
        return self.num_examples

    def read(self, ids: np.ndarray) -> Batch:
        bits = hash_uint32(ids, self.input_dim, self.salt)
        inputs = (bits >> np.uint32(8)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
        # einsum with no optimisation keeps one order of additions per row, whatever the number of rows.
        targets = np.sin(np.float32(3) * np.einsum("ni,io->no", inputs, self.teacher))
        return {"inputs": inputs, "targets": targets}

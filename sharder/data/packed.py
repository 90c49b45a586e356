"""Examples of tokens: windows over documents packed one after the other, with what keeps the documents apart."""

import hashlib
from dataclasses import dataclass

import numpy as np

from sharder.data.corpus import Split
from sharder.data.dataset import Batch
from sharder.data.token_files import TokenFiles


@dataclass(frozen=True)
class PackedTokens:
    """Dataset over token files: example i is tokens [i * T, i * T + T + 1) of the stream, T = seq_len.

    The last token of an example is the first of the next, so that every token but the first is a target once.
    """

    files: TokenFiles
    seq_len: int
    num_examples: int
    fingerprint: str

    @classmethod
    def of(cls, split: Split, files: TokenFiles, seq_len: int) -> "PackedTokens":
        """Raises UserError if the split has fewer than seq_len + 1 tokens."""
        num_examples = split.count_windows(files.num_tokens, "tokens", seq_len)
        fingerprint = hashlib.sha256(f"packed {files.fingerprint} {seq_len}".encode()).hexdigest()
        return cls(files, seq_len, num_examples, fingerprint)

    def __len__(self) -> int:
        return self.num_examples

    def read(self, ids: np.ndarray) -> Batch:
        """Examples with these ids (n,): `inputs`, `targets`, `segments`, `positions` int32 and `weights` float32, (n, T).

        A document that begins before the window counts its positions from the window's beginning: positions are
        below T. The target that belongs to another document than its input has weight 0. Raises IndexError.
        """
        ids = np.asarray(ids, np.int64)
        if ids.size and not (0 <= ids.min() and ids.max() < self.num_examples):
            raise IndexError(f"Examples {ids.min()} to {ids.max()} of a dataset that has {self.num_examples}.")
        starts_N1 = ids[:, None] * self.seq_len
        places_NT1 = starts_N1 + np.arange(self.seq_len + 1)
        tokens_NT1 = self.files.tokens()[places_NT1].astype(np.int32)
        offsets = self.files.offsets()
        documents_NT1 = np.searchsorted(offsets, places_NT1, side="right") - 1
        begins_NT = np.maximum(offsets[documents_NT1[:, :-1]], starts_N1)
        return {
            "inputs": np.ascontiguousarray(tokens_NT1[:, :-1]),
            "targets": np.ascontiguousarray(tokens_NT1[:, 1:]),
            "segments": (documents_NT1[:, :-1] - documents_NT1[:, :1]).astype(np.int32),
            "positions": (places_NT1[:, :-1] - begins_NT).astype(np.int32),
            "weights": (documents_NT1[:, :-1] == documents_NT1[:, 1:]).astype(np.float32),
        }

"""What a dataset is to the rest of the program."""

from typing import Protocol

import numpy as np

Batch = dict[str, np.ndarray]


class Dataset(Protocol):
    """Examples addressed by integer id, readable in any order and from any process.

    Language-model examples are `inputs` and `targets`, int32 (n, seq_len), and where documents are packed
    also `segments` (which document, from 0), `positions` (from 0 in each document), int32, and `weights`
    (1 where the target counts in the loss), float32, all (n, seq_len). Robot examples: see `sharder.models.pi0`.
    """

    fingerprint: str
    """SHA-256 (hex) of everything that decides the examples."""

    def __len__(self) -> int: ...

    def read(self, ids: np.ndarray) -> Batch:
        """The examples with these ids (n,), stacked along a new first dimension."""
        ...

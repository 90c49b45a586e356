"""Which examples a step reads: a pure function of (seed, epoch, step), so that no iterator state exists to be saved.

Every epoch is a keyed permutation of all examples that can be indexed without being stored. The remainder of an
epoch that is smaller than a batch is dropped.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from grain.experimental import index_shuffle

from sharder.config import UserError


def epoch_key(seed: int, epoch: int) -> int:
    """Key of an epoch's permutation, 32 bits.

    The seed is hashed first: with seed + epoch alone, epoch 1 of seed 0 would be epoch 0 of seed 1.
    """
    hashed = int.from_bytes(hashlib.sha256(f"order {seed}".encode()).digest()[:4], "little")
    return (hashed + epoch) % 2**32


@dataclass(frozen=True)
class Order:
    """The order of a dataset of `num_examples`; needs no memory at any size up to 2**62."""

    num_examples: int
    global_batch_size: int
    seed: int
    rounds: int = 12
    """Rounds of the index shuffle; grain's 4 leave successive outputs correlated by 0.44 to 0.53 (measured)."""

    def __post_init__(self):
        if self.num_examples < self.global_batch_size:
            lower = (
                f"lower --train.global-batch-size to {self.num_examples} or less, or --data.seq-len, or "
                if self.num_examples
                else ""
            )
            raise UserError(
                f"the dataset has {self.num_examples} examples, less than one batch of {self.global_batch_size}: {lower}give more data."
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.num_examples // self.global_batch_size

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, index of the batch in it) that step number `step`, from 0, reads."""
        return divmod(step, self.steps_per_epoch)

    def ids(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Example ids of rows start..stop of the global batch of `step`, int64 (stop - start,)."""
        epoch, offset = self.position(step)
        first = offset * self.global_batch_size
        key, last = epoch_key(self.seed, epoch), self.num_examples - 1
        rows = range(first + start, first + (self.global_batch_size if stop is None else stop))
        return np.array([index_shuffle(i, last, key, self.rounds) for i in rows], np.int64)

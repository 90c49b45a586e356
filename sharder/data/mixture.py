"""Several datasets read as one, in fixed shares: which example stands at (seed, step, slot) is a pure function here too."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from grain.experimental import index_shuffle

from sharder.config import UserError
from sharder.data.dataset import Batch, Dataset
from sharder.data.order import epoch_key

BLOCK = 1 << 16
"""Rows over which the shares hold exactly."""
SMALL = 1 << 14
"""Below this a permutation is kept whole: the index shuffle takes 20 us an index at 1000, and 3 ms at 4 (measured)."""


@lru_cache(maxsize=256)
def small_permutation(size: int, key: int) -> np.ndarray:
    """A keyed permutation of range(size), by the rank of hashes; int64."""
    digest = hashlib.shake_256(f"permutation {key}".encode()).digest(8 * size)
    return np.argsort(np.frombuffer(digest, "<u8"), kind="stable")


def permuted(index: int, size: int, key: int, rounds: int) -> int:
    """Where a keyed permutation of range(size) sends `index`."""
    return int(small_permutation(size, key)[index]) if size < SMALL else index_shuffle(index, size - 1, key, rounds)


@lru_cache(maxsize=4)
def spread(places: tuple[int, ...], key: int) -> tuple[np.ndarray, np.ndarray]:
    """For every row of a block its dataset, and how many rows of the same dataset come before it in the block."""
    datasets = np.repeat(np.arange(len(places)), places)[small_permutation(BLOCK, key)]
    by_dataset = np.argsort(datasets, kind="stable")
    ranks = np.empty(BLOCK, np.int64)
    ranks[by_dataset] = np.arange(BLOCK) - np.repeat(np.cumsum(places) - places, places)
    return datasets, ranks


@dataclass(frozen=True)
class MixtureOrder:
    """The order of several datasets, whose examples are numbered one after the other.

    Rows of all batches are counted through from step 0. In every block of 65536 rows each dataset has its share of places (rounded,
    at least one), spread by a keyed permutation of the block. The k-th place of a dataset, counted from step 0, reads the k-th
    example in its own order, which is a new permutation whenever it has been through. So every dataset is read evenly, whatever
    its weight, and nothing is dropped between its epochs.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    global_batch_size: int
    seed: int
    rounds: int = 12

    def __post_init__(self):
        assert len(self.sizes) == len(self.weights) >= 1
        if min(self.sizes) < 1:
            raise UserError(f"dataset {int(np.argmin(self.sizes))} of the mixture has no examples.")

    @property
    def num_examples(self) -> int:
        return sum(self.sizes)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which as many examples are read as there are; a dataset of a large weight comes more than once in them."""
        return max(1, self.num_examples // self.global_batch_size)

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, step in it)."""
        return divmod(step, self.steps_per_epoch)

    def places(self) -> list[int]:
        """Places of each dataset in a block; they add up to BLOCK."""
        shares = np.array(self.weights, np.float64) / sum(self.weights) * BLOCK
        counts = np.maximum(1, np.floor(shares).astype(np.int64))
        by_need = np.argsort(-(shares - np.floor(shares)), kind="stable")
        counts[by_need[: max(0, BLOCK - counts.sum())]] += 1
        counts[np.argmax(counts)] += BLOCK - counts.sum()  # where many datasets were raised to one place
        return counts.tolist()

    def ids(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Example ids of rows start..stop of the global batch of `step`, int64 (stop - start,)."""
        stop = self.global_batch_size if stop is None else stop
        places, first = self.places(), np.cumsum([0, *self.sizes])
        found = np.empty(stop - start, np.int64)
        for at, row in enumerate(range(step * self.global_batch_size + start, step * self.global_batch_size + stop)):
            block, within = divmod(row, BLOCK)
            datasets, ranks = spread(tuple(places), self._key("places", block))
            which = int(datasets[within])
            turn, example = divmod(block * places[which] + int(ranks[within]), self.sizes[which])
            found[at] = first[which] + permuted(example, self.sizes[which], self._key(which, turn), self.rounds)
        return found

    def _key(self, what: object, turn: int) -> int:
        """32 bits; another permutation for every dataset and turn."""
        return _key(self.seed, what, turn)


@lru_cache(maxsize=4096)
def _key(seed: int, what: object, turn: int) -> int:
    return epoch_key(int.from_bytes(hashlib.sha256(f"mixture {seed} {what}".encode()).digest()[:8], "little"), turn)


class Mixture:
    """Datasets one after the other; their examples have the same names and shapes."""

    def __init__(self, parts: Sequence[Dataset], weights: Sequence[float]):
        self.parts, self.weights = tuple(parts), tuple(weights)
        self._first = np.cumsum([0, *map(len, parts)])
        self.fingerprint = hashlib.sha256(
            repr(("mixture 1", [p.fingerprint for p in parts], list(weights))).encode()
        ).hexdigest()

    def __len__(self) -> int:
        return int(self._first[-1])

    def order(self, global_batch_size: int, seed: int, rounds: int) -> MixtureOrder:
        return MixtureOrder(tuple(map(len, self.parts)), self.weights, global_batch_size, seed, rounds)

    def read(self, ids: np.ndarray) -> Batch:
        """As the parts do."""
        ids = np.asarray(ids, np.int64)
        which = np.searchsorted(self._first, ids, side="right") - 1
        batch: Batch = {}
        for number in np.unique(which).tolist():
            places = np.flatnonzero(which == number)
            for name, rows in self.parts[number].read(ids[places] - self._first[number]).items():
                if name not in batch:
                    batch[name] = np.empty((len(ids), *rows.shape[1:]), rows.dtype)
                batch[name][places] = rows
        return batch

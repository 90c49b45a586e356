"""Mean, standard deviation and quantiles of more numbers than fit in memory, exactly.

Quantiles by radix selection: the bits of a float32, its sign folded in, sort as the number does. A first pass counts the upper 16
bits of every value, which says in which of 65536 bins a rank lies; a second counts the lower 16 bits of the values in those bins,
which gives the value itself. Nothing is sorted, sampled or approximated, whatever the shape of the distribution.
"""

from collections.abc import Callable, Iterable

import numpy as np

from sharder.data.normalize import NormStats

BINS = 1 << 16
QUANTILES = (0.01, 0.99)


def sort_keys(x: np.ndarray) -> np.ndarray:
    """uint32 that sort as the float32 they come from."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    # Of negative numbers all bits are flipped, of the others the sign only.
    return bits ^ ((bits.view(np.int32) >> 31).view(np.uint32) | np.uint32(0x80000000))


def from_sort_keys(keys: np.ndarray) -> np.ndarray:
    """Inverse of `sort_keys`."""
    positive = keys & np.uint32(0x80000000)
    return np.where(positive, keys ^ np.uint32(0x80000000), ~keys).astype(np.uint32).view(np.float32)


Block = tuple[np.ndarray, np.ndarray | None]
"""Rows, float32 (n, D), and how often each counts, int64 (n,); None: once."""


def exact_statistics(blocks: Callable[[], Iterable[Block]]) -> NormStats:
    """Statistics over the rows of all blocks. `blocks` is called twice, and must give the same both times.

    The standard deviation is that of the population; quantiles are interpolated linearly, as numpy's.
    """
    count, mean, std, upper = _first_pass(blocks())
    ranks = np.array([(count - 1) * q for q in QUANTILES])
    around = np.stack([np.floor(ranks), np.ceil(ranks)], 1).astype(np.int64).reshape(-1)  # two ranks for each quantile
    values = _second_pass(blocks(), upper, around)
    low, high = values[:, 0::2].astype(np.float64), values[:, 1::2].astype(np.float64)
    part = ranks - np.floor(ranks)
    quantiles = np.where(part >= 0.5, high - (high - low) * (1 - part), low + (high - low) * part)
    return NormStats(mean, std, quantiles[:, 0], quantiles[:, 1])


def _first_pass(blocks: Iterable[Block]) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """(rows, mean (D,), standard deviation (D,), how many values have which upper 16 bits, int64 (D, BINS)).

    Moments are taken about the first block's mean, so that nothing is lost where the mean is far from 0.
    """
    count, centre = 0, None
    for rows, weights in blocks:
        columns = np.ascontiguousarray(rows.T)
        if centre is None:
            centre = columns.mean(1, dtype=np.float64)
            first, second, upper = np.zeros(len(columns)), np.zeros(len(columns)), np.zeros((len(columns), BINS), np.int64)
        count += rows.shape[0] if weights is None else int(weights.sum())
        for d, column in enumerate(columns):
            off = column - centre[d]
            weighted = off if weights is None else off * weights
            first[d] += weighted.sum()
            second[d] += np.dot(weighted, off)
            upper[d] += _counts(sort_keys(column) >> np.uint32(16), weights)
    assert count, "no rows"
    return count, centre + first / count, np.sqrt(np.maximum(second / count - (first / count) ** 2, 0.0)), upper


def _counts(numbers: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """How often each number below BINS occurs, int64 (BINS,)."""
    found = np.bincount(numbers, weights, BINS)
    return found if weights is None else found.astype(np.int64)  # sums of integers, exact in float64 up to 2**53


def _second_pass(blocks: Iterable[Block], upper: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """The values (D, ranks) with these ranks, float32."""
    up_to = np.cumsum(upper, axis=1)
    bins = np.stack([np.searchsorted(row, ranks, side="right") for row in up_to])  # (D, ranks)
    lower: list[dict[int, np.ndarray]] = [{b: np.zeros(BINS, np.int64) for b in set(row.tolist())} for row in bins]
    for rows, weights in blocks:
        for d, column in enumerate(np.ascontiguousarray(rows.T)):
            keys = sort_keys(column)
            for b, counts in lower[d].items():
                within = keys - np.uint32(b << 16)  # wraps around below the bin
                inside = within < BINS
                counts += _counts(within[inside], None if weights is None else weights[inside])
    values = np.empty(bins.shape, np.float32)
    for d, row in enumerate(bins):
        for r, b in enumerate(row.tolist()):
            rank = ranks[r] - (up_to[d, b] - upper[d, b])
            low = int(np.searchsorted(np.cumsum(lower[d][b]), rank, side="right"))
            values[d, r] = from_sort_keys(np.array([(b << 16) | low], np.uint32))[0]
    return values

"""How the statistics of a dataset differ from those that a checkpoint was trained with."""

import numpy as np

from sharder.data.normalize import EPSILON, NormStats

FAR = 1.0
"""Distance of the means in standard deviations of the checkpoint, and logarithm to base 2 of the ratio of spreads, from which on a
dimension is named: normalised values are then mostly elsewhere, or half or twice as wide."""


def compare_stats(dataset: dict[str, NormStats], checkpoint: dict[str, NormStats]) -> list[str]:
    """A sentence for every dimension that is far from what the checkpoint knows."""
    found = [f"{name}: the checkpoint has no statistics of it." for name in dataset if name not in checkpoint]
    for name in dataset:
        if name in checkpoint:
            found += _compare(name, dataset[name], checkpoint[name])
    return found


def _compare(name: str, ours: NormStats, theirs: NormStats) -> list[str]:
    size = min(len(ours.mean), len(theirs.mean))
    found = []
    if len(ours.mean) != len(theirs.mean):
        found.append(
            f"{name}: {len(ours.mean)} dimensions, the checkpoint has {len(theirs.mean)}; the first {size} are compared."
        )
    shift = (ours.mean[:size] - theirs.mean[:size]) / (theirs.std[:size] + EPSILON)
    widths = np.log2((ours.std[:size] + EPSILON) / (theirs.std[:size] + EPSILON))
    for d in np.flatnonzero((np.abs(shift) > FAR) | (np.abs(widths) > FAR)).tolist():
        found.append(
            f"{name}, dimension {d}: mean {ours.mean[d]:.4g} and std {ours.std[d]:.4g}, the checkpoint has {theirs.mean[d]:.4g} and"
            f" {theirs.std[d]:.4g}: normalised with its statistics, values lie around {shift[d]:.2g} with std {2 ** widths[d]:.2g}."
        )
    return found

"""Chunks of actions: which rows an example's next steps are."""

import numpy as np


def chunk_rows(frames: np.ndarray, horizon: int, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n, horizon) of the steps that follow frames (n,), the frame itself first, and whether each is padding.

    Steps past the end of the episode repeat its last row and are flagged. `starts` and `lengths` are of the episodes.
    """
    episode = np.searchsorted(starts, frames, side="right") - 1
    last = starts[episode] + lengths[episode] - 1
    rows = frames[:, None] + np.arange(horizon)
    return np.minimum(rows, last[:, None]), rows > last[:, None]


def chunk_weights(horizon: int, lengths: np.ndarray) -> np.ndarray:
    """How often each row of these episodes occurs in the chunks of all their frames, int64 (sum of lengths,).

    Row p of an episode is in the chunks of the min(p + 1, horizon) frames up to it; the last row also fills up the chunks that
    reach past the end.
    """
    starts = np.cumsum(lengths) - lengths
    place = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    weights = np.minimum(place + 1, horizon)
    full = np.minimum(lengths, horizon)  # chunks that hold the last row: horizon - k times, for k = 0 .. full - 1
    weights[starts + lengths - 1] = full * horizon - full * (full - 1) // 2
    return weights


def relative_actions(actions: np.ndarray, state: np.ndarray, mask: tuple[bool, ...]) -> np.ndarray:
    """Chunks (..., H, A) less the state (..., S) that they start from, where `mask` is True; a new array."""
    return _shifted(actions, state, mask, -1)


def absolute_actions(actions: np.ndarray, state: np.ndarray, mask: tuple[bool, ...]) -> np.ndarray:
    """Inverse of `relative_actions`."""
    return _shifted(actions, state, mask, 1)


def _shifted(actions: np.ndarray, state: np.ndarray, mask: tuple[bool, ...], sign: int) -> np.ndarray:
    found, size = actions.copy(), len(mask)
    found[..., :size] += sign * np.where(np.array(mask, bool), state[..., None, :size], np.zeros((), state.dtype))
    return found


def expand_mask(counts: tuple[int, ...]) -> tuple[bool, ...]:
    """A mask from lengths of stretches, False where negative: (6, -1) is six times True, then False."""
    return tuple(count > 0 for count in counts for _ in range(abs(count)))


def pad_last(x: np.ndarray, size: int) -> np.ndarray:
    """x (..., D) filled up with zeros to (..., size)."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])

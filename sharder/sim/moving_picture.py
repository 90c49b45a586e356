"""Episodes as an animated GIF: all cameras side by side, and at the end a frame that is green where the task was done."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sharder.config import UserError
from sharder.sim.episode import Episode

SCALE = 2
"""Pixels of the GIF along each side of a pixel."""
FRAME = 4
"""Width of the frame, in pixels of the GIF."""
GREEN, RED = (40, 170, 70), (200, 50, 40)
ACTION_MS, LAST_MS = 100, 1000
"""How long a picture stays, and the last of an episode."""


def pictures_of(episode: Episode) -> np.ndarray:
    """uint8 (T, height, width, 3)."""
    wide = np.concatenate(list(episode.pictures.values()), axis=2)
    wide = wide.repeat(SCALE, axis=1).repeat(SCALE, axis=2)
    inner = wide[-1, FRAME:-FRAME, FRAME:-FRAME].copy()
    wide[-1] = GREEN if episode.succeeded else RED
    wide[-1, FRAME:-FRAME, FRAME:-FRAME] = inner
    return wide


def write_gif(path: Path, episodes: Sequence[Episode]) -> None:
    """One episode after the other, for ever. Raises UserError where the file cannot be written."""
    from PIL import Image

    frames, durations = [], []
    for episode in episodes:
        pictures = pictures_of(episode)
        frames += [Image.fromarray(picture) for picture in pictures]
        durations += [ACTION_MS] * (len(pictures) - 1) + [LAST_MS]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        frames[0].save(path, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    except OSError as error:
        raise UserError(f"--video {path} cannot be written: {error.strerror}.") from None

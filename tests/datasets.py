"""Datasets of the tests: those that LeRobot wrote, and small ones made on the spot."""

import shutil
from pathlib import Path
from string import ascii_lowercase

import numpy as np

from sharder.data.lerobot.write import DatasetWriter, Encoding

FOLDER = Path(__file__).parent / "data" / "datasets"
NAMES = ("v3_video", "v21_video", "v3_converted", "v3_two_cams_image")


def copy(name: str, to: Path) -> Path:
    """A copy that may be broken."""
    return Path(shutil.copytree(FOLDER / name, to / name))


def gradient(length: int, height: int, width: int, shift: int) -> np.ndarray:
    """Smooth pictures, each different from the next, that a lossy codec keeps recognisable: uint8 (length, height, width, 3)."""
    t, y, x = np.ogrid[:length, :height, :width]
    red = 128 + 100 * np.sin((x / width + t / 7 + shift) * 3)
    green = 128 + 100 * np.sin((y / height - t / 5 + shift) * 3)
    blue = 40 + (t * 23 + shift * 31) % 170 + 0 * x + 0 * y
    return np.stack(np.broadcast_arrays(red, green, blue), -1).astype(np.uint8)


def make(
    root: Path, lengths=(9, 14, 11, 6, 12), fps: int = 30, cameras=None, encoding=Encoding("png"), frames_per_file: int = 100_000,
    files_per_chunk: int = 1000, seed: int = 0, state_dim: int = 3, action_dim: int = 2,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:  # fmt: skip
    """Writes a dataset of random numbers; returns its columns and its pictures, all episodes in a row."""
    cameras = {"observation.images.top": (24, 40), "observation.images.wrist": (32, 24)} if cameras is None else cameras
    rng, features = (
        np.random.default_rng(seed),
        {"observation.state": ascii_lowercase[:state_dim], "action": ascii_lowercase[:action_dim]},
    )
    features = {name: list(letters) for name, letters in features.items()}
    writer = DatasetWriter(root, fps, features, cameras, "arm", encoding, frames_per_file, files_per_chunk)
    numbers, pictures = {n: [] for n in features}, {c: [] for c in cameras}
    for e, length in enumerate(lengths):
        own = {n: rng.standard_normal((length, len(names))).astype(np.float32) for n, names in features.items()}
        seen = {c: gradient(length, h, w, e + k) for k, (c, (h, w)) in enumerate(cameras.items())}
        writer.add_episode(own, seen, f"do task {e % 2}")
        for whole, part in ((numbers, own), (pictures, seen)):
            for name in whole:
                whole[name].append(part[name])
    writer.close()
    joined = lambda parts: {n: np.concatenate(p) for n, p in parts.items()}  # noqa: E731
    return joined(numbers), joined(pictures)

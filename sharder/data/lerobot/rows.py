"""Rows of the data files: columns of numbers in the order of the dataset, and where an image column's rows lie."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sharder.config import UserError
from sharder.data.lerobot.episodes import Episodes
from sharder.data.lerobot.info import Feature, Info
from sharder.data.lerobot.parquet import read_table, to_numpy

# Columns that are read before the dataset's own.
POSITION = ("episode_index", "frame_index", "timestamp", "task_index")
SCALAR = {"episode_index": "int64", "frame_index": "int64", "timestamp": "float32", "task_index": "int64"}


@dataclass(frozen=True)
class Rows:
    """Every frame of a dataset, without its pictures."""

    columns: dict[str, np.ndarray]
    """(frames, size), or (frames,) for POSITION."""
    row_in_file: np.ndarray
    """Row of each episode's first frame in its data file, int64 (episodes,)."""


def read_rows(info: Info, episodes: Episodes, names: tuple[str, ...]) -> Rows:
    """The named features of every frame, and POSITION. Raises UserError naming file and column.

    Files are read side by side: decompression leaves the interpreter lock to others.
    """
    features = [_feature(info, name) for name in (*POSITION, *names)]
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda path: _read_file(path, features), episodes.data.paths))
    sizes = np.array([len(part["episode_index"]) for part in parts], np.int64)
    found = np.concatenate([part["episode_index"] for part in parts])
    file_starts = np.cumsum(sizes) - sizes
    row_in_file, places = _locate(episodes, found, file_starts, sizes)
    in_order = places is None
    columns = {}
    for feature in features:
        column = np.concatenate([part.pop(feature.name) for part in parts])
        columns[feature.name] = column if in_order else column[places]
    _check_frames(info, episodes, columns)
    return Rows(columns, row_in_file)


def _feature(info: Info, name: str) -> Feature:
    if name in info.features:
        return info.features[name]
    if name in SCALAR:
        return Feature(name, SCALAR[name], (1,), None)
    have = ", ".join(n for n, f in info.features.items() if f.is_number)
    raise UserError(f"{info.file}, field features, has no {name!r}; there are {have}.")


def _read_file(path: Path, features: list[Feature]) -> dict[str, np.ndarray]:
    table = read_table(path, [f.name for f in features])
    found = {f.name: to_numpy(path, table[f.name], f) for f in features}
    return {name: column.reshape(-1) if name in POSITION else column for name, column in found.items()}


def _locate(
    episodes: Episodes, found: np.ndarray, file_starts: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Row in its file of each episode's first frame, and the place of every row of the dataset in the files together,
    None where they lie in order already."""
    changes = np.flatnonzero(np.diff(found)) + 1 if found.size else np.zeros(0, np.int64)
    inner = file_starts[(file_starts > 0) & (file_starts < found.size)]
    begins = np.unique(np.concatenate([np.zeros(min(1, found.size), np.int64), changes, inner]))
    counts = np.diff(np.append(begins, found.size))
    runs = {}
    for begin, count in zip(begins.tolist(), counts.tolist()):
        runs.setdefault(int(found[begin]), []).append((begin, count))
    row_in_file, places = np.empty(len(episodes), np.int64), []
    for e, (index, length) in enumerate(zip(episodes.indices.tolist(), episodes.lengths.tolist())):
        path, start = episodes.data.paths[episodes.data.of_episode[e]], file_starts[episodes.data.of_episode[e]]
        own = [r for r in runs.pop(index, []) if start <= r[0] < start + sizes[episodes.data.of_episode[e]]]
        if len(own) != 1 or own[0][1] != length:
            rows = sum(count for _, count in own)
            raise UserError(
                f"{path}, column episode_index: episode {index} has {rows} rows in {len(own)} pieces, but {episodes.file}, field length, says {length}."
            )
        row_in_file[e] = own[0][0] - start
        places.append(own[0][0])
    if runs:
        index, ((begin, count), *_) = next(iter(runs.items()))
        file = int(np.searchsorted(file_starts, begin, side="right")) - 1
        raise UserError(
            f"{episodes.data.paths[file]}, column episode_index: {count} rows of episode {index}, which {episodes.file} does not have."
        )
    if np.array_equal(places, episodes.starts):
        return row_in_file, None
    return row_in_file, np.concatenate([np.arange(p, p + n) for p, n in zip(places, episodes.lengths)])


def _check_frames(info: Info, episodes: Episodes, columns: dict[str, np.ndarray]) -> None:
    """Frames are numbered from 0 in every episode, without gaps."""
    expected = np.arange(info.num_frames) - np.repeat(episodes.starts, episodes.lengths)
    wrong = np.flatnonzero(columns["frame_index"] != expected)
    if wrong.size:
        e = int(np.searchsorted(episodes.starts, wrong[0], side="right")) - 1
        path = episodes.data.paths[episodes.data.of_episode[e]]
        raise UserError(
            f"{path}, column frame_index: frame {expected[wrong[0]]} of episode {episodes.indices[e]} is numbered {columns['frame_index'][wrong[0]]}."
        )

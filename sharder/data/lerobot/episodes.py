"""The table of episodes: how long each is, what its task is, and in which files its rows and frames lie."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sharder.config import UserError
from sharder.data.lerobot.info import Info, read_json_lines
from sharder.data.lerobot.parquet import read_table


@dataclass(frozen=True)
class Files:
    """For every episode the file that holds it."""

    paths: tuple[Path, ...]
    of_episode: np.ndarray
    """Index into paths, int64 (episodes,)."""


@dataclass(frozen=True)
class VideoFiles(Files):
    first_frame: np.ndarray
    """Number of the episode's first frame in its file, int64 (episodes,), from the rounded from_timestamp."""


@dataclass(frozen=True)
class Episodes:
    """Episodes in the order of their index; frame t of episode e is row starts[e] + t of the dataset."""

    file: Path
    """Where the table stands, for messages."""
    indices: np.ndarray
    lengths: np.ndarray
    tasks: tuple[tuple[str, ...], ...]
    data: Files
    videos: dict[str, VideoFiles]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """First row of every episode, int64 (episodes,)."""
        return np.cumsum(self.lengths) - self.lengths


def read_episodes(info: Info) -> Episodes:
    """Raises UserError where the table is missing, or disagrees with itself, with info.json or with the files there are."""
    episodes = _read_v2(info) if info.is_v2 else _read_v3(info)
    _check_counts(info, episodes)
    for files in (episodes.data, *episodes.videos.values()):
        missing = [p for p in files.paths if not p.is_file()]
        if missing:
            raise UserError(
                f"{missing[0]} is missing ({len(missing)} of {len(files.paths)} such files are), but {episodes.file} names it."
            )
    return episodes


def _check_counts(info: Info, episodes: Episodes) -> None:
    file, lengths = episodes.file, episodes.lengths
    if len(set(episodes.indices.tolist())) != len(episodes):
        raise UserError(f"{file}, field episode_index, holds the same number twice.")
    if (lengths < 1).any():
        bad = int(np.argmin(lengths))
        raise UserError(f"{file}, field length: episode {episodes.indices[bad]} is empty (length {lengths[bad]}).")
    if len(episodes) != info.num_episodes:
        raise UserError(f"{info.file}, field total_episodes, is {info.num_episodes}, but {file} has {len(episodes)} episodes.")
    if lengths.sum() != info.num_frames:
        raise UserError(
            f"{info.file}, field total_frames, is {info.num_frames}, but the lengths in {file} add up to {lengths.sum()}."
        )


def _format(info: Info, field: str, template: str, **values: object) -> Path:
    try:
        return info.root / template.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"{info.file}, field {field}, is {template!r}, which cannot be filled in: {error}.") from None


def _read_v2(info: Info) -> Episodes:
    """One parquet file and one video of every camera for each episode."""
    file = info.root / "meta" / "episodes.jsonl"
    rows = read_json_lines(file)
    for number, row in enumerate(rows, 1):
        for field, kind in (("episode_index", int), ("length", int)):
            if not isinstance(row.get(field), kind):
                raise UserError(f"{file}, line {number}, field {field}, is {row.get(field)!r}, but must be an integer.")
    rows.sort(key=lambda row: row["episode_index"])
    indices = np.array([row["episode_index"] for row in rows], np.int64)
    own = np.arange(len(rows))

    def paths(field: str, template: str, **more: str) -> tuple[Path, ...]:
        chunk = indices // info.chunks_size
        return tuple(
            _format(info, field, template, episode_chunk=c, episode_index=i, **more)
            for c, i in zip(chunk.tolist(), indices.tolist())
        )

    videos = {
        camera: VideoFiles(paths("video_path", info.video_path, video_key=camera), own, np.zeros(len(rows), np.int64))
        for camera in info.cameras
        if info.features[camera].dtype == "video"
    }
    lengths = np.array([row["length"] for row in rows], np.int64)
    tasks = tuple(tuple(row.get("tasks") or ()) for row in rows)
    return Episodes(file, indices, lengths, tasks, Files(paths("data_path", info.data_path), own), videos)


def _read_v3(info: Info) -> Episodes:
    """Many episodes in a file; data and every camera have their own numbering of files."""
    folder = info.root / "meta" / "episodes"
    parts = sorted(folder.glob("*/*.parquet"))
    if not parts:
        raise UserError(f"{folder} is missing, or holds no chunk-*/file-*.parquet.")
    cameras = [c for c in info.cameras if info.features[c].dtype == "video"]
    of_video = ("chunk_index", "file_index", "from_timestamp")
    columns = [
        "episode_index",
        "length",
        "tasks",
        "data/chunk_index",
        "data/file_index",
        "dataset_from_index",
        "dataset_to_index",
    ]
    columns += [f"videos/{c}/{field}" for c in cameras for field in of_video]
    values: dict[str, list] = {name: [] for name in columns}
    for part in parts:
        table = read_table(part, columns)
        for name in columns:
            column = table[name].to_pylist()
            if name != "tasks" and any(v is None for v in column):
                raise UserError(f"{part}, column {name}, has nulls.")
            values[name] += column
    order = np.argsort(np.array(values["episode_index"], np.int64), kind="stable")
    column = lambda name: np.array(values[name])[order]  # noqa: E731
    _check_ranges(parts[0] if len(parts) == 1 else folder, column)

    def files(field: str, template: str, prefix: str, **more: str) -> tuple[tuple[Path, ...], np.ndarray]:
        pairs = np.stack([column(f"{prefix}/chunk_index"), column(f"{prefix}/file_index")], 1)
        unique, of_episode = np.unique(pairs.reshape(-1, 2), axis=0, return_inverse=True)
        paths = tuple(_format(info, field, template, chunk_index=c, file_index=f, **more) for c, f in unique.tolist())
        return paths, of_episode.reshape(-1)

    videos = {}
    for camera in cameras:
        first = np.round(column(f"videos/{camera}/from_timestamp") * info.fps).astype(np.int64)
        videos[camera] = VideoFiles(*files("video_path", info.video_path, f"videos/{camera}", video_key=camera), first)
    tasks = tuple(tuple(values["tasks"][i] or ()) for i in order)
    return Episodes(
        parts[0] if len(parts) == 1 else folder, column("episode_index").astype(np.int64), column("length").astype(np.int64), tasks,
        Files(*files("data_path", info.data_path, "data")), videos,
    )  # fmt: skip


def _check_ranges(file: Path, column) -> None:
    """dataset_from_index and dataset_to_index span the length."""
    spans = column("dataset_to_index") - column("dataset_from_index")
    differ = np.flatnonzero(spans != column("length"))
    if differ.size:
        e = differ[0]
        raise UserError(
            f"{file}, field length: episode {column('episode_index')[e]} has length {column('length')[e]}, but goes from"
            f" dataset_from_index {column('dataset_from_index')[e]} to dataset_to_index {column('dataset_to_index')[e]}."
        )

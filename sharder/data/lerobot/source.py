"""A LeRobot dataset as frames of episodes: the columns of numbers in memory, pictures by reference."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from sharder.config import UserError
from sharder.data.frames import Wanted
from sharder.data.lerobot.episodes import Episodes, read_episodes
from sharder.data.lerobot.info import Info, read_info, read_tasks
from sharder.data.lerobot.rows import Rows, read_rows

CHECKED_VIDEOS = 256
"""As many videos are opened at the start to compare their length; opening one takes about a millisecond."""


@dataclass(frozen=True)
class LeRobotSource:
    """Frames are numbered through all episodes; frame t of episode e is starts[e] + t."""

    info: Info
    tasks: dict[int, str]
    episodes: Episodes
    rows: Rows

    @property
    def name(self) -> str:
        return str(self.info.root)

    @property
    def fps(self) -> float:
        return self.info.fps

    @property
    def num_frames(self) -> int:
        return self.info.num_frames

    @property
    def cameras(self) -> tuple[str, ...]:
        return self.info.cameras

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """(frames, size) by feature; timestamp, task_index, frame_index and episode_index are (frames,)."""
        return self.rows.columns

    @cached_property
    def starts(self) -> np.ndarray:
        return self.episodes.starts

    @property
    def lengths(self) -> np.ndarray:
        return self.episodes.lengths

    def episode_of(self, frames: np.ndarray) -> np.ndarray:
        """Which episode, from 0, frames (n,) belong to."""
        return np.searchsorted(self.starts, frames, side="right") - 1

    def prompts(self, frames: np.ndarray) -> list[str]:
        return [self.tasks[index] for index in self.columns["task_index"][frames].tolist()]

    def pictures(self, camera: str, frames: np.ndarray) -> list[tuple[np.ndarray, Wanted]]:
        """What to decode for frames (n,), file by file: (places in `frames`, what stands there)."""
        episode = self.episode_of(frames)
        within = frames - self.starts[episode]
        if camera in self.episodes.videos:
            files = self.episodes.videos[camera]
            column, rows = None, self.first_frames(camera)[episode] + within
        else:
            files, column, rows = self.episodes.data, camera, self.rows.row_in_file[episode] + within
        file_of = files.of_episode[episode]
        groups = [(file, np.flatnonzero(file_of == file)) for file in np.unique(file_of).tolist()]
        return [(places, Wanted(str(files.paths[file]), column, rows[places])) for file, places in groups]

    def first_frames(self, camera: str) -> np.ndarray:
        """Number in its file of every episode's first frame.

        from_timestamp is a running sum of floats in some writers, and can drift. Where the episodes of a file follow one
        another without a gap, and together are as long as the file, their lengths decide.
        """
        if camera not in self._first_frames:
            files = self.episodes.videos[camera]
            first, from_lengths = files.first_frame.copy(), self._first_from_lengths(camera)
            for file in np.unique(files.of_episode[first != from_lengths]).tolist():
                own = files.of_episode == file
                if _video_length(files.paths[file]) == self.lengths[own].sum():
                    first[own] = from_lengths[own]
            self._first_frames[camera] = first
        return self._first_frames[camera]

    @cached_property
    def _first_frames(self) -> dict[str, np.ndarray]:
        return {}

    def _first_from_lengths(self, camera: str) -> np.ndarray:
        files = self.episodes.videos[camera]
        order = np.lexsort((files.first_frame, files.of_episode))
        before = np.cumsum(self.lengths[order]) - self.lengths[order]
        file = files.of_episode[order]
        begins = np.searchsorted(file, file)  # the first episode of each file
        found = np.empty(len(order), np.int64)
        found[order] = before - before[begins]
        return found

    def check_videos(self, limit: int | None = None) -> None:
        """Opens every video, at most `limit` of them, and compares its length. Raises UserError naming the file."""
        for camera, files in self.episodes.videos.items() if limit != 0 else ():
            ends = np.zeros(len(files.paths), np.int64)
            np.maximum.at(ends, files.of_episode, self.first_frames(camera) + self.lengths)
            for path, end in zip(files.paths[:limit], ends.tolist()):
                length = _video_length(path)
                if length < end:
                    raise UserError(
                        f"{path} has {length} frames, but {self.episodes.file}, field length, needs {end} of it: the video is truncated."
                    )

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what decides the frames: all numbers and tasks; of files of pictures their sizes, first and last 64 KiB."""
        digest = hashlib.sha256(f"lerobot 1 {self.fps} {sorted(self.tasks.items())}\n".encode())
        digest.update(self.lengths.astype("<i8").tobytes())
        for name in sorted(self.columns):
            digest.update(f"{name} {self.columns[name].dtype} {self.columns[name].shape}\n".encode())
            digest.update(np.ascontiguousarray(self.columns[name]))
        files = [f for camera in sorted(self.episodes.videos) for f in self.episodes.videos[camera].paths]
        for path in files + (
            list(self.episodes.data.paths) if any(c not in self.episodes.videos for c in self.cameras) else []
        ):
            size = path.stat().st_size
            with path.open("rb") as file:
                digest.update(f"{size}\n".encode() + file.read(1 << 16))
                file.seek(max(0, size - (1 << 16)))
                digest.update(file.read(1 << 16))
        return digest.hexdigest()


def _video_length(path: Path) -> int:
    from sharder.data.lerobot.video import VideoFile

    video = VideoFile(path)
    video.close()
    return len(video)


def open_lerobot(
    path: str | Path, columns: tuple[str, ...] | None = None, check_videos: int | None = CHECKED_VIDEOS
) -> LeRobotSource:
    """A dataset in a local folder, with all columns of numbers or those named.

    Raises UserError, one message naming file and field, where anything that is read here is wrong.
    """
    info = read_info(Path(path))
    tasks = read_tasks(info)
    episodes = read_episodes(info)
    rows = read_rows(info, episodes, info.numbers() if columns is None else columns)
    unknown = sorted(set(rows.columns["task_index"].tolist()) - set(tasks))
    if unknown:
        place = int(np.argmax(rows.columns["task_index"] == unknown[0]))
        e = int(np.searchsorted(episodes.starts, place, side="right")) - 1
        raise UserError(
            f"{episodes.data.paths[episodes.data.of_episode[e]]}, column task_index, holds {unknown[0]}, which is no task of the dataset."
        )
    source = LeRobotSource(info, tasks, episodes, rows)
    source.check_videos(check_videos)
    return source

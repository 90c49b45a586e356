"""Writes datasets in format v3.0, as LeRobot's own reader accepts them."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from sharder.config import UserError, require
from sharder.data.lerobot.info import INDEX_COLUMNS

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


@dataclass(frozen=True)
class Encoding:
    """How frames of cameras are kept."""

    codec: str = "libsvtav1"
    """libsvtav1 or libx264; png: in the parquet files, exactly."""
    crf: int = 30
    key_frame_every: int = 2
    """Frames from one key frame to the next; LeRobot's default, for random access."""
    max_b_frames: int = 0

    def __post_init__(self):
        require(self.codec in ("libsvtav1", "libx264", "png"), "codec", self.codec, "libsvtav1, libx264 or png")

    @property
    def is_video(self) -> bool:
        return self.codec != "png"

    def options(self) -> dict[str, str]:
        if self.codec == "libsvtav1":
            return {"crf": str(self.crf), "preset": "8", "svtav1-params": "logical-processors=1"}
        return {"crf": str(self.crf), "bf": str(self.max_b_frames), "sc_threshold": "0"}


@contextlib.contextmanager
def _ordinary_threads() -> Iterator[None]:
    """Run by root, the AV1 encoder makes this thread and its own real-time ones, and whatever this process starts later inherits
    that: other processes would hardly run any more.
    """
    if not hasattr(os, "sched_getscheduler"):
        yield
        return
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    yield
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
            if os.sched_getscheduler(int(thread.name)) != policy:
                os.sched_setscheduler(int(thread.name), policy, parameter)


class VideoWriter:
    """One video file, to which frames are appended."""

    def __init__(self, path: Path, fps: int, height: int, width: int, encoding: Encoding):
        import av

        os.environ.setdefault("SVT_LOG", "1")  # errors only; the AV1 encoder prints its settings otherwise
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(path), "w")
        self._stream = self._container.add_stream(encoding.codec, rate=fps, options=encoding.options())
        self._stream.height, self._stream.width, self._stream.pix_fmt = height, width, "yuv420p"
        self._stream.codec_context.gop_size = encoding.key_frame_every
        self._stream.codec_context.time_base = Fraction(1, fps)
        with _ordinary_threads():
            self._stream.codec_context.open()
        self.num_frames = 0

    def append(self, frames: np.ndarray) -> None:
        """uint8 (n, height, width, 3), RGB."""
        import av

        for picture in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts = self.num_frames
            self._container.mux(self._stream.encode(frame))
            self.num_frames += 1

    def close(self) -> None:
        self._container.mux(self._stream.encode())
        self._container.close()


def encode_png(picture: np.ndarray) -> bytes:
    """uint8 (height, width, 3) as PNG."""
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG", compress_level=3)
    return out.getvalue()


def summarise(values: np.ndarray) -> dict[str, list]:
    """Statistics over the first axis, float64 but for `count`, with quantiles."""
    values = values.astype(np.float64)
    found = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    found |= {name: np.quantile(values, q, axis=0) for name, q in QUANTILES.items()}
    return {name: np.atleast_1d(x).tolist() for name, x in found.items()} | {"count": [len(values)]}


def summarise_pictures(frames: np.ndarray) -> dict[str, list]:
    """Of each channel over some of the frames, in 0..1, shaped 3 x 1 x 1."""
    some = frames[np.unique(np.linspace(0, len(frames) - 1, 16).astype(int))]
    found = summarise(some.reshape(-1, 3) / 255.0)
    return {k: v if k == "count" else np.reshape(v, (3, 1, 1)).tolist() for k, v in found.items()} | {"count": [len(some)]}


class DatasetWriter:
    """A new dataset; episodes are added one after the other.

    `features` gives names and sizes of the columns of numbers: {"observation.state": ["x", "y"], "action": ["dx"]}.
    """

    def __init__(
        self, root: Path, fps: int, features: dict[str, list[str]], cameras: dict[str, tuple[int, int]],
        robot_type: str | None = None, encoding: Encoding = Encoding(), frames_per_file: int = 100_000, files_per_chunk: int = 1000,
    ):  # fmt: skip
        """`cameras`: (height, width) by name. Raises UserError where `root` exists."""
        if root.exists():
            raise UserError(f"{root} exists already: name a folder that does not.")
        self.root, self.fps, self.features, self.cameras = root, fps, features, cameras
        self.robot_type, self.encoding = robot_type, encoding
        self.frames_per_file, self.files_per_chunk = frames_per_file, files_per_chunk
        self.tasks: dict[str, int] = {}
        self.episodes: list[dict] = []
        self.num_frames = 0
        self._columns: dict[str, list[np.ndarray]] = {name: [] for name in features}
        self._pending: list[dict] = []
        self._file = 0
        self._videos: dict[str, VideoWriter] = {}

    @property
    def _place(self) -> tuple[int, int]:
        """(chunk, file) that is being written."""
        return divmod(self._file, self.files_per_chunk)

    def add_episode(self, numbers: dict[str, np.ndarray], pictures: dict[str, np.ndarray], task: str) -> None:
        """`numbers`: float32 (T, size) by feature; `pictures`: uint8 (T, height, width, 3) by camera."""
        length = len(next(iter(numbers.values())))
        assert length >= 1 and set(numbers) == set(self.features) and set(pictures) == set(self.cameras)
        if self._pending and sum(len(p["timestamp"]) for p in self._pending) + length > self.frames_per_file:
            self._end_file()
        index, (chunk, file) = len(self.episodes), self._place
        steps, number = np.arange(length), self.tasks.setdefault(task, len(self.tasks))
        rows: dict = {name: np.asarray(values, np.float32).reshape(length, -1) for name, values in numbers.items()}
        own = {
            "timestamp": (steps / self.fps).astype(np.float32), "frame_index": steps, "episode_index": np.full(length, index),
            "index": self.num_frames + steps, "task_index": np.full(length, number),
        }  # fmt: skip
        episode = {
            "episode_index": index, "tasks": [task], "length": length, "data/chunk_index": chunk, "data/file_index": file,
            "dataset_from_index": self.num_frames, "dataset_to_index": self.num_frames + length,
        }  # fmt: skip
        for camera, frames in pictures.items():
            assert frames.dtype == np.uint8 and frames.shape == (length, *self.cameras[camera], 3), (camera, frames.shape)
            if self.encoding.is_video:
                video = self._video(camera)
                episode |= {f"videos/{camera}/chunk_index": chunk, f"videos/{camera}/file_index": file}
                episode[f"videos/{camera}/from_timestamp"] = video.num_frames / self.fps
                video.append(frames)
                episode[f"videos/{camera}/to_timestamp"] = video.num_frames / self.fps
            else:
                rows[camera] = [{"bytes": encode_png(f), "path": f"frame-{t:06d}.png"} for t, f in enumerate(frames)]
            episode |= {f"stats/{camera}/{k}": v for k, v in summarise_pictures(frames).items()}
        for name, values in {**{n: rows[n] for n in self.features}, **own}.items():
            episode |= {f"stats/{name}/{k}": v for k, v in summarise(values).items()}
        self._pending.append(rows | own)
        for name in self.features:
            self._columns[name].append(rows[name])
        self.episodes.append(episode | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
        self.num_frames += length

    def _video(self, camera: str) -> VideoWriter:
        if camera not in self._videos:
            chunk, file = self._place
            path = self.root / VIDEO_PATH.format(video_key=camera, chunk_index=chunk, file_index=file)
            self._videos[camera] = VideoWriter(path, self.fps, *self.cameras[camera], self.encoding)
        return self._videos[camera]

    def _end_file(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for video in self._videos.values():
            video.close()
        self._videos = {}
        chunk, file = self._place
        path = self.root / DATA_PATH.format(chunk_index=chunk, file_index=file)
        path.parent.mkdir(parents=True, exist_ok=True)
        kinds = {"timestamp": pa.float32()} | {n: pa.int64() for n in INDEX_COLUMNS if n != "timestamp"}
        fields = [
            (n, pa.list_(pa.float32(), len(names)) if len(names) > 1 else pa.float32()) for n, names in self.features.items()
        ]
        if not self.encoding.is_video:
            fields += [(c, pa.struct([("bytes", pa.binary()), ("path", pa.string())])) for c in self.cameras]
        schema = pa.schema(fields + list(kinds.items()))
        with pq.ParquetWriter(path, schema) as writer:
            for rows in self._pending:  # one row group for each episode
                columns = [_to_arrow(rows[field.name], field.type) for field in schema]
                writer.write_table(pa.table(columns, schema=schema))
        self._pending = []
        self._file += 1

    def close(self) -> None:
        """Ends the last file and writes meta/."""
        self._end_file()
        meta = self.root / "meta"
        meta.mkdir(parents=True, exist_ok=True)
        _write_tasks(meta / "tasks.parquet", self.tasks)
        _write_episodes(meta / "episodes" / "chunk-000" / "file-000.parquet", self.episodes)
        stats = {name: summarise(np.concatenate(parts)) for name, parts in self._columns.items()}
        stats |= {
            camera: _merge(
                [{k: e[f"stats/{camera}/{k}"] for k in ("min", "max", "mean", "std", "count")} for e in self.episodes]
            )
            for camera in self.cameras
        }
        (meta / "stats.json").write_text(json.dumps(stats, indent=4))
        (meta / "info.json").write_text(json.dumps(self._info(), indent=4))

    def _info(self) -> dict:
        features: dict = {n: {"dtype": "float32", "shape": [len(names)], "names": names} for n, names in self.features.items()}
        for camera, (height, width) in self.cameras.items():
            features[camera] = {
                "dtype": "video" if self.encoding.is_video else "image",
                "shape": [height, width, 3],
                "names": ["height", "width", "channels"],
            }
            if self.encoding.is_video:
                codec = {"libsvtav1": "av1", "libx264": "h264"}[self.encoding.codec]
                features[camera]["info"] = {
                    "video.height": height, "video.width": width, "video.codec": codec, "video.pix_fmt": "yuv420p",
                    "video.is_depth_map": False, "video.fps": self.fps, "video.channels": 3, "has_audio": False,
                }  # fmt: skip
        features |= {
            n: {"dtype": "float32" if n == "timestamp" else "int64", "shape": [1], "names": None} for n in INDEX_COLUMNS
        }
        return {
            "codebase_version": "v3.0", "robot_type": self.robot_type, "total_episodes": len(self.episodes),
            "total_frames": self.num_frames, "total_tasks": len(self.tasks), "chunks_size": 1000, "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200, "fps": self.fps, "splits": {"train": f"0:{len(self.episodes)}"}, "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self.encoding.is_video else None, "features": features,
        }  # fmt: skip


def _to_arrow(values: object, kind):
    import pyarrow as pa

    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(pa.array(np.reshape(values, -1), kind.value_type), kind.list_size)
    return pa.array(values if isinstance(values, list) else np.reshape(values, -1), kind)


def _merge(parts: list[dict]) -> dict:
    """Statistics over all episodes from those of each."""
    count = np.array([p["count"][0] for p in parts], np.float64)
    weight = (count / count.sum()).reshape(-1, 1, 1, 1)
    mean, std = (np.array([p[k] for p in parts]) for k in ("mean", "std"))
    total = (weight * mean).sum(0)
    deviation = np.sqrt((weight * (std**2 + (mean - total) ** 2)).sum(0))
    low, high = np.array([p["min"] for p in parts]).min(0), np.array([p["max"] for p in parts]).max(0)
    return {
        "min": low.tolist(),
        "max": high.tolist(),
        "mean": total.tolist(),
        "std": deviation.tolist(),
        "count": [int(count.sum())],
    }


def _write_tasks(path: Path, tasks: dict[str, int]) -> None:
    """pandas must find the texts as the index of the table: LeRobot reads the file with pandas."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"task_index": pa.array(tasks.values(), pa.int64()), "task": pa.array(tasks.keys(), pa.string())})
    column = lambda name, kind, dtype: {
        "name": name,
        "field_name": name,
        "pandas_type": kind,
        "numpy_type": dtype,
        "metadata": None,
    }  # noqa: E731
    pandas = {
        "index_columns": ["task"], "column_indexes": [{**column(None, "unicode", "object"), "metadata": {"encoding": "UTF-8"}}],
        "columns": [column("task_index", "int64", "int64"), column("task", "unicode", "object")], "pandas_version": "2.3.0",
    }  # fmt: skip
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), path)


def _write_episodes(path: Path, episodes: list[dict]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: pa.array([e[name] for e in episodes]) for name in episodes[0]}), path)

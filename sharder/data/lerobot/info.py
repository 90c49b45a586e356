"""meta/info.json and the tasks: what a dataset says of itself.

Formats: LeRobot's own library, versions 0.3 (v2.0, v2.1) and 0.4 to 0.6 (v3.0). Every message names file and field.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from sharder.config import UserError

SCENE = "scene.json"
"""In `meta` of a dataset that was recorded in a simulator, and among the assets of what was trained on it."""
VERSIONS = ("v2.0", "v2.1", "v3.0")
CAMERA_DTYPES = ("video", "image")
TEXT_DTYPES = ("string", "language")
INDEX_COLUMNS = ("timestamp", "frame_index", "episode_index", "index", "task_index")


@dataclass(frozen=True)
class Feature:
    """One feature of a frame."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    is_depth: bool = False

    @property
    def is_camera(self) -> bool:
        return self.dtype in CAMERA_DTYPES and not self.is_depth

    @property
    def is_number(self) -> bool:
        """Whether the feature is a column of numbers."""
        return self.dtype not in CAMERA_DTYPES + TEXT_DTYPES

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Info:
    """meta/info.json, checked."""

    root: Path
    version: str
    fps: float
    num_episodes: int
    num_frames: int
    features: dict[str, Feature]
    data_path: str
    video_path: str | None
    chunks_size: int
    robot_type: str | None

    @property
    def file(self) -> Path:
        return self.root / "meta" / "info.json"

    @property
    def is_v2(self) -> bool:
        return self.version.startswith("v2.")

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(name for name, feature in self.features.items() if feature.is_camera)

    def numbers(self) -> tuple[str, ...]:
        """Features of numbers that are no index of the frame."""
        return tuple(n for n, f in self.features.items() if f.is_number and n not in INDEX_COLUMNS)


def flat_names(names: object) -> tuple[str, ...] | None:
    """`names` is a list, null, or a dict of lists ({"axes": [...]}, {"motors": [...]})."""
    if isinstance(names, dict):
        names = [n for group in names.values() for n in (group if isinstance(group, list) else [group])]
    return tuple(str(n) for n in names) if isinstance(names, list) else None


def read_json(path: Path) -> dict:
    """Raises UserError where there is no file, or no JSON object in it."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, but must hold an object.")
    return value


def read_json_lines(path: Path) -> list[dict]:
    """Raises UserError naming the line that is no JSON object."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise UserError(f"{path} is missing.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            ok = isinstance(row, dict)
        except json.JSONDecodeError:
            ok = False
        if not ok:
            raise UserError(f"{path}, line {number}, is no JSON object: {line[:60]!r}.")
        rows.append(row)
    return rows


def read_feature(path: Path, name: str, value: object) -> Feature:
    """Raises UserError where dtype or shape is not what a feature has."""
    dtype, shape = (value.get("dtype"), value.get("shape")) if isinstance(value, dict) else (None, None)
    if not isinstance(dtype, str):
        raise UserError(f"{path}, field features.{name}.dtype, is {dtype!r}, but must be the name of a dtype.")
    if not isinstance(shape, list | tuple) or not all(isinstance(n, int) and n >= 1 for n in shape):
        raise UserError(f"{path}, field features.{name}.shape, is {shape!r}, but must be a list of positive integers.")
    if dtype in CAMERA_DTYPES and len(shape) != 3:
        raise UserError(f"{path}, field features.{name}.shape, is {shape!r}, but a camera has 3 dimensions.")
    details = {**(value.get("info") or {}), **(value.get("video_info") or {})}
    is_depth = bool(details.get("is_depth_map") or details.get("video.is_depth_map"))
    return Feature(name, dtype, tuple(shape), flat_names(value.get("names")), is_depth)


def read_info(root: Path) -> Info:
    """Raises UserError naming the field that is missing or wrong."""
    if not root.is_dir():
        raise UserError(f"there is no folder {root}.")
    path = root / "meta" / "info.json"
    tree = read_json(path)
    version = tree.get("codebase_version")
    if version not in VERSIONS:
        raise UserError(f"{path}, field codebase_version, is {version!r}; this reader knows {', '.join(VERSIONS)}.")
    for name, kinds in {
        "fps": (int, float),
        "total_episodes": int,
        "total_frames": int,
        "features": dict,
        "data_path": str,
    }.items():
        if not isinstance(tree.get(name), kinds) or isinstance(tree[name], bool):
            raise UserError(f"{path}, field {name}, is {tree.get(name)!r}, which cannot be.")
    if not tree["fps"] > 0:
        raise UserError(f"{path}, field fps, is {tree['fps']}, but must be above 0.")
    features = {name: read_feature(path, name, value) for name, value in tree["features"].items()}
    if any(f.dtype == "video" for f in features.values()) and not isinstance(tree.get("video_path"), str):
        raise UserError(f"{path}, field video_path, is {tree.get('video_path')!r}, but there are features of dtype video.")
    return Info(
        root=root, version=version, fps=tree["fps"], num_episodes=tree["total_episodes"], num_frames=tree["total_frames"],
        features=features, data_path=tree["data_path"], video_path=tree.get("video_path"),
        chunks_size=int(tree.get("chunks_size") or 1000), robot_type=tree.get("robot_type"),
    )  # fmt: skip


def read_tasks(info: Info) -> dict[int, str]:
    """Task texts by task_index. Raises UserError."""
    if info.is_v2:
        path = info.root / "meta" / "tasks.jsonl"
        rows = [(row.get("task_index"), row.get("task")) for row in read_json_lines(path)]
    else:
        path = info.root / "meta" / "tasks.parquet"
        rows = _tasks_of_parquet(path)
    tasks = {}
    for index, text in rows:
        if not isinstance(index, int) or not isinstance(text, str):
            raise UserError(
                f"{path} has a task with task_index {index!r} and task {text!r}; an integer and a text belong there."
            )
        if index in tasks:
            raise UserError(f"{path}, field task_index: {index} occurs twice.")
        tasks[index] = text
    return tasks


def _tasks_of_parquet(path: Path) -> list[tuple]:
    """The text is the pandas index: stored as `task` by some writers and as `__index_level_0__` by others."""
    import pyarrow as pa

    from sharder.data.lerobot.parquet import read_table

    table = read_table(path, None)
    if "task_index" not in table.column_names:
        raise UserError(f"{path} has no column task_index, only {', '.join(table.column_names)}.")
    texts = [n for n in table.column_names if pa.types.is_string(table[n].type) or pa.types.is_large_string(table[n].type)]
    if not texts:
        raise UserError(f"{path} has no column of text, only {', '.join(table.column_names)}.")
    column = next((n for n in ("task", "__index_level_0__") if n in texts), texts[0])
    return list(zip(table["task_index"].to_pylist(), table[column].to_pylist()))

"""A broken dataset ends with one message that names file and field."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import copy
from small import sharder

from sharder.config import UserError
from sharder.data.lerobot.source import open_lerobot


def edit_info(root: Path, **changes) -> None:
    file = root / "meta" / "info.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_column(path: Path, name: str, change) -> None:
    table = pq.read_table(path)
    values = change(table[name].to_pylist())
    at = table.column_names.index(name)
    pq.write_table(table.set_column(at, name, [pa.array(values, None if name == "action" else table[name].type)]), path)


def edit_lines(path: Path, number: int, **changes) -> None:
    lines = path.read_text().splitlines()
    lines[number] = json.dumps({**json.loads(lines[number]), **changes})
    path.write_text("\n".join(lines))


def truncate(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def reshape_state(root: Path) -> None:
    features = json.loads((root / "meta" / "info.json").read_text())["features"]
    features["observation.state"]["shape"] = [7]
    edit_info(root, features=features)


def set_empty(values: list) -> list:
    return [0, *values[1:]]


DATA3, VIDEO3 = "data/chunk-000/file-000.parquet", "videos/observation.images.corner2/chunk-000/file-000.mp4"
EPISODES3, VIDEO2 = "meta/episodes/chunk-000/file-000.parquet", "videos/chunk-000/observation.images.corner2/episode_000004.mp4"
BREAKS = {
    "no info.json": ("v3_video", lambda r: (r / "meta/info.json").unlink(), "meta/info.json is missing"),
    "unknown version": ("v3_video", lambda r: edit_info(r, codebase_version="v9.1"), "meta/info.json, field codebase_version, is 'v9.1'"),
    "no fps": ("v3_video", lambda r: edit_info(r, fps=None), "meta/info.json, field fps"),
    "no data file": ("v3_video", lambda r: (r / DATA3).unlink(), f"{DATA3} is missing"),
    "no video": ("v21_video", lambda r: (r / VIDEO2).unlink(), f"{VIDEO2} is missing"),
    "no tasks": ("v21_video", lambda r: (r / "meta/tasks.jsonl").unlink(), "meta/tasks.jsonl is missing"),
    "episode count": ("v3_video", lambda r: edit_info(r, total_episodes=13), "field total_episodes, is 13, but"),
    "frame count": ("v21_video", lambda r: edit_info(r, total_frames=500), "field total_frames, is 500, but"),
    "truncated video": ("v3_video", lambda r: truncate(r / VIDEO3, 0.6), f"{VIDEO3}"),
    "video that is too short": ("v21_video", lambda r: (r / VIDEO2).write_bytes((r / VIDEO2.replace("04.", "03.")).read_bytes()), f"{VIDEO2} has 22 frames"),
    "truncated data": ("v3_video", lambda r: truncate(r / DATA3, 0.5), f"{DATA3} cannot be read as parquet"),
    "feature shape": ("v3_video", reshape_state, "column observation.state: row 0 holds 4 values, but meta/info.json, field features.observation.state.shape, is [7]"),
    "ragged action": ("v3_converted", lambda r: edit_column(r / DATA3, "action", lambda v: v[:3] + [v[3][:2]] + v[4:]), "column action: row 3 holds 2 values"),
    "empty episode": ("v21_video", lambda r: edit_lines(r / "meta/episodes.jsonl", 5, length=0), "meta/episodes.jsonl, field length: episode 5 is empty"),
    "length against range": ("v3_video", lambda r: edit_column(r / EPISODES3, "length", set_empty), f"{EPISODES3}, field length: episode 0"),
    "rows of another episode": ("v3_video", lambda r: edit_column(r / DATA3, "episode_index", lambda v: [40 if e == 4 else e for e in v]), f"{DATA3}, column episode_index: episode 4"),
    "frame numbers": ("v3_video", lambda r: edit_column(r / DATA3, "frame_index", lambda v: [v[0], 7, *v[2:]]), f"{DATA3}, column frame_index: frame 1 of episode 0"),
    "no such task": ("v3_video", lambda r: edit_column(r / DATA3, "task_index", lambda v: [9, *v[1:]]), f"{DATA3}, column task_index, holds 9"),
    "broken JSON": ("v21_video", lambda r: truncate(r / "meta/info.json", 0.5), "meta/info.json cannot be read as JSON"),
    "video that is no video": ("v21_video", lambda r: (r / VIDEO2).write_bytes(b"no video" * 50), f"{VIDEO2} cannot be read as video"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BREAKS)
def test_one_message_names_file_and_field(kind, tmp_path):
    name, damage, message = BREAKS[kind]
    root = copy(name, tmp_path)
    assert open_lerobot(root).num_frames
    damage(root)
    with pytest.raises(UserError) as raised:
        open_lerobot(root)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_the_command_ends_with_2_and_no_traceback(tmp_path):
    root = copy("v3_video", tmp_path)
    truncate(root / VIDEO3, 0.6)
    done = sharder("data", "inspect", root, "--json")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and VIDEO3 in done.stderr


def test_a_damaged_picture_is_named(tmp_path):
    import numpy as np

    from sharder.data.lerobot.inspect import read_pictures

    root, camera = copy("v3_two_cams_image", tmp_path), "observation.images.gripper"
    edit_column(root / DATA3, camera, lambda v: [v[0], {**v[1], "bytes": v[1]["bytes"][:200]}, *v[2:]])
    with pytest.raises(UserError, match=rf"column {camera}, row 1, is no image"):
        read_pictures(open_lerobot(root), camera, np.array([1]))

import json

import numpy as np
import pytest
from datasets import FOLDER, NAMES, make
from small import sharder

from sharder.data.lerobot.inspect import describe
from sharder.data.lerobot.lints import lint
from sharder.data.lerobot.source import open_lerobot
from sharder.data.lerobot.write import DatasetWriter, Encoding


@pytest.mark.parametrize("name", NAMES)
def test_the_description_is_what_lerobot_finds(name):
    want = json.loads((FOLDER / f"{name}.expected.json").read_text())
    found = describe(open_lerobot(FOLDER / name), tuple(f["index"] for f in want["frames"]))
    assert (found["num_episodes"], found["num_frames"], found["fps"]) == (
        want["total_episodes"],
        want["total_frames"],
        want["fps"],
    )
    assert found["features"] == want["features"] and found["tasks"] == want["tasks"] and found["cameras"] == want["camera_keys"]
    for mine, theirs in zip(found["frames"], want["frames"], strict=True):
        assert mine["is_pad"] == theirs["action_is_pad"]
        assert {k: mine[k] for k in ("state", "action", "action_chunk", "timestamp", "task")} == {
            k: theirs[k] for k in ("state", "action", "action_chunk", "timestamp", "task")
        }
        for camera, picture in mine["cameras"].items():
            theirs_picture = theirs["images"][camera]
            assert abs(picture["mean"] - theirs_picture["mean"]) < 0.5
            assert np.abs(np.array(picture["grid4x4"]) - theirs_picture["grid4x4"]).max() < 2


def test_the_command_prints_json_and_nothing_else():
    done = sharder("data", "inspect", FOLDER / "v3_two_cams_image", "--frames", "0,131", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and [f["index"] for f in found["frames"]] == [0, 131]


def test_the_command_writes_a_contact_sheet(tmp_path):
    from PIL import Image

    done = sharder("data", "inspect", FOLDER / "v3_two_cams_image", "--sheet", tmp_path / "sheet.png")
    assert done.returncode == 0 and "Push the red puck" in done.stdout
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.format == "PNG" and sheet.width > 6 * 96 and sheet.height > 2 * 4 * 96


def planted(tmp_path, change) -> set[tuple[str, str]]:
    """Kinds of findings, with the feature, in a dataset of random numbers that `change` was applied to."""
    rng = np.random.default_rng(0)
    writer = DatasetWriter(
        tmp_path / "d", 10, {"observation.state": ["x", "y"], "action": ["x", "y"]}, {}, encoding=Encoding("png")
    )
    for e in range(4):
        numbers = {n: rng.standard_normal((50, 2)).astype(np.float32) for n in writer.features}
        change(e, numbers)
        writer.add_episode(numbers, {}, "t")
    writer.close()
    source = open_lerobot(tmp_path / "d")
    return {(found.kind, found.feature) for found in lint(source, "observation.state", "action")}


def test_ordinary_numbers_have_no_findings(tmp_path):
    assert planted(tmp_path, lambda e, numbers: None) == set()


def test_a_dimension_that_hardly_moves_is_found(tmp_path):
    def still(e, numbers):
        numbers["action"][:, 1] = 0.5

    assert planted(tmp_path, still) == {("near-constant", "action")}


def test_a_tiny_quantile_range_is_found(tmp_path):
    def spikes(e, numbers):
        numbers["observation.state"][:, 0] *= 1e-5
        if e == 0:
            numbers["observation.state"][7, 0] = 1.0

    assert ("exploding-quantiles", "observation.state") in planted(tmp_path, spikes)


def test_actions_that_are_changes_already_are_found(tmp_path):
    def walk(e, numbers):
        numbers["observation.state"][1:] = np.cumsum(numbers["action"][:-1], 0)
        numbers["observation.state"][0] = 0

    assert ("delta-actions", "action") in planted(tmp_path, walk)


def test_absolute_actions_are_not_taken_for_changes(tmp_path):
    def follow(e, numbers):
        path = np.cumsum(np.random.default_rng(e).standard_normal((51, 2)), 0)
        numbers["observation.state"][:], numbers["action"][:] = path[:-1], path[1:]

    assert planted(tmp_path, follow) == set()


def test_a_repeated_episode_is_found(tmp_path):
    def repeat(e, numbers, first={}):
        for name in numbers if e in (0, 2) else ():
            numbers[name][:] = first.setdefault(name, numbers[name].copy())

    assert planted(tmp_path, repeat) == {("duplicated-episodes", "episode_index")}


def test_timestamps_with_a_gap_are_found(tmp_path):
    import pyarrow.parquet as pq

    make(tmp_path / "d")
    path = open_lerobot(tmp_path / "d").episodes.data.paths[0]
    table = pq.read_table(path)
    times = np.array(table["timestamp"])
    times[5:9] += 1.0
    pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", [times]), path)
    assert "timestamp-gaps" in {found.kind for found in lint(open_lerobot(tmp_path / "d"), None, None)}


def test_statistics_of_other_data_are_found(tmp_path):
    make(tmp_path / "d")
    file = tmp_path / "d" / "meta" / "stats.json"
    stats = json.loads(file.read_text())
    stats["action"]["max"] = [0.0, 9.0]
    file.write_text(json.dumps(stats))
    found = [f for f in lint(open_lerobot(tmp_path / "d"), None, "action") if f.kind == "out-of-range"]
    assert len(found) == 1 and "dimension 0 (a)" in found[0].message

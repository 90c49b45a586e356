"""What the writer wrote beside the frames: statistics, tasks and the table of episodes, as LeRobot's own files have them."""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import FOLDER, make

from sharder.config import UserError
from sharder.data.lerobot.write import DatasetWriter, Encoding


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made") / "d"
    return root, *make(root, encoding=Encoding("libx264"), cameras={"observation.images.corner2": (32, 32)})


def test_info_has_the_fields_of_lerobot_s(made):
    ours, theirs = (json.loads((root / "meta" / "info.json").read_text()) for root in (made[0], FOLDER / "v3_video"))
    assert set(ours) == set(theirs)
    camera = "observation.images.corner2"
    assert set(ours["features"][camera]["info"]) == set(theirs["features"][camera]["info"])
    assert set(theirs["features"]) - set(ours["features"]) == {"next.reward", "next.success"}


def test_tables_have_the_columns_and_types_of_lerobot_s(made):
    for file in ("data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"):
        ours, theirs = (pq.read_schema(root / file) for root in (made[0], FOLDER / "v3_video"))
        assert {n for n in theirs.names if "next." not in n} == set(ours.names), file
        # The two have states of different sizes; statistics of one number a dimension are lists either way.
        differ = [n for n in ours.names if str(ours.field(n).type).split("[")[0] != str(theirs.field(n).type).split("[")[0]]
        assert [n for n in differ if not n.startswith("stats/")] == [], file


def test_pandas_finds_the_tasks_as_the_index(made):
    schema = pq.read_schema(made[0] / "meta" / "tasks.parquet")
    assert json.loads(schema.metadata[b"pandas"])["index_columns"] == ["task"]
    assert pq.read_table(made[0] / "meta" / "tasks.parquet").to_pydict() == {
        "task_index": [0, 1],
        "task": ["do task 0", "do task 1"],
    }


def test_statistics_are_those_of_the_numbers(made):
    root, numbers, pictures = made
    stats = json.loads((root / "meta" / "stats.json").read_text())
    x = numbers["action"].astype(np.float64)
    assert np.allclose(stats["action"]["mean"], x.mean(0)) and np.allclose(stats["action"]["q99"], np.quantile(x, 0.99, axis=0))
    camera = stats["observation.images.corner2"]
    assert np.shape(camera["mean"]) == (3, 1, 1)
    pixels = pictures["observation.images.corner2"].reshape(-1, 3) / 255
    assert np.allclose(np.ravel(camera["mean"]), pixels.mean(0), atol=0.01) and np.allclose(
        np.ravel(camera["std"]), pixels.std(0), atol=0.01
    )


def test_a_folder_that_exists_is_left_alone(made):
    with pytest.raises(UserError, match="exists already"):
        DatasetWriter(made[0], 10, {"action": ["x"]}, {})


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="the encoder does it only when run by root")
def test_the_encoder_leaves_no_real_time_threads(tmp_path):
    code = f"""
import os, pathlib
import numpy as np
from sharder.data.lerobot.write import Encoding, VideoWriter
video = VideoWriter(pathlib.Path({str(tmp_path / "a.mp4")!r}), 30, 64, 64, Encoding("libsvtav1"))
video.append(np.zeros((40, 64, 64, 3), np.uint8))
policies = []
for thread in os.listdir("/proc/self/task"):
    policies.append(os.sched_getscheduler(int(thread)))
print(set(policies))
video.close()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "{0}", result.stdout + result.stderr

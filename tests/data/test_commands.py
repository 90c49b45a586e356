import json

import numpy as np
import pytest
from datasets import FOLDER

from sharder.config import UserError
from sharder.data.commands import data
from sharder.data.compare_stats import compare_stats
from sharder.data.normalize import NormStats, read_norm_stats

V3 = str(FOLDER / "v3_video")


def test_statistics_are_written_as_openpi_reads_them(tmp_path, capsys):
    assert data(["stats", V3, "--horizon", "1", "--out", str(tmp_path / "assets"), "--json"]) == 0
    printed, stats = json.loads(capsys.readouterr().out), read_norm_stats(tmp_path / "assets")
    want = json.loads((FOLDER / "v3_video.expected.json").read_text())["stats"]
    for name, theirs in (("state", "observation.state"), ("actions", "action")):
        # LeRobot adds up in float32 and over episodes.
        assert np.allclose(stats[name].mean, want[theirs]["mean"], atol=1e-6) and np.allclose(
            stats[name].std, want[theirs]["std"], atol=1e-6
        )
        assert printed["norm_stats"][name]["q01"] == stats[name].q01.tolist()


def test_options_of_the_robot_decide_the_statistics(capsys):
    data(["stats", V3, "--horizon", "4", "--robot.relative", "3", "-1", "--robot.episodes", "0:2", "--json"])
    found = json.loads(capsys.readouterr().out)["norm_stats"]["actions"]["mean"]
    raw = np.load(FOLDER / "v3_video.expected.npz")
    state, action = raw["all_state"][:60].astype(np.float64), raw["all_action"][:60]
    ends = np.array([25] * 26 + [59] * 34)
    chunks = action[np.minimum(np.arange(60)[:, None] + np.arange(4), ends[:, None])].astype(np.float64)
    chunks[..., :3] -= state[:, None, :3]
    assert np.allclose(found, chunks.mean((0, 1)), atol=1e-7)


def test_statistics_need_no_video(tmp_path, capsys):
    from datasets import copy

    root = copy("v3_video", tmp_path)
    for video in root.glob("videos/**/*.mp4"):
        video.write_bytes(b"")
    assert data(["stats", str(root), "--json"]) == 0


def test_a_dataset_like_the_checkpoint_s_has_no_findings():
    ours = {"state": NormStats(np.zeros(3), np.ones(3)), "actions": NormStats(np.zeros(3), np.ones(3))}
    theirs = {"state": NormStats(np.full(3, 0.5), np.full(3, 1.5)), "actions": ours["actions"]}
    assert compare_stats(ours, theirs) == []


def test_dimensions_that_are_far_away_or_of_another_width_are_named():
    ours = {
        "state": NormStats(np.array([0.0, 5.0, 0.0]), np.array([1.0, 1.0, 9.0])),
        "actions": NormStats(np.zeros(1), np.ones(1)),
    }
    theirs = {"state": NormStats(np.zeros(32), np.ones(32))}
    found = compare_stats(ours, theirs)
    assert [f.split(":")[0] for f in found] == ["actions", "state", "state, dimension 1", "state, dimension 2"]


@pytest.mark.parametrize("arguments, message", [([], "needs one of inspect, stats"), (["inspcet"], "needs one of"), (["inspect", V3, "--frames", "x"], "numbers with commas"), (["inspect", V3, "--frames", "417", "--json"], "frames 0 to 416"), (["stats", V3, "--horizon", "0"], "at least 1")])  # fmt: skip
def test_wrong_arguments_are_one_message(arguments, message):
    with pytest.raises(UserError, match=message):
        data(arguments)

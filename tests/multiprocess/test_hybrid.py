"""Hybrid sharding: state divided inside a host, copied across hosts; two real processes stand for the hosts."""

import json
import re

import pytest
from small import RECIPE, sharder

from sharder.events import read_json_lines

pytestmark = pytest.mark.slow
HYBRID = ("--parallel.policy", "fsdp", "--parallel.data", "2", "--parallel.fsdp", "2")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("hybrid") / "run"
    result = sharder(
        "launch", "--processes", "2", "--devices-per-process", "2", "--", "train", RECIPE, "--run-dir", run_dir, *HYBRID
    )
    assert result.returncode == 0, result.stderr
    return run_dir


def test_two_hosts_train_as_one_process(hybrid, tmp_path):
    assert sharder("train", RECIPE, "--run-dir", tmp_path / "one", "--cluster.cpu-devices", "4", *HYBRID).returncode == 0
    ours, theirs = (read_json_lines(d / "metrics.jsonl")[0] for d in (hybrid, tmp_path / "one"))
    assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs], rel=1e-5)


def test_each_host_holds_the_whole_state_between_its_devices(hybrid):
    """Half on each of its two devices; three quarters more would be needed to divide over all four."""
    plan = json.loads((hybrid / "plan.json").read_text())
    for part in ("params", "opt_state"):
        assert plan["bytes_per_device"][part] == pytest.approx(plan["bytes_total"][part] / 2, rel=1e-3)
    assert plan["mesh"] == {"data": 2, "fsdp": 2, "tensor": 1}


def test_a_checkpoint_is_written_by_both_and_read_by_one(hybrid):
    result = sharder("eval", hybrid, "--cluster.cpu-devices", "4")
    assert result.returncode == 0 and re.search(r"validation loss \d", result.stdout), result.stderr

"""Robot data in exact mode: the same bits in one and in two processes, and after a kill in the middle of an epoch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from datasets import FOLDER
from rlds import make_rlds
from small import ROBOT_RECIPE, environment, sharder

from sharder.report.verify import compare

V21 = FOLDER / "v21_video"


def command(path, run_dir, *options) -> list[str]:
    train = [
        "train",
        ROBOT_RECIPE,
        "--run-dir",
        run_dir,
        "--data.path",
        path,
        "--data.workers",
        "1",
        "--parallel.reduction",
        "exact",
    ]
    return [str(a) for a in (*train, *options)]


def run(path, run_dir, *options, processes: int = 1) -> Path:
    train = command(path, run_dir, *options)
    launch = ["launch", "--processes", processes, "--devices-per-process", 1, "--"] if processes > 1 else []
    result = sharder(*launch, *train, *([] if launch else ["--cluster.cpu-devices", 1]), timeout=900)
    assert result.returncode == 0, result.stderr + result.stdout
    return run_dir


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return run(V21, tmp_path_factory.mktemp("single") / "run")


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one(tmp_path, single):
    result = compare(run(V21, tmp_path / "run", processes=2), single)
    assert result.identical and result.num_compared == 9


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path, single):
    run_dir = tmp_path / "run"
    arguments = [sys.executable, "-m", "sharder", *command(V21, run_dir, "--cluster.cpu-devices", 1)]
    started = subprocess.Popen(arguments, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 600
    while not (run_dir / "checkpoints" / "5").exists() and started.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert (run_dir / "checkpoints" / "5").exists() or started.returncode == 0
    result = compare(run(V21, run_dir), single)
    assert result.identical and result.num_compared == 9


@pytest.mark.slow
def test_rlds_resumes_exactly_across_the_end_of_an_epoch(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", os.environ["HOME"])
    make_rlds(tmp_path / "demo")
    whole = run(tmp_path / "demo", tmp_path / "whole")
    halves = run(tmp_path / "demo", tmp_path / "halves", "--train.steps", 1)
    for stop in (2, 4, 9):  # an epoch has 2 steps
        run(tmp_path / "demo", halves, "--train.steps", stop)
    result = compare(halves, whole)
    assert result.identical and result.num_compared == 9

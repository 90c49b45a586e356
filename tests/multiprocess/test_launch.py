"""Real processes with real collectives (gloo)."""

import os
import signal
import subprocess
import sys
import time

import pytest
from small import RECIPE, environment, sharder

from sharder.events import read_json_lines

TWO_BY_TWO = ("launch", "--processes", "2", "--devices-per-process", "2", "--", "train", RECIPE, "--parallel.policy", "fsdp")


def metrics(run_dir):
    return read_json_lines(run_dir / "metrics.jsonl")[0]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("single") / "run"
    options = ("--cluster.cpu-devices", "4", "--parallel.policy", "fsdp")
    assert sharder("train", RECIPE, "--run-dir", run_dir, *options).returncode == 0
    return run_dir


def test_two_processes_train_as_one(tmp_path, single):
    result = sharder(*TWO_BY_TWO, "--run-dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    ours, theirs = metrics(tmp_path / "run"), metrics(single)
    assert [r["step"] for r in ours] == [r["step"] for r in theirs]
    for a, b in zip(ours, theirs):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    # Process 0 alone prints and writes: every step once, and standard output without the collectives' chatter.
    assert result.stdout.count("finished: step 12") == 1 and "Gloo" not in result.stdout


@pytest.mark.slow
def test_two_processes_resume_a_run_of_one(tmp_path, single):
    options = ("--cluster.cpu-devices", "4", "--parallel.policy", "fsdp", "--train.steps", "6")
    assert sharder("train", RECIPE, "--run-dir", tmp_path / "run", *options).returncode == 0
    assert sharder(*TWO_BY_TWO, "--run-dir", tmp_path / "run", "--resume", "must").returncode == 0
    records = metrics(tmp_path / "run")
    assert [(r["step"], r["attempt"]) for r in records] == [(s, 1 if s <= 6 else 2) for s in range(1, 13)]
    assert [r["loss"] for r in records] == pytest.approx([r["loss"] for r in metrics(single)], rel=1e-5)


def events(run_dir, kind):
    return [e for e in read_json_lines(run_dir / "events.jsonl")[0] if e["kind"] == kind]


def spawned(run_dir):
    return events(run_dir, "spawn")[-1]["pids"]


ONCE = ("launch", "--max-restarts", "0", *TWO_BY_TWO[1:])


def test_all_end_when_one_is_killed(tmp_path):
    command = [sys.executable, "-m", "sharder", *ONCE, "--run-dir", str(tmp_path / "run"), "--train.steps", "100000"]
    launcher = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while len(metrics(tmp_path / "run")) < 5 and launcher.poll() is None:
        time.sleep(0.1)
    workers = spawned(tmp_path / "run")
    os.kill(workers[1], signal.SIGKILL)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 1 and "ended by SIGKILL" in errors
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_signal_to_the_launcher_saves_in_all(tmp_path):
    command = [sys.executable, "-m", "sharder", *TWO_BY_TWO, "--run-dir", str(tmp_path / "run"), "--train.steps", "100000"]
    launcher = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while len(metrics(tmp_path / "run")) < 5 and launcher.poll() is None:
        time.sleep(0.1)
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, output
    done = metrics(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / str(done) / "manifest.json").exists()


def test_a_users_mistake_ends_all_with_its_message(tmp_path):
    result = sharder(*TWO_BY_TWO, "--run-dir", tmp_path / "run", "--train.global-batch-size", "15")
    assert result.returncode == 2 and "use 12 or 16" in result.stderr


def test_a_second_supervisor_is_refused_while_the_first_lives_and_takes_over_when_it_is_dead(tmp_path):
    """SIGKILL to the supervisor leaves no process; the same command goes on, with nothing lost."""
    command = [sys.executable, "-m", "sharder", *TWO_BY_TWO, "--run-dir", str(tmp_path / "run"), "--train.steps", "100000"]
    first = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(metrics(tmp_path / "run")) < 12 and first.poll() is None:
        time.sleep(0.1)
    refused = sharder(*TWO_BY_TWO, "--run-dir", tmp_path / "run")
    assert refused.returncode == 2 and f"is supervised by process {first.pid}" in refused.stderr
    workers = spawned(tmp_path / "run")
    first.kill()
    first.wait()
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)
    done = metrics(tmp_path / "run")[-1]["step"]
    again = sharder(*TWO_BY_TWO, "--run-dir", tmp_path / "run", "--train.steps", done + 1)
    assert again.returncode == 0, again.stderr
    assert metrics(tmp_path / "run")[-1]["step"] == done + 1

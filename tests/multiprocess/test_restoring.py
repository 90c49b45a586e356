"""Restores of real processes: from the memory of a host, and around a checkpoint that one process cannot read."""

import os
import signal
import subprocess
import sys
import time

import pytest
from small import RECIPE, environment, needs_tested_jax, sharder

from sharder import checkpoint
from sharder.events import read_json_lines
from sharder.facts import read_facts
from sharder.report.verify import compare
from sharder.train.snapshot import MEMORY

EXACT = ("train", RECIPE, "--parallel.reduction", "exact", "--parallel.policy", "fsdp", "--checkpoint.every", "5")


def launch(processes, run_dir, *options):
    """One attempt: the tests start the next one."""
    return (
        "launch",
        "--max-restarts",
        0,
        "--processes",
        processes,
        "--devices-per-process",
        2 // processes,
        "--",
        *EXACT,
        "--run-dir",
        run_dir,
        *options,
    )


def events(run_dir, kind):
    return [e for e in read_json_lines(run_dir / "events.jsonl")[0] if e["kind"] == kind]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert sharder(*launch(1, run_dir, "--train.steps", 40)).returncode == 0
    return run_dir


@needs_tested_jax
def test_one_process_goes_on_from_the_memory_of_two_that_were_killed(tmp_path, whole):
    """Each wrote its half; the same command with another number of processes puts them together, in the same bits."""
    run_dir = tmp_path / "run"
    options = ("--checkpoint.every", "0", "--checkpoint.snapshot-every", "1", "--train.steps", "40")
    command = [sys.executable, "-m", "sharder", *map(str, launch(2, run_dir, *options))]
    launcher = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while len(read_json_lines(run_dir / "metrics.jsonl")[0]) < 6 and launcher.poll() is None:
        time.sleep(0.05)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher.pid)], capture_output=True, text=True).stdout.split()
    for pid in children:
        os.kill(int(pid), signal.SIGKILL)
    launcher.wait(timeout=120)
    logged = read_json_lines(run_dir / "metrics.jsonl")[0][-1]["step"]
    result = sharder(*launch(1, run_dir, *options))
    assert result.returncode == 0, result.stderr
    (restored,) = events(run_dir, "restored")
    assert restored["source"] == "snapshot" and logged - 1 <= restored["step"] <= logged + 1
    assert compare(run_dir, whole).identical
    assert not (MEMORY / f"sharder-{os.getuid()}" / read_facts(run_dir)["run_id"]).exists()


@pytest.mark.slow
@needs_tested_jax
def test_all_processes_leave_a_checkpoint_that_one_of_them_cannot_read(tmp_path, whole):
    run_dir = tmp_path / "run"
    assert sharder(*launch(2, run_dir, "--train.steps", 10)).returncode == 0
    # What process 1 wrote, which of two processes only it reads.
    files = [p for p in (checkpoint.entry(run_dir, 10) / "params" / "ocdbt.process_1" / "d").iterdir() if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    largest.write_bytes(content)
    result = sharder(*launch(2, run_dir, "--train.steps", 12))
    assert result.returncode == 0, result.stderr
    (aside,) = events(run_dir, "set_aside")
    assert (aside["step"], aside["name"]) == (10, "10.damaged") and events(run_dir, "restored")[-1]["step"] == 5
    assert compare(run_dir, whole).identical

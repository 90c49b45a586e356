"""bench/gpu.py: its figures, what it does without time, and the whole of it on CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small import environment

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return __import__("gpu")


def test_the_best_is_the_full_step_with_the_highest_mfu(gpu):
    points = {
        "facts": {"platform": "gpu"}, "step batch 4, xla": {"mfu": 0.3, "batch": 4}, "step batch 8, xla": {"mfu": 0.4, "batch": 8},
        "step batch 16, xla": {"failed": "RESOURCE_EXHAUSTED"}, "gradients only": {"mfu": 0.5},
        "exact V 1": {"step_time_s": 1.1}, "fast with 1 slots": {"step_time_s": 1.0}, "exact V 4": {"left_out": "no time left"},
    }  # fmt: skip
    found = gpu.summarise(points)
    assert (
        found["best"]["batch"] == 8
        and found["mfu_without_optimizer"] == 0.5
        and found["exact_over_fast"] == {"1": pytest.approx(1.1)}
    )


def test_without_time_points_are_left_out_and_named(gpu):
    session = gpu.Session(budget_s=0)
    gpu.measure_all(session, "pi0_tiny", 2, (4,))
    assert len(session.points) > 10 and all(p == {"left_out": "no time left"} for p in session.points.values())


def test_a_point_that_does_not_fit_says_so_in_a_line(gpu):
    stderr = (
        "Traceback ...\njaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12345 bytes.\nmore"
    )
    assert "Out of memory" in gpu.reason(stderr)


@pytest.mark.slow
def test_it_runs_unchanged_on_cpu(tmp_path):
    recipe = f"{Path(__file__).parent / 'small.py'}:small_robot"
    command = [
        sys.executable,
        str(BENCH / "gpu.py"),
        "--recipe",
        recipe,
        "--batch",
        "4",
        "--batches",
        "8",
        "--out",
        str(tmp_path / "gpu.json"),
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["points"]["facts"]["platform"] == "cpu" and found["summary"]["best"]["mfu_exact"] > 0
    assert sum(found["points"]["attribution"]["shares"].values()) == pytest.approx(1)
    failed = {name for name, p in found["points"].items() if "failed" in p}
    assert failed <= {"cudnn, head dimension 128"}, found["points"]

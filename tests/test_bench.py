"""The benchmarks' machinery, on a small model and few steps: every line is a figure. Their values are not looked at."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small import environment

BENCH = Path(__file__).parent.parent / "bench"

STEP = {
    "step_s", "tokens_per_s", "fingerprint_alone_s", "fingerprint_share", "step_without_fingerprint_s", "fingerprint_growth",
    "first_step_cold_s", "first_step_warm_s", "peak_memory_cold", "peak_memory_warm",
}  # fmt: skip
TORCH = {"torch_step_s", "torch_tokens_per_s", "ratio_to_torch", "loss_apart"}
LOADER = {"step_s", "step_slow_loader_s", "growth", "data_wait_s", "data_wait_slow_loader_s", "growth_without_overlap"}
CHECKPOINT = {
    "state_bytes", "step_s", "memcpy_s", "save_stall_s", "save_stall_share", "step_beside_a_save_s", "snapshot_stall_s",
    "snapshot_stall_share", "snapshot_every", "save_s_per_gb", "restore_s_per_gb", "verify_s_per_gb", "verify_numpy_s_per_gb",
}  # fmt: skip
KEYS = {
    "bench", "figure", "value", "unit", "how", "model", "python", "jax", "torch", "cpu_count", "load_before", "data_sha256",
}  # fmt: skip


def quick(name: str, *arguments: str) -> dict[str, dict]:
    """The lines of a benchmark by figure; all are JSON and say what they depend on."""
    command = [sys.executable, str(BENCH / f"{name}.py"), "--quick", *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(set(line) == KEYS and line["bench"] == name for line in lines)
    assert len({line["figure"] for line in lines}) == len(lines)
    return {line["figure"]: line for line in lines}


@pytest.mark.slow
def test_loader_prints_its_figures():
    lines = quick("loader")
    assert set(lines) == LOADER
    assert all(math.isfinite(line["value"]) for line in lines.values())


@pytest.mark.slow
def test_checkpoint_prints_its_figures():
    lines = quick("checkpoint")
    assert set(lines) == CHECKPOINT
    assert all(line["value"] > 0 for line in lines.values())


@pytest.mark.slow
def test_sharding_prints_its_figures():
    lines = quick("sharding")
    expected = {f"{figure}_{policy}_tensor_1" for figure in ("step_s", "scratch_bytes") for policy in ("dp", "zero", "fsdp")}
    assert set(lines) == expected | {"compile_s_2_layers", "compile_s_4_layers"}
    assert all(line["value"] > 0 for line in lines.values())


@pytest.mark.slow
def test_step_prints_its_figures_with_and_without_torch():
    lines = quick("step")
    if importlib.util.find_spec("torch"):
        expected = STEP | TORCH
    else:
        assert lines.pop("torch")["value"] is None
        expected = STEP
    assert set(lines) == expected
    assert all(math.isfinite(line["value"]) for line in lines.values())


@pytest.mark.slow
def test_what_pytorch_needs_is_exported(tmp_path):
    code = "import sys; from lines import *; export_steps(Pieces(resolve((*OPTIONS, *QUICK))), sys.argv[1], 2)"
    command = [sys.executable, "-c", code, str(tmp_path / "steps.npz")]
    done = subprocess.run(command, cwd=BENCH, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    arrays = np.load(tmp_path / "steps.npz")
    assert arrays["inputs"].shape[0] == arrays["rates"].shape[0] == 2
    width = arrays["params/embed/tokens"].shape[1]
    assert arrays["params/blocks/0qkv"].shape == (3 * width, width) and arrays["params/blocks/1qkv_bias"].shape == (3 * width,)


@pytest.fixture
def bench(monkeypatch):
    """The benchmarks' modules, importable as they are when started as scripts."""
    monkeypatch.syspath_prepend(str(BENCH))
    return lambda name: __import__(name)


def test_a_part_that_fails_shows_why(bench):
    with pytest.raises(RuntimeError, match="KeyError: 'no such part'"):
        bench("lines").run_part(str(BENCH / "loader.py"), "no such part")


def test_peak_memory_is_that_of_the_process():
    # In a process of its own: a child's peak begins with what its parent held, and pytest holds much.
    code = "from lines import run; import sys; print(run([sys.executable, '-c', 'x = b\"1\" * 600_000_000']).peak_bytes)"
    peak = int(subprocess.run([sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True).stdout)
    assert 600_000_000 < peak < 640_000_000  # less than 600 MB if KiB were taken for kB


def test_a_slow_dataset_takes_its_time_and_reads_the_same(bench):
    import time

    import numpy as np

    from sharder.data.synthetic import SyntheticTokens

    dataset, ids = SyntheticTokens(10, 4, 8), np.arange(3)
    started = time.perf_counter()
    batch = bench("loader").Slow(dataset, 0.2).read(ids)
    assert 0.2 <= time.perf_counter() - started
    assert (batch["inputs"] == dataset.read(ids)["inputs"]).all()


@pytest.mark.slow
def test_exact_prints_its_figures():
    lines = quick("exact", "--devices", "2", "--rounds", "2")
    names = (
        "step_time_fast",
        "step_time_exact",
        "ratio",
        "ratio_low",
        "ratio_high",
        "scratch_ratio",
        "exposed_reduction",
        "moved_ratio",
    )
    assert set(lines) == {f"tiny_lm_{name}_2" for name in names}
    assert all(math.isfinite(line["value"]) for line in lines.values())


DATA = {
    "random_examples_per_s", "sequential_examples_per_s", "cached_examples_per_s", "memory_growth", "statistics_absolute_s",
    "statistics_absolute_frames_per_s", "statistics_relative_s", "statistics_relative_frames_per_s",
}  # fmt: skip


@pytest.mark.slow
def test_data_prints_its_figures():
    command = [sys.executable, str(BENCH / "data.py"), "--quick", "--no-training"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["figure"] for line in lines} == DATA and all(math.isfinite(line["value"]) for line in lines)

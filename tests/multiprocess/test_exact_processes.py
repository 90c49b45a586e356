"""Exact mode over real processes: fingerprints of every step, and the parameters at the end."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from small import __file__ as SMALL
from small import needs_tested_jax, sharder
from small_pi0 import __file__ as SMALL_PI0

from sharder.checkpoint.restore import restore_numpy
from sharder.data.order import Order
from sharder.events import read_json_lines
from sharder.report.verify import compare

pytestmark = needs_tested_jax  # with 0.12 the update of some shards has other bits

RECIPE = f"{SMALL}:small_dropout"
EXACT = ("--parallel.reduction", "exact", "--train.steps", "20")


def run(run_dir, processes, devices, *options, recipe=RECIPE):
    train = ("train", recipe, "--run-dir", run_dir, *EXACT, *options)
    if processes == 1:
        result = sharder(*train, "--cluster.cpu-devices", devices)
    else:
        result = sharder("launch", "--processes", processes, "--devices-per-process", devices, "--", *train)
    assert result.returncode == 0, result.stderr + result.stdout
    return run_dir


def sha256_of_parameters(run_dir):
    digest = hashlib.sha256()
    for path, x in sorted(restore_numpy(run_dir, 20).items()):
        if path.startswith("params/"):
            digest.update(path.encode() + np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return run(tmp_path_factory.mktemp("single") / "run", 1, 1)


def assert_same(run_dir, single):
    result = compare(run_dir, single)
    assert result.identical and result.num_compared == 20
    assert sha256_of_parameters(run_dir) == sha256_of_parameters(single)


@pytest.mark.parametrize("processes, devices, policy", [(2, 1, "fsdp"), pytest.param(1, 8, "zero", marks=pytest.mark.slow)])
def test_processes_and_devices_give_the_same_bits(tmp_path, single, processes, devices, policy):
    assert_same(run(tmp_path / "run", processes, devices, "--parallel.policy", policy), single)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dp", "zero", "fsdp"])
@pytest.mark.parametrize("processes, devices", [(2, 1), (2, 4), (4, 1), (4, 2)])
def test_the_full_matrix_of_processes(tmp_path, single, processes, devices, policy):
    assert_same(run(tmp_path / "run", processes, devices, "--parallel.policy", policy), single)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tiny_lm", "mlp"])
def test_recipes_of_their_own_size_agree_too(tmp_path, recipe):
    """Kernels choose their tiles by size: what holds for a small model need not hold for a larger one. In the mode that a user
    has who sets none."""
    auto = ("--parallel.reduction", "auto")
    whole = run(tmp_path / "whole", 1, 1, *auto, recipe=recipe)
    assert_same(run(tmp_path / "devices", 1, 8, *auto, "--parallel.policy", "fsdp", recipe=recipe), whole)
    assert_same(
        run(tmp_path / "processes", 2, 2, *auto, "--parallel.policy", "zero", "--parallel.data", "2", recipe=recipe), whole
    )


def test_a_resume_on_other_meshes_goes_on_with_the_same_bits(tmp_path, single):
    run_dir = tmp_path / "run"
    run(run_dir, 1, 8, "--train.steps", "7", "--parallel.policy", "fsdp")
    run(run_dir, 2, 1, "--train.steps", "13", "--parallel.policy", "zero")
    run(run_dir, 1, 4, "--parallel.policy", "dp", "--parallel.data", "2")
    assert_same(run_dir, single)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe, options",
    [
        (RECIPE, ("--optimizer.moments", "bfloat16")),
        (RECIPE, ("--optimizer.moments", "int8")),
        (f"{SMALL_PI0}:small_pi0", ("--model.freeze", "vision", "--checkpoint.every", "1000", "--optimizer.moments", "int8")),
    ],
    ids=["bfloat16", "int8", "frozen"],
)
def test_narrow_moments_and_frozen_parameters_go_on_with_the_same_bits(tmp_path, recipe, options):
    whole, parts = run(tmp_path / "whole", 1, 1, *options, recipe=recipe), tmp_path / "parts"
    run(parts, 1, 1, "--train.steps", "7", *options, recipe=recipe)
    run(parts, 1, 4, "--parallel.policy", "fsdp", "--train.steps", "13", *options, recipe=recipe)
    run(parts, 2, 1, "--parallel.policy", "zero", *options, recipe=recipe)
    assert_same(parts, whole)


@pytest.mark.slow
def test_the_number_of_processes_may_change_at_every_resume(tmp_path, single):
    """4, 2, 1 and 4 again, in the middle of an epoch of 10 steps each time; not only fingerprints but losses and norms by their bits."""
    run_dir = tmp_path / "run"
    for processes, devices, steps, policy in ((4, 1, 4, "fsdp"), (2, 2, 7, "zero"), (1, 1, 13, "dp"), (4, 2, 20, "fsdp")):
        run(run_dir, processes, devices, "--train.steps", steps, "--parallel.policy", policy)
    bits = ("step", "epoch", "loss_hex", "grad_norm_hex", "fingerprint", "batch_fingerprint")
    ours, theirs = (read_json_lines(d / "metrics.jsonl")[0] for d in (run_dir, single))
    assert [[r[k] for k in bits] for r in ours] == [[r[k] for k in bits] for r in theirs]
    assert sorted({r["attempt"] for r in ours}) == [1, 2, 3, 4]
    assert_same(run_dir, single)


@pytest.mark.slow
def test_a_warm_compile_cache_gives_the_bits_of_a_cold_one(tmp_path, single):
    for name in ("cold", "warm"):
        cache = ("--cluster.compile-cache", tmp_path / "cache")
        assert_same(run(tmp_path / name, 1, 2, "--parallel.policy", "fsdp", *cache), single)
    assert any((tmp_path / "cache").glob("sharder-*")), "the worker's binary is kept"


def test_each_process_reads_its_own_slice_of_every_slot_and_nothing_else(tmp_path):
    recipe = f"{Path(__file__).with_name('recording.py')}:recording"
    options = ("--parallel.reduction", "exact", "--train.steps", "3", "--data.validation-fraction", "0")
    command = (
        "launch",
        "--processes",
        2,
        "--devices-per-process",
        1,
        "--",
        "train",
        recipe,
        "--run-dir",
        tmp_path / "run",
        *options,
    )
    result = sharder(*command, SHARDER_TEST_RECORD=str(tmp_path), PYTHONPATH=str(Path(SMALL).parent))
    assert result.returncode == 0, result.stderr
    order = Order(160, 16, 0)
    for process in (0, 1):
        # Sixteen examples are 8 workers of 2; in slot i process p computes worker 2 i + p.
        mine = [[i * 4 + process * 2, i * 4 + process * 2 + 1] for i in range(4)]
        expected = [[int(x) for rows in mine for x in order.ids(step, rows[0], rows[1] + 1)] for step in range(3)]
        reads = [json.loads(line) for line in (tmp_path / f"{process}.jsonl").read_text().splitlines()]
        trained = [ids for ids in reads if len(ids) == 8]
        assert trained[:3] == expected
        assert len(trained) == len(reads) - 1 and len([ids for ids in reads if len(ids) == 1]) == 1, (
            "but for one to know the shapes"
        )

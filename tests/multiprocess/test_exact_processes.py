"""Exact mode over real processes: fingerprints of every step, and the parameters at the end."""

import hashlib

import numpy as np
import pytest
from small import __file__ as SMALL
from small import sharder

from sharder import checkpoint
from sharder.report.verify import compare

RECIPE = f"{SMALL}:small_dropout"
EXACT = ("--parallel.reduction", "exact", "--train.steps", "20")


def run(run_dir, processes, devices, *options):
    train = ("train", RECIPE, "--run-dir", run_dir, *EXACT, *options)
    if processes == 1:
        result = sharder(*train, "--cluster.cpu-devices", devices)
    else:
        result = sharder("launch", "--processes", processes, "--devices-per-process", devices, "--", *train)
    assert result.returncode == 0, result.stderr + result.stdout
    return run_dir


def sha256_of_parameters(run_dir):
    digest = hashlib.sha256()
    for path, x in sorted(checkpoint.restore_numpy(run_dir, 20).items()):
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


@pytest.mark.parametrize("processes, devices, policy", [(2, 1, "fsdp"), (1, 8, "zero")])
def test_processes_and_devices_give_the_same_bits(tmp_path, single, processes, devices, policy):
    assert_same(run(tmp_path / "run", processes, devices, "--parallel.policy", policy), single)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dp", "zero", "fsdp"])
@pytest.mark.parametrize("processes, devices", [(2, 1), (2, 4), (4, 1), (4, 2)])
def test_the_full_matrix_of_processes(tmp_path, single, processes, devices, policy):
    assert_same(run(tmp_path / "run", processes, devices, "--parallel.policy", policy), single)


def test_a_resume_on_other_meshes_goes_on_with_the_same_bits(tmp_path, single):
    run_dir = tmp_path / "run"
    run(run_dir, 1, 8, "--train.steps", "7", "--parallel.policy", "fsdp")
    run(run_dir, 2, 1, "--train.steps", "13", "--parallel.policy", "zero")
    run(run_dir, 1, 4, "--parallel.policy", "dp", "--parallel.data", "2")
    assert_same(run_dir, single)

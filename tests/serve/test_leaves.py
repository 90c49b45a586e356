import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import RECIPE, sharder

from sharder import checkpoint
from sharder.config import UserError
from sharder.serve.leaves import compare_leaf, newest_common_step, ulps


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_neighbours_are_one_ulp_apart_on_both_sides_of_zero(dtype):
    steps = {2: np.uint16, 4: np.uint32, 8: np.uint64}[np.dtype(dtype).itemsize]
    tiny = np.array([1], steps).view(dtype)  # the smallest positive number
    one = np.array([1], dtype)
    above = (one.view(steps) + steps(1)).view(dtype)
    assert ulps(one, above).item() == ulps(-one, -above).item() == 1
    assert ulps(tiny, -tiny).item() == 2 and ulps(one - one, -(one - one)).item() == 0


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 50))
def test_as_many_ulps_as_steps_of_nextafter(x, count):
    a = b = np.float32(x)
    for _ in range(count):
        b = np.nextafter(b, np.float32(np.inf))
    if np.isfinite(b):
        assert ulps(np.array([a]), np.array([b])).item() == count


def test_a_leaf_says_where_it_differs():
    a = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    b = a.copy()
    b[1, 2] = np.nextafter(b[1, 2], np.float32(np.inf))
    b[2, 3] += 1
    found = compare_leaf("params/w", a, b)
    assert (found.num_differing, found.num_elements, found.first_index) == (2, 12, (1, 2))
    assert found.max_ulps == 2**20 and found.values == (7.0, float(b[1, 2]))
    assert compare_leaf("params/w", a, a.copy()) is None


def test_another_shape_is_not_comparable():
    with pytest.raises(UserError, match=r"params/w is float32\[2\] in the one checkpoint, float32\[3\]"):
        compare_leaf("params/w", np.zeros(2, np.float32), np.zeros(3, np.float32))


def test_steps_without_a_partner_are_named(tmp_path):
    for run, steps in (("a", (1, 2)), ("b", (2, 3))):
        for step in steps:
            (checkpoint.folder(tmp_path / run) / str(step)).mkdir(parents=True)
            checkpoint.write_manifest(checkpoint.entry(tmp_path / run, step), {"step": step, "leaves": {}})
    assert newest_common_step(tmp_path / "a", tmp_path / "b", None) == 2
    with pytest.raises(UserError, match=r"--step is 3, but both runs have checkpoints of \[2\]"):
        newest_common_step(tmp_path / "a", tmp_path / "b", 3)


def test_the_command_names_the_leaf_that_differs(tmp_path):
    """Two runs that differ in their summation order only: the same settings in fast mode, on one device and on four."""
    for name, devices in (("a", 1), ("b", 4)):
        result = sharder("train", RECIPE, "--run-dir", tmp_path / name, "--train.steps", "2", "--cluster.cpu-devices", devices)
        assert result.returncode == 0, result.stderr
    result = sharder("verify", tmp_path / "a", tmp_path / "b", "--leaves")
    assert result.returncode == 1
    assert re.search(r"first: params/\w+", result.stdout)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    assert sharder("verify", tmp_path / "a", tmp_path / "c", "--leaves").stdout.strip() == "step 2: every leaf is identical"

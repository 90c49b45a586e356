import subprocess
import sys

import pytest
from small import RECIPE, environment, sharder

import sharder as package
from sharder.config import UserError
from sharder.report.verify import compare
from sharder.session import quick


@pytest.mark.parametrize(
    "given, policy, tensor",
    [({}, "zero", 1), ({"tp": 2, "fsdp": True}, "fsdp", 2), ({"zero": False}, "dp", 1), ({"tp": 4}, "zero", 4)],
)
def test_shard_chooses_policy_and_degree(given, policy, tensor):
    parallel = package.quick("tiny_lm").shard(**given).config.parallel
    assert (parallel.policy, parallel.tensor) == (policy, tensor)


def test_fsdp_without_zero_is_refused():
    with pytest.raises(UserError, match="fsdp=True with zero=False"):
        quick("tiny_lm").shard(fsdp=True, zero=False)


@pytest.mark.parametrize(
    "recipe, sections, message",
    [
        ("nope", {}, "there is no recipe 'nope'"),
        ("tiny_lm", {"training": {}}, "there is no section 'training'; use one of model, data"),
        ("tiny_lm", {"train": {"step": 3}}, "section train has no step; it has steps"),
        ("tiny_lm", {"train": {"steps": 0}}, "--train.steps is 0"),
    ],
)
def test_what_does_not_exist_is_refused(recipe, sections, message):
    with pytest.raises(UserError, match=message):
        quick(recipe, **sections)


def test_one_line_trains_as_the_command_line_does(tmp_path, capsys):
    session = quick(RECIPE, tmp_path / "python").shard(tp=2, fsdp=True).train(steps=3)
    assert "4 examples per replica and slot x 4 replicas x 1 slots = 16 examples per step" in capsys.readouterr().out
    assert [r["step"] for r in session.metrics] == [1, 2, 3]
    options = ("--cluster.cpu-devices", "8", "--parallel.policy", "fsdp", "--parallel.tensor", "2", "--train.steps", "3")
    result = sharder("train", RECIPE, "--run-dir", tmp_path / "command", *options)
    assert result.returncode == 0, result.stderr
    assert compare(tmp_path / "python", tmp_path / "command").identical
    with pytest.raises(UserError, match="call .shard"):
        session.shard(tp=1)


def test_a_session_loads_no_jax_before_it_trains():
    code = "import sys, sharder; sharder.quick('tiny_lm').shard(tp=2); sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0

"""Steps that are not finite, in two real processes: all stop at the same state, or drop the same batch."""

import pytest
from poisoned import __file__ as POISONED
from small import sharder
from started import ended, started, train

from sharder import checkpoint
from sharder.events import read_json_lines

RECIPE = f"{POISONED}:poisoned"


def metrics(run_dir):
    return read_json_lines(run_dir / "metrics.jsonl")[0]


def test_both_stop_at_the_state_before(tmp_path):
    with started([train(tmp_path / "run", recipe=RECIPE)] * 2) as processes:
        (zero, told), (one, quiet) = ended(processes)
    assert (zero, one) == (1, 1), told + quiet
    last = metrics(tmp_path / "run")[-1]
    assert f"step {last['step'] + 1} is not finite" in told and "is not finite" not in quiet, "process 0 alone speaks"
    assert checkpoint.list_steps(tmp_path / "run") == [last["step"]]
    assert checkpoint.read_manifest(tmp_path / "run", last["step"])["fingerprint"] == last["fingerprint"]


@pytest.mark.slow
def test_both_drop_the_batch_that_one_drops(tmp_path):
    skip = ("--train.on-nonfinite", "skip")
    with started([train(tmp_path / "two", *skip, recipe=RECIPE)] * 2) as processes:
        assert [code for code, _ in ended(processes)] == [0, 0]
    assert sharder("train", RECIPE, "--run-dir", tmp_path / "one", "--cluster.cpu-devices", 1, *skip).returncode == 0
    bits = ("step", "loss_hex", "grad_norm_hex", "fingerprint", "num_skipped")
    two, one = ([[r[k] for k in bits] for r in metrics(tmp_path / name)] for name in ("two", "one"))
    assert two == one and one[-1][-1] == 2

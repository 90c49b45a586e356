"""Steps that are not finite: nothing of them is kept, and they are told with step, examples and leaf."""

import dataclasses
import json

import numpy as np
import pytest
from poisoned import HUGE, NAN, poisoned, read
from small import needs_tested_jax

from sharder import checkpoint
from sharder.checkpoint.restore import restore_numpy
from sharder.data.order import Order
from sharder.data.synthetic import SyntheticRegression
from sharder.events import read_json_lines
from sharder.stop import StopRequest
from sharder.train.loop import train
from sharder.train.nonfinite import Nonfinite, find_nonfinite

ORDER = Order(192, 16, 0)
BAD = sorted(step for step in range(1, 13) for x in (NAN, HUGE) if x in ORDER.ids(step - 1, 0, 16))
"""The steps that meet the two examples."""


@pytest.fixture(autouse=True)
def numbers_again():
    yield
    SyntheticRegression.read = read


def run(run_dir, mode="exact", clean=False, data=8, **options):
    config = poisoned()
    if clean:
        SyntheticRegression.read = read
    parallel = dataclasses.replace(config.parallel, reduction=mode, data=data)
    config = dataclasses.replace(config, parallel=parallel, train=dataclasses.replace(config.train, **options))
    return train(config, run_dir, "auto", StopRequest())


def metrics(run_dir):
    return read_json_lines(run_dir / "metrics.jsonl")[0]


def events(run_dir):
    return [e for e in read_json_lines(run_dir / "events.jsonl")[0] if e["kind"] == "nonfinite"]


def test_the_premise_holds():
    assert len(BAD) == 2 and 1 < BAD[0] < BAD[1] < 12


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_run_stops_at_the_state_before(tmp_path, capsys, mode):
    assert run(tmp_path / "run", mode) == 1
    last = BAD[0] - 1
    assert [r["step"] for r in metrics(tmp_path / "run")] == list(range(1, BAD[0]))
    assert checkpoint.list_steps(tmp_path / "run") == [last]
    assert checkpoint.read_manifest(tmp_path / "run", last)["fingerprint"] == metrics(tmp_path / "run")[-1]["fingerprint"]
    (event,) = events(tmp_path / "run")
    assert event["step"] == BAD[0] and event["action"] == "stop" and event["leaf"] == "blocks/bias"
    assert event["examples"] == ORDER.ids(last, 0, 16).tolist()
    told = capsys.readouterr().err
    assert f"step {BAD[0]} is not finite" in told and "the gradient of blocks/bias is the first that is not" in told
    assert str(ORDER.ids(last, 0, 16)[0]) in told
    # The saved state is that of a run that never met the example.
    assert run(tmp_path / "clean", mode, clean=True, steps=last) == 0
    assert metrics(tmp_path / "clean")[-1]["fingerprint"] == metrics(tmp_path / "run")[-1]["fingerprint"]
    kept, clean = (restore_numpy(tmp_path / name, last) for name in ("run", "clean"))
    assert all(np.array_equal(kept[path], clean[path]) for path in clean)


def test_a_run_goes_on_without_the_batch(tmp_path):
    assert run(tmp_path / "run", on_nonfinite="skip") == 0
    records = metrics(tmp_path / "run")
    assert [r["step"] for r in records] == list(range(1, 13))
    assert [r["num_skipped"] for r in records] == [sum(b <= r["step"] for b in BAD) for r in records]
    for bad in BAD:
        before, dropped = records[bad - 2], records[bad - 1]
        assert dropped["grad_norm"] is None and not np.isfinite(float.fromhex(dropped["grad_norm_hex"]))
        assert dropped["learning_rate"] != before["learning_rate"] and dropped["fingerprint"] != before["fingerprint"], (
            "the step counts"
        )
    assert [(e["step"], e["action"]) for e in events(tmp_path / "run")] == [(b, "skip") for b in BAD]
    saved = restore_numpy(tmp_path / "run", 12)
    assert saved["step"] == 12 and all(np.isfinite(x).all() for x in saved.values())
    counts = {path: int(x) for path, x in saved.items() if path.endswith("count")}
    assert sorted(counts.values()) == [10, 12], "moments have seen ten batches, the schedule twelve steps"


@needs_tested_jax  # with 0.12 the update of some shards has other bits
def test_a_dropped_batch_gives_the_same_bits_on_other_devices(tmp_path):
    found = {}
    for data in (1, 8):
        run(tmp_path / str(data), on_nonfinite="skip", data=data)
        found[data] = [(r["loss_hex"], r["grad_norm_hex"], r["fingerprint"]) for r in metrics(tmp_path / str(data))]
    assert found[1] == found[8]


def test_a_stopped_run_may_be_told_to_skip(tmp_path):
    assert run(tmp_path / "run") == 1
    assert run(tmp_path / "run", on_nonfinite="skip") == 0
    assert [r["step"] for r in metrics(tmp_path / "run")] == list(range(1, 13))
    run(tmp_path / "whole", on_nonfinite="skip")
    assert metrics(tmp_path / "run")[-1]["fingerprint"] == metrics(tmp_path / "whole")[-1]["fingerprint"]


def test_only_the_loss_may_be_bad():
    metrics = {"finite": False, "finite_leaves": np.array([True, True]), "loss": np.float32("inf"), "grad_norm": np.float32(1)}
    found = find_nonfinite(3, metrics, ["a", "b"])
    assert found == Nonfinite(3, float("inf"), 1.0, None)
    text = found.describe(list(range(100)), skips=False)
    assert "all gradients are finite" in text and "14, 15 and 84 more, listed in events.jsonl" in text


def test_events_are_json(tmp_path):
    run(tmp_path / "run")
    for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))

import dataclasses
import json

import pytest

from sharder.config import MlpConfig, ParallelConfig, RunConfig, TrainConfig, UserError, to_dict
from sharder.report.verify import compare, describe


def record(step, fingerprint="a" * 16, loss="0x1p+0", batch="d" * 16, attempt=1):
    return {"attempt": attempt, "step": step, "fingerprint": fingerprint, "loss_hex": loss, "batch_fingerprint": batch}


CONFIG = RunConfig(model=MlpConfig())
DATA = {"fingerprint": "e" * 64, "num_examples": 160}


def run(path, records=(), tail="", config=CONFIG, data=DATA, jax="0.10.2"):
    path.mkdir()
    facts = {"config": to_dict(config), "data": data, "versions": {"jax": jax}, "devices": {"kind": "cpu"}}
    (path / "config.json").write_text(json.dumps(facts))
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    return path


def test_equal_runs_are_identical_over_their_common_steps(tmp_path):
    a = run(tmp_path / "a", [record(s, f"{s:016x}") for s in range(1, 6)])
    b = run(tmp_path / "b", [record(s, f"{s:016x}") for s in range(3, 9)])
    result = compare(a, b)
    assert result.identical and (result.num_compared, result.first_step, result.last_step) == (3, 3, 5)
    assert "3 steps compared (3 .. 5): identical" in describe(result)


def test_the_first_difference_is_named(tmp_path):
    a = run(tmp_path / "a", [record(1), record(2), record(3)])
    b = run(tmp_path / "b", [record(1), record(2, "b" * 16), record(3, "c" * 16)])
    result = compare(a, b)
    assert result.first_difference == 2 and result.what_differs.startswith("the state only")


def test_a_differing_loss_is_told_from_a_differing_state(tmp_path):
    a = run(tmp_path / "a", [record(1)])
    b = run(tmp_path / "b", [record(1, "b" * 16, "0x1.1p+0")])
    assert compare(a, b).what_differs.startswith("the loss")


def test_differing_data_are_told_from_what_follows_from_them(tmp_path):
    a = run(tmp_path / "a", [record(1)])
    b = run(tmp_path / "b", [record(1, "b" * 16, "0x1.1p+0", "c" * 16)])
    assert compare(a, b).what_differs.startswith("the data")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"config": dataclasses.replace(CONFIG, train=TrainConfig(seed=1))}, "--train.seed is 0 in the one, 1 in the other"),
        ({"config": dataclasses.replace(CONFIG, model=MlpConfig(compute_dtype="bfloat16"))}, "--model.compute-dtype"),
        ({"config": dataclasses.replace(CONFIG, parallel=ParallelConfig(reduction="exact"))}, "--parallel.reduction"),
        ({"data": DATA | {"fingerprint": "f" * 64}}, "the data are 160 examples, SHA-256 eeee.*, 160 examples, SHA-256 ffff"),
    ],
)
def test_runs_that_were_not_to_agree_are_named_as_such(tmp_path, change, message):
    a, b = run(tmp_path / "a", [record(1)]), run(tmp_path / "b", [record(1)], **change)
    with pytest.raises(UserError, match=f"cannot be compared.*\n.*{message}"):
        compare(a, b)


def test_other_virtual_workers_are_not_comparable_in_exact_mode(tmp_path):
    exact = [dataclasses.replace(CONFIG, parallel=ParallelConfig(reduction="exact", virtual_workers=v)) for v in (4, 8)]
    a, b = (run(tmp_path / name, [record(1)], config=config) for name, config in zip("ab", exact))
    with pytest.raises(UserError, match="--parallel.virtual-workers is 4 in the one, 8 in the other"):
        compare(a, b)


def test_what_may_change_between_runs_is_compared(tmp_path):
    other = dataclasses.replace(CONFIG, parallel=ParallelConfig(policy="fsdp", fsdp=4), train=TrainConfig(steps=7))
    assert compare(run(tmp_path / "a", [record(1)]), run(tmp_path / "b", [record(1)], config=other)).identical


def test_other_versions_are_a_note(tmp_path):
    result = compare(run(tmp_path / "a", [record(1)]), run(tmp_path / "b", [record(1)], jax="0.12.0"))
    assert "note: the runs have jax 0.10.2 and 0.12.0" in describe(result)


def test_an_unreadable_config_is_not_comparable(tmp_path):
    a = run(tmp_path / "a", [record(1)])
    (a / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json cannot be read"):
        compare(run(tmp_path / "b", [record(1)]), a)


def test_a_redone_step_must_agree_with_itself(tmp_path):
    a = run(tmp_path / "a", [record(1), record(2), record(2, "b" * 16), record(3)])
    b = run(tmp_path / "b", [record(1), record(2), record(3)])
    assert compare(a, b).first_difference == 2


def test_nothing_in_common_is_not_comparable(tmp_path):
    a, b = run(tmp_path / "a", [record(1)]), run(tmp_path / "b", [record(2)])
    with pytest.raises(UserError, match="no logged step in common.*1 .. 1.*2 .. 2"):
        compare(a, b)


def test_a_missing_fingerprint_is_not_comparable(tmp_path):
    a, b = run(tmp_path / "a", [record(1, None)]), run(tmp_path / "b", [record(1)])
    with pytest.raises(UserError, match="step 1 has no fingerprint"):
        compare(a, b)


def test_a_cut_off_line_is_counted_not_compared(tmp_path):
    a = run(tmp_path / "a", [record(1)], tail='{"step": 2, "finger')
    b = run(tmp_path / "b", [record(1), record(2)])
    result = compare(a, b)
    assert result.identical and result.num_unreadable == 1


@pytest.mark.parametrize(
    "line", ["42", "null", "[1]", "{", "\xff", '{"loss_hex": "0x1p+0", "fingerprint": "a"}', '{"step": 2, "fingerprint": "a"}']
)
def test_a_damaged_line_inside_an_attempt_is_not_comparable(tmp_path, line):
    a, b = run(tmp_path / "a", [record(1)]), run(tmp_path / "b", [record(1)])
    with open(a / "metrics.jsonl", "ab") as file:
        file.write(line.encode("latin-1") + b"\n" + json.dumps(record(3)).encode() + b"\n")
    with pytest.raises(UserError, match="metrics.jsonl, line 2"):
        compare(a, b)


def test_a_kill_may_cut_the_last_line_of_every_attempt(tmp_path):
    a = run(tmp_path / "a", [record(1)], tail='{"step": 2, "fi\n' + json.dumps(record(2, attempt=2)) + '\n{"st')
    result = compare(a, run(tmp_path / "b", [record(1), record(2)]))
    assert result.identical and (result.num_compared, result.num_unreadable) == (2, 2)


def test_a_step_that_both_redid_counts_once(tmp_path):
    a, b = (run(tmp_path / name, [record(1), record(2), record(2, attempt=2), record(2, attempt=3)]) for name in "ab")
    assert compare(a, b).num_redone == 1


def test_a_run_is_not_compared_with_itself(tmp_path):
    a = run(tmp_path / "a", [record(1)])
    (tmp_path / "link").symlink_to(a)
    with pytest.raises(UserError, match="are the same folder"):
        compare(a, tmp_path / "link")


def test_metrics_that_are_a_folder_are_named(tmp_path):
    a, b = run(tmp_path / "a", [record(1)]), run(tmp_path / "b", [record(1)])
    (a / "metrics.jsonl").unlink()
    (a / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match="metrics.jsonl cannot be read"):
        compare(a, b)


def test_no_metrics_is_not_comparable(tmp_path):
    with pytest.raises(UserError, match="no metrics.jsonl"):
        compare(tmp_path, tmp_path)

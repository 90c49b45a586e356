import json

import pytest

from sharder.config import UserError
from sharder.report.verify import compare, describe


def record(step, fingerprint="a" * 16, loss="0x1p+0"):
    return {"step": step, "fingerprint": fingerprint, "loss_hex": loss}


def run(path, records, tail=""):
    path.mkdir()
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
    assert (result.first_difference, result.what_differs) == (2, "state only")


def test_a_differing_loss_is_told_from_a_differing_state(tmp_path):
    a = run(tmp_path / "a", [record(1)])
    b = run(tmp_path / "b", [record(1, "b" * 16, "0x1.1p+0")])
    assert compare(a, b).what_differs == "loss and state"


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


def test_no_metrics_is_not_comparable(tmp_path):
    with pytest.raises(UserError, match="no metrics.jsonl"):
        compare(tmp_path, tmp_path)

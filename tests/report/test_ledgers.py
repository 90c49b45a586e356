"""Ledgers of several processes: who is slow, and who is not."""

import json

import pytest

from sharder.report.ledgers import PARTS, read_ledgers


def write(folder, process: int, own: list[float], wall_s: float = 10.0, cut: str = "") -> None:
    """Lines of ten steps each, in which the process is busy for `own` seconds and waits for its devices else."""
    (folder / "steps").mkdir(exist_ok=True)
    rows = [
        {"attempt": 1, "process": process, "step": 10 * (i + 1), "num_steps": 10, "wall_s": wall_s, "data_wait_s": busy,
         "device_s": wall_s - busy} for i, busy in enumerate(own)
    ]  # fmt: skip
    (folder / "steps" / f"process_{process}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + cut)


def test_the_process_that_others_wait_for_is_named(tmp_path):
    write(tmp_path, 0, [1.0] * 4)
    write(tmp_path, 1, [6.0] * 4)
    write(tmp_path, 2, [1.0] * 4)
    found = read_ledgers(tmp_path)
    assert (found.slowest, found.stragglers) == (1, [1])
    assert [p.wall_s for p in found.processes] == [40.0] * 3 and found.processes[1].parts["data_wait"] == 24.0


def test_a_process_that_is_slow_now_and_then_is_no_straggler(tmp_path):
    write(tmp_path, 0, [1.0] * 4)
    write(tmp_path, 1, [1.0, 6.0, 1.0, 1.0])
    assert read_ledgers(tmp_path).stragglers == []


def test_a_difference_below_a_tenth_of_the_step_is_none(tmp_path):
    write(tmp_path, 0, [1.0] * 4)
    write(tmp_path, 1, [1.5] * 4)
    assert read_ledgers(tmp_path).stragglers == []


def test_lines_cut_off_are_counted_and_skipped(tmp_path):
    write(tmp_path, 0, [1.0] * 2, cut='{"process": 0, "wa')
    assert (read_ledgers(tmp_path).num_unreadable, read_ledgers(tmp_path).slowest) == (1, None)


def test_no_ledgers_are_no_error(tmp_path):
    assert read_ledgers(tmp_path) is None


def test_the_parts_are_those_that_the_trainer_writes():
    pytest.importorskip("jax")
    from sharder.train import step_ledger

    assert PARTS == (*step_ledger.PARTS, "other")

"""The step ledger, with a clock whose times are given, and of a real run."""

import json

import pytest
from small import small

from sharder.stop import StopRequest
from sharder.train import step_ledger
from sharder.train.loop import train
from sharder.train.step_ledger import PARTS, StepLedger


def read(folder, process: int = 0) -> list[dict]:
    return [json.loads(line) for line in (folder / "steps" / f"process_{process}.jsonl").read_text().splitlines()]


def test_every_second_is_in_one_part_or_in_other(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(step_ledger.time, "perf_counter", lambda: now[0])
    ledger = StepLedger(tmp_path, 3)
    for step in range(1, 11):
        for name, seconds in (("data_wait", 1.0), ("dispatch", 2.0), ("device", 4.0)):
            with ledger.part(name):
                now[0] += seconds
        ledger.move("data_wait", "host_to_device", 0.25)
        now[0] += 0.5
        ledger.end_step(step)
    (line,) = read(tmp_path, 3)
    assert (line["process"], line["step"], line["num_steps"], line["wall_s"]) == (3, 10, 10, 75.0)
    assert [line[f"{p}_s"] for p in PARTS] == [7.5, 2.5, 20.0, 40.0, 0.0, 0.0, 0.0] and line["other_s"] == 5.0


def test_the_parts_of_a_run_sum_to_its_wall_time(tmp_path):
    train(small(), tmp_path / "run", "never", StopRequest())
    lines = read(tmp_path / "run")
    assert [(x["step"], x["num_steps"]) for x in lines] == [(10, 10), (12, 2)]
    wall = sum(x["wall_s"] for x in lines)
    for line in lines:
        assert sum(line[f"{p}_s"] for p in PARTS) + line["other_s"] == pytest.approx(line["wall_s"], abs=1e-4)
    # Usually below 0.01; a process that waits for its turn on the machine waits anywhere.
    assert 0 <= sum(x["other_s"] for x in lines) < 0.2 * wall
    assert sum(x["checkpoint_s"] for x in lines) > 0 and sum(x["logging_s"] for x in lines) > 0

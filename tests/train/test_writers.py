import json
import math

import pytest
from small import small

from sharder.config import LogConfig
from sharder.train.metrics import Forgiving, JsonLines, TensorBoard, optional_writers, validation_fields

RECORD = {"step": 3, "loss": 1.5, "fingerprint": "ab", "mfu": None}


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    writer = JsonLines(tmp_path / "metrics.jsonl")
    writer.write(RECORD)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == RECORD
    writer.close()


def test_not_a_number_stays_readable(tmp_path):
    writer = JsonLines(tmp_path / "metrics.jsonl")
    writer.write(RECORD | {"loss": math.nan, "grad_norm": math.inf})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line)["loss"] is None and "NaN" not in line and "Infinity" not in line


def test_tensorboard_gets_the_numbers(tmp_path):
    writer = TensorBoard(tmp_path)
    writer.write(RECORD)
    writer.close()
    content = next((tmp_path / "tensorboard").iterdir()).read_bytes()
    assert b"loss" in content and b"fingerprint" not in content


def test_no_optional_writer_is_on_by_default(tmp_path):
    assert optional_writers(LogConfig(), small(), tmp_path) == []


class Failing:
    def __init__(self):
        self.calls = 0

    def write(self, record):
        self.calls += 1
        raise ConnectionError("no network")

    def close(self):
        raise ConnectionError("no network")


def test_a_failing_writer_is_given_up_once(capsys):
    failing = Failing()
    writer = Forgiving("test", lambda: failing)
    for _ in range(3):
        writer.write(RECORD)
    writer.close()
    assert failing.calls == 1 and capsys.readouterr().err.count("no network") == 1


@pytest.mark.parametrize("error", [ImportError("not installed"), SystemExit(1)])
def test_a_writer_that_cannot_start_stops_nothing(error):
    def make():
        raise error

    Forgiving("test", make).write(RECORD)


def test_perplexity_is_the_exponential_of_the_loss():
    assert validation_fields(math.log(8.0), True)["validation_perplexity"] == pytest.approx(8.0)
    assert math.isfinite(validation_fields(1e6, True)["validation_perplexity"])
    assert validation_fields(0.5, False) == {"validation_loss": 0.5}

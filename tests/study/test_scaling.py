"""Scaling over devices: batches, figures and what is said of simulated devices, and one real study."""

import json

import pytest
from small import RECIPE, sharder

from sharder.config import UserError
from sharder.study.scaling import SHARED, _value_of, _without, batch_of, parse_devices, scale, summarise


@pytest.mark.parametrize("text", ["", "0,1", "2,1", "1,1", "one", "1,2,"])
def test_devices_are_ascending_numbers(text):
    with pytest.raises(UserError, match="ascending numbers"):
        parse_devices(text)


@pytest.mark.parametrize(
    "options, per_device, message",
    [(["--train.global-batch-size", "many"], None, "global-batch-size is 'many'"), ([], 0, "--examples-per-device is 0")],
)
def test_examples_are_a_number_above_zero(options, per_device, message):
    with pytest.raises(UserError, match=message):
        scale("mlp", [1], "weak", False, 1, 1, per_device, options)


def test_weak_scaling_keeps_the_examples_of_a_device():
    """The tutorial's: 1024 for each device, 8192 for eight."""
    assert [batch_of("weak", n, 8192, None, 8) for n in (1, 2, 4, 8)] == [1024, 2048, 4096, 8192]
    assert [batch_of("weak", n, 8192, 64, 8) for n in (1, 2)] == [64, 128]
    assert [batch_of("strong", n, 8192, None, 8) for n in (1, 8)] == [8192, 8192]


def profile(step_time_s: float, collective: float = 0.25) -> dict:
    return {
        "step_time_s": step_time_s, "kinds": {"matrix product": 0.6, "collective": collective, "idle": 0.1, "data wait": 0.05},
        "tflops_per_s": 1.0, "mfu": 0.3, "mfu_exact": 0.31, "traffic": [{"executions": 3, "received_bytes": 100.0}, {"executions": 1, "received_bytes": 4.0}],
    }  # fmt: skip


def test_a_point_is_the_median_of_its_repeats():
    """Two devices that do 1.83 times the work of one, as in the tutorial: 45.63 and 49.79 ms."""
    one = summarise([profile(0.04563), profile(0.04), profile(0.05)], 1, 1024, None)
    two = summarise([profile(0.04979)], 2, 2048, one)
    assert (one.step_time_s.median, one.step_time_s.low, one.step_time_s.high) == (0.04563, 0.04, 0.05)
    assert two.speed_up == pytest.approx(1.833, abs=1e-3) and two.efficiency == pytest.approx(0.9165, abs=1e-3)
    assert (two.communication_share, two.num_collectives, two.received_bytes) == (0.25, 4, 104.0)
    assert two.compute_share == pytest.approx(0.6)


def test_the_batch_of_the_options_is_taken_out():
    options = ["--train.global-batch-size", "64", "--train.seed=1"]
    assert _value_of(options, "--train.global-batch-size") == "64" and _without(options, "--train.global-batch-size") == [
        "--train.seed=1"
    ]


@pytest.mark.slow
def test_a_study_of_simulated_devices_claims_no_speed_up(tmp_path):
    done = sharder("scale", RECIPE, "--devices", "1,2", "--mode", "weak", "--repeats", "1", "--steps", "2", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert [p["global_batch_size"] for p in found["points"]] == [8, 16] and found["shares_cores"]
    assert found["points"][0]["num_collectives"] == 0 < found["points"][1]["received_bytes"]
    assert SHARED in " ".join(done.stdout.split()) and not (tmp_path / "speed_up.svg").exists()


@pytest.mark.slow
def test_every_device_may_be_a_process_of_its_own():
    done = sharder("scale", RECIPE, "--devices", "1,2", "--processes", "--repeats", "1", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert [p["devices"] for p in json.loads(done.stdout)["points"]] == [1, 2]


def test_a_point_that_fails_says_why():
    done = sharder("scale", RECIPE, "--devices", "3", "--repeats", "1", "--steps", "1")
    assert done.returncode == 2 and "does not divide" in done.stderr and "Traceback" not in done.stderr

"""The clock of a step, with a device and a host whose times are given."""

from types import SimpleNamespace

import numpy as np
import pytest
from small import small

from sharder.train import stepping
from sharder.train.setup import prepare


class Clock:
    now = 0.0


@pytest.mark.parametrize("host_s, device_s", [(1.0, 0.1), (0.1, 1.0)], ids=["host-bound", "device-bound"])
def test_the_time_of_an_evaluated_step_is_that_of_the_others(monkeypatch, host_s, device_s):
    """The host works for `host_s` before it dispatches; the device computes one step after the other."""
    clock, done, times = Clock(), [0.0], {}

    def train_step(*_):
        clock.now += 1e-6
        done.append(max(done[-1], clock.now) + device_s)
        return None, {"stop": 0, "finite": True, "halted": False, "digests": [0], "done": done[-1]}

    def fetch(metrics):
        clock.now = max(clock.now, metrics["done"])
        return metrics

    monkeypatch.setattr(stepping.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(stepping, "fetch", fetch)
    monkeypatch.setattr(
        stepping,
        "make_record",
        lambda facts, step, metrics, step_time_s, wait_s: times.setdefault(step, step_time_s) and {"step": step},
    )
    events = type("Events", (), {"write": lambda *_: None})()
    stepper = stepping.Stepper(
        prepare(small()), SimpleNamespace(gradient_paths=[], skips_nonfinite=False, reached=0), [], events
    )
    stepper.train_step = train_step
    for step in range(1, 9):
        clock.now += host_s
        stepper.dispatch(None, None, step, 0.0, False)
    stepper.drain()
    np.testing.assert_allclose([times[s] for s in range(4, 9)], max(host_s, device_s), rtol=0.15)

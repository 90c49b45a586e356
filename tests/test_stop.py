"""What asks a run to stop, without a run: a small process that listens."""

import signal
import subprocess
import sys
import time

import pytest

from sharder.stop import PREEMPTED, StopRequest

LISTENS = """
import time
from sharder.stop import StopRequest
stop = StopRequest().listen()
told = lambda code, text: print("told", code, text, flush=True)
{setup}
print("ready", flush=True)
time.sleep(1000)
"""


def listening(setup=""):
    command = [sys.executable, "-c", LISTENS.format(setup=setup)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_training_ends_the_process(number):
    process = listening()
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == PREEMPTED and f"{number.name}: ended before the first step; nothing is lost" in output


def test_the_others_are_told_before_the_process_ends():
    process = listening("stop.wait_for_others(); stop.found_others(told)")
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == PREEMPTED and "told 75 SIGTERM: ended before the first step" in output


def test_a_signal_while_the_others_are_awaited_is_kept_for_them():
    setup = (
        "import threading; stop.wait_for_others()\n"
        "def find():\n    while not stop.requested: time.sleep(0.01)\n    stop.found_others(told)\n"
        "threading.Thread(target=find, daemon=True).start()"
    )
    process = listening(setup)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == PREEMPTED and "told 75 SIGTERM" in output


def test_a_first_signal_in_training_asks_and_a_second_ends():
    process = listening("stop.training()")
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM: finishing the step, then saving" in process.stdout.readline()
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == PREEMPTED and "SIGINT: ended without a save" in output


def test_a_process_that_is_not_done_in_time_ends():
    process = listening("stop.training(); stop.grace_s = 0.2")
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == PREEMPTED and "without a save, which took more than 0.2 s (--cluster.grace-s)" in output


def wait_until(condition, timeout_s=60):
    until = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def test_a_file_asks_to_stop(tmp_path):
    stop = StopRequest()
    stop.watch(tmp_path / "STOP", None)
    assert not stop.requested
    (tmp_path / "STOP").touch()
    assert wait_until(lambda: stop.requested) and stop.reason == str(tmp_path / "STOP")


def test_so_does_the_clock(tmp_path):
    stop = StopRequest()
    stop.watch(tmp_path / "STOP", 0.01)
    assert wait_until(lambda: stop.requested) and stop.reason == "--train.max-minutes 0.01"


def test_a_signal_after_another_reason_is_still_the_first_signal(tmp_path):
    """A queue sends SIGTERM to what has begun to stop by itself: that is to save, and not to end without."""
    stop = StopRequest()
    stop.training()
    stop.request("--train.max-minutes 1")
    stop.request("SIGTERM", is_signal=True)
    assert stop.requested and stop.reason == "--train.max-minutes 1"

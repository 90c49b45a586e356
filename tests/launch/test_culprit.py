import signal

import pytest

from sharder.heartbeat import Beat
from sharder.launch.culprit import Death, Silent, describe, first_own, first_silent, in_order, of_death, of_silence

STEP_7 = Beat("step", 7, 100.0)


def death(process, code, *lines, **facts):
    return Death(process, code, STEP_7, lines, **facts)


@pytest.mark.parametrize(
    "deaths, expected",
    [
        ([death(0, 0), death(1, 0)], None),
        ([death(1, -9), death(0, -6)], 1),
        ([death(0, -6), death(1, -9)], 1),  # a peer aborts after the heartbeat timeout, and may be found first
        ([death(1, -9), death(0, 2)], 1),  # a peer's save fails in the wake of a kill
        ([death(0, 1), death(1, -9)], 0),
        ([death(0, -6), death(1, -6)], 0),
        ([death(0, 0), death(1, 3)], 1),
    ],
)
def test_the_culprit_is_the_first_with_a_reason_of_its_own(deaths, expected):
    found = first_own(deaths)
    assert (None if found is None else found.process) == expected


def test_of_those_found_ended_at_once_a_signal_from_outside_comes_first():
    assert in_order({0: 2, 1: -9, 2: -6, 3: 1}) == [1, 0, 3, 2]


def silent(process, beat, stopped=False):
    return Silent(process, beat, 31.0, 30.0, stopped)


@pytest.mark.parametrize(
    "expected, all_silent",
    [
        (1, [silent(0, Beat("step", 8, 5.0)), silent(1, Beat("step", 7, 6.0))]),
        (1, [silent(0, Beat("step", 8, 5.0)), silent(1, Beat("data", 8, 6.0))]),  # the others wait for its examples
        (0, [silent(0, Beat("step", 8, 5.0)), silent(1, Beat("step", 8, 6.0))]),
        (1, [silent(0, Beat("step", 7, 5.0)), silent(1, Beat("step", 8, 6.0), stopped=True)]),
    ],
)
def test_of_silent_processes_the_one_behind_is_the_culprit(expected, all_silent):
    assert first_silent(all_silent).process == expected


def test_a_culprit_is_told_with_signal_phase_step_and_reason():
    assert describe(of_death(death(1, -signal.SIGKILL)), 2) == "process 1 of 2 was ended by SIGKILL, in step 7"
    killed = of_death(death(1, -signal.SIGKILL, out_of_memory=True))
    assert "by the kernel, for lack of memory" in killed.what
    assert "MemoryError" in of_death(death(0, 1, "Traceback", "MemoryError")).what
    stuck = of_silence(silent(0, Beat("data", 3, 1.0), stopped=True), ())
    assert (
        describe(stuck, 4) == "process 0 of 4 is stopped (SIGSTOP) and has not reported for 31 s (limit 30 s), in data, step 3"
    )


def test_only_words_of_its_own_can_come_again():
    assert of_death(death(0, 1, "ValueError: x")).error == "ValueError: x"
    assert of_death(death(0, -9, "step 3")).error == ""

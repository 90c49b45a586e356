"""The policy of restarts, with an injected clock."""

import dataclasses

import pytest

from sharder.config import UserError
from sharder.launch.elastic import Capacity, Ended, Finish, Policy, Resize, Start, after, allowed_worlds, begin, look

TWO = Policy((2,))
ELASTIC = Policy((1, 2, 4))


def fail(policy, state, time_s, step, code=1, culprit=0, error="", capacity=None, chance=0.0):
    return after(policy, state, Ended(time_s, code, step, culprit, error), capacity or policy.worlds[-1], chance)


def test_after_progress_the_next_attempt_starts_at_once():
    state, _ = begin(TWO, 2)
    state, action = fail(TWO, state, 10.0, step=5)
    assert action == Start(2, 0.0, "")


def test_without_progress_the_wait_doubles_up_to_a_limit_and_is_reset_by_progress():
    state, _ = begin(TWO, 2)
    waits = []
    for n in range(9):
        state, action = fail(TWO, state, 1000.0 * n, step=5)
        waits.append(action.delay_s)
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    state, action = fail(TWO, state, 10_000.0, step=6)
    assert action.delay_s == 0.0


def test_the_wait_has_up_to_a_quarter_of_jitter():
    state, _ = begin(TWO, 2)
    state, _ = fail(TWO, state, 0.0, step=5)
    assert fail(TWO, state, 1.0, step=5, chance=0.8)[1].delay_s == pytest.approx(1.2)


def test_the_budget_counts_restarts_within_the_window():
    policy = Policy((2,), max_restarts=3, window_s=100.0)
    state, _ = begin(policy, 2)
    for time_s in (0.0, 10.0, 20.0):
        state, action = fail(policy, state, time_s, step=int(time_s) + 1)
        assert isinstance(action, Start)
    assert isinstance(fail(policy, state, 30.0, step=90)[1], Finish)
    assert isinstance(fail(policy, state, 101.0, step=90)[1], Start)


@pytest.mark.parametrize("code, expected", [(0, 0), (2, 2)])
def test_what_is_done_or_the_users_to_mend_is_not_tried_again(code, expected):
    state, _ = begin(TWO, 2)
    assert fail(TWO, state, 1.0, 5, code=code)[1] == Finish(expected, "")


def test_who_asked_to_stop_gets_the_stop():
    state, _ = begin(TWO, 2)
    assert after(TWO, state, Ended(1.0, 75, 5, asked_to_stop=True), 2, 0.0)[1] == Finish(75, "")
    assert isinstance(after(TWO, state, Ended(1.0, 75, 5), 2, 0.0)[1], Start)  # a signal to one worker


def test_no_restarts_is_one_attempt():
    policy = Policy((2,), max_restarts=0)
    assert fail(policy, begin(policy, 2)[0], 1.0, 5)[1] == Finish(1, "")


def test_the_same_error_in_the_same_step_is_named_and_not_tried_a_third_time():
    state, _ = begin(TWO, 2)
    state, action = fail(TWO, state, 1.0, 5, error="loss is nan, port 4711")
    assert isinstance(action, Start)
    _, action = fail(TWO, state, 9.0, 5, error="loss is nan, port 1147")
    assert action.code == 1 and "the same error" in action.why and "step 5" in action.why and "loss is nan" in action.why
    assert isinstance(fail(TWO, state, 9.0, 6, error="loss is nan, port 1147")[1], Start)
    assert isinstance(fail(TWO, state, 9.0, 5, error="another")[1], Start)


def test_a_process_that_fails_again_and_again_is_left_out_and_tried_later():
    state, _ = begin(ELASTIC, 4)
    state, action = fail(ELASTIC, state, 0.0, step=5, culprit=3)
    assert action.processes == 4
    state, action = fail(ELASTIC, state, 10.0, step=5, culprit=3)
    assert action.processes == 2 and "process 3 failed 2 times in a row" in action.why
    assert look(ELASTIC, state, Capacity(11.0, 4, 20))[1] is None  # too soon
    assert look(ELASTIC, state, Capacity(90.0, 4, 5))[1] is None  # this world has done nothing yet
    state, resize = look(ELASTIC, state, Capacity(90.0, 4, 20))
    assert resize == Resize(4, "there is room for 4 again")


def test_another_process_failing_is_no_reason_to_leave_one_out():
    state, _ = begin(ELASTIC, 4)
    for n in range(4):
        state, action = fail(ELASTIC, state, float(n), step=5, culprit=n)
        assert action.processes == 4


def test_a_smaller_world_after_a_failure_where_room_is_gone():
    state, _ = begin(ELASTIC, 4)
    state, action = fail(ELASTIC, state, 1.0, 5, capacity=3)
    assert action.processes == 2 and "room for 3" in action.why


def test_room_that_comes_and_goes_changes_the_world():
    state, _ = begin(ELASTIC, 4)
    state, resize = look(ELASTIC, state, Capacity(1.0, 1, 5))
    assert resize.processes == 1 and state.world == 1
    state, resize = look(ELASTIC, state, Capacity(2.0, 4, 6))
    assert resize.processes == 4


def test_too_little_room_is_refused():
    with pytest.raises(UserError, match="room for 1 processes, but the run needs at least 2"):
        begin(TWO, 1)


FACTS = {"parallel": {"tensor": 1, "data": None, "fsdp": None, "virtual_workers": 8}, "global_batch_size": 32, "exact": True}


def test_worlds_are_those_whose_replicas_divide_the_virtual_workers():
    assert allowed_worlds(8, 1, 1, FACTS) == (1, 2, 4, 8)
    assert allowed_worlds(4, 2, 2, FACTS) == (2, 4)
    fixed = {**FACTS, "parallel": {**FACTS["parallel"], "fsdp": 4}}
    assert allowed_worlds(8, 1, 1, fixed) == (4, 8)
    assert allowed_worlds(6, 1, 1, {**FACTS, "exact": False, "global_batch_size": 36}) == (1, 2, 3, 4, 6)
    assert allowed_worlds(4, 1, 1, None) == (1, 2, 4)


def test_states_are_values():
    state, _ = begin(ELASTIC, 4)
    before = dataclasses.replace(state)
    fail(ELASTIC, state, 0.0, step=5)
    assert state == before

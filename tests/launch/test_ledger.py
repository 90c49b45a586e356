import pytest

from sharder.config import UserError
from sharder.launch.ledger import describe, make_ledger, read_ledger


def event(time_s, kind, attempt=None, process=None, **fields):
    return {"time_s": time_s, "kind": kind, "attempt": attempt, "process": process, **fields}


def phase(time_s, name, attempt=1):
    return event(time_s, "phase", attempt, 0, name=name)


def record(step, attempt, step_time_s=1.0, data_wait_s=0.0):
    return {"step": step, "attempt": attempt, "step_time_s": step_time_s, "data_wait_s": data_wait_s}


FIRST = [
    event(0.0, "launch"), event(0.0, "spawn"), phase(2.0, "bring-up"), phase(3.0, "set-up"), phase(4.0, "compile"), phase(7.0, "step"),
    phase(10.0, "save"), phase(10.5, "step"), event(12.5, "ended", failed_at=12.0, code=1, culprit=None),
]  # fmt: skip
SECOND = [
    event(13.0, "spawn"), phase(13.5, "restore", 2), phase(14.0, "compile", 2), phase(14.5, "step", 2), event(16.5, "new_step", 2, 0),
    phase(17.5, "evaluate", 2), phase(18.0, "end", 2), event(18.5, "end", 2, 0), event(19.0, "ended", failed_at=19.0, code=0),
    event(19.0, "closed"),
]  # fmt: skip
STEPS = [*(record(s, 1, data_wait_s=0.25) for s in (1, 2, 3, 4)), record(4, 2), record(5, 2, data_wait_s=0.5)]


def test_every_second_has_one_class():
    ledger = make_ledger(FIRST + SECOND, STEPS)
    assert ledger.seconds == {
        "start-up": 2.0 + 1.0 + 0.5, "bring-up": 1.0, "restore": 0.5, "compile": 3.0 + 0.5, "productive": 4.5 + 3.0 - 1.5 - 1.0,
        "redone": 1.0, "data wait": 1.5, "evaluation": 0.5, "checkpoint stall": 1.0, "down": 1.0 + 0.5, "stopped": 0.0,
    }  # fmt: skip
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s) == 19.0
    assert ledger.goodput == pytest.approx(5.0 / 19.0)


def test_the_order_of_lines_does_not_matter():
    """The supervisor's events are written once the run has begun, with their own times."""
    assert make_ledger((FIRST + SECOND)[::-1], STEPS).seconds == make_ledger(FIRST + SECOND, STEPS).seconds


def test_steps_logged_every_tenth_count_tenfold():
    steps = [record(s, 1, 0.01, 0.005) for s in (10, 20, 30)]
    assert make_ledger(FIRST, steps).seconds["data wait"] == pytest.approx(0.15)


def test_the_time_between_two_launches_is_stopped():
    later = [{**e, "time_s": e["time_s"] + 100.0} for e in FIRST]
    ledger = make_ledger(FIRST + SECOND + later, STEPS)
    assert ledger.seconds["stopped"] == pytest.approx(81.0)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s)


def test_a_restart_is_split_from_the_fault_to_the_new_step():
    fault = event(11.9, "fault", None, 1, what="SIGKILL")
    [restart] = make_ledger([*FIRST, fault, *SECOND], STEPS).restarts
    assert restart.total_s == pytest.approx(4.6)
    assert restart.parts_s == pytest.approx(
        {"detect": 0.1, "stop": 0.5, "start": 0.5, "import": 0.5, "restore": 0.5, "compile": 0.5, "first step": 2.0}
    )
    assert restart.faults == [fault]


def test_a_run_without_supervisor_has_a_ledger_too():
    events = [phase(0.0, "start-up"), phase(1.0, "compile"), phase(3.0, "step"), phase(5.0, "end"), event(6.0, "end", 1, 0)]
    ledger = make_ledger(events, [record(1, 1)])
    assert ledger.seconds["compile"] == 2.0 and ledger.wall_s == 6.0
    assert "goodput 33.3 %" in describe(ledger)


@pytest.mark.parametrize("supervised", [False, True])
def test_an_attempt_that_nobody_saw_end_was_down_until_the_next_start(supervised):
    """A kill writes no event: the hours until somebody starts it again are no productive time."""
    launch = [event(3600.0, "launch"), event(3600.0, "spawn")] if supervised else []
    first = [
        phase(0.0, "start-up"),
        phase(1.0, "compile"),
        phase(3.0, "step"),
        phase(5.0, "save"),
        phase(5.5, "step") | {"step": 3},
    ]
    second = [phase(3600.0, "start-up", 2), phase(3601.0, "step", 2), phase(3603.0, "end", 2), event(3604.0, "end", 2, 0)]
    ledger = make_ledger([*first, *launch, *second], [record(s, 1) for s in (1, 2, 3, 4)] + [record(4, 2), record(5, 2)])
    assert ledger.seconds["down"] == 3600.0 - 7.5
    assert ledger.seconds["productive"] == 2.0 + 2.0 + 1.0 and ledger.seconds["redone"] == 1.0
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s) == 3604.0


def test_no_run_has_no_ledger(tmp_path):
    with pytest.raises(UserError, match="has no events.jsonl"):
        read_ledger(tmp_path)

import time

import pytest

from sharder import heartbeat
from sharder.events import EventLog, read_json_lines


@pytest.fixture
def beating(tmp_path, monkeypatch):
    """A process with a supervisor; the file that it beats into."""
    path = tmp_path / "beat"
    heartbeat.create(path)
    monkeypatch.setenv(heartbeat.VARIABLE, str(path))
    heartbeat.begin()
    yield path
    heartbeat.end()


def test_a_supervisor_reads_phase_step_and_time(beating):
    assert heartbeat.read(beating).phase == "start-up"
    before = time.monotonic()
    heartbeat.enter("step", 7)
    beat = heartbeat.read(beating)
    assert (beat.phase, beat.step) == ("step", 7) and before <= beat.time_s <= time.monotonic()


def test_changes_of_phase_are_events_also_those_before_there_was_a_log(beating, tmp_path):
    heartbeat.enter("bring-up")
    events = EventLog(tmp_path, 1)
    heartbeat.attach(events)
    for step in (1, 2):
        heartbeat.enter("data", step)
        heartbeat.enter("step", step)
    heartbeat.enter("save", 2)
    found, _ = read_json_lines(tmp_path / "events.jsonl")
    assert [(e["name"], e["step"]) for e in found] == [("start-up", None), ("bring-up", None), ("step", 1), ("save", 2)]
    assert [e["time_s"] for e in found] == sorted(e["time_s"] for e in found)


def test_without_a_supervisor_nothing_is_written_but_events(monkeypatch, tmp_path):
    monkeypatch.delenv(heartbeat.VARIABLE, raising=False)
    heartbeat.begin()
    heartbeat.enter("step", 1)
    heartbeat.end()
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_of_the_process_begins_anew(beating, tmp_path):
    heartbeat.attach(EventLog(tmp_path, 1))
    heartbeat.end()
    heartbeat.enter("bring-up")
    assert [e["name"] for e in read_json_lines(tmp_path / "events.jsonl")[0]] == ["start-up"]

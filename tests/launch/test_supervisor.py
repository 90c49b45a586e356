"""Attempts with small real processes in place of training."""

import json
import os
import subprocess
import sys
import time

import pytest

from sharder import heartbeat
from sharder.channel import Ending
from sharder.config import UserError
from sharder.heartbeat import Beat
from sharder.launch.logs import log_folder
from sharder.launch.processes import Launch, Worker, worker_environment
from sharder.launch.supervisor import Options, launch, stopped_by_itself
from sharder.launch.watch import Limits, Pace, Watch
from sharder.lifeline import PARENT
from sharder.stop import ELSEWHERE

SLEEP = "import time; time.sleep(600)"
KILL_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def run(tmp_path):
    """Starts a Python process for each code, and watches them to their end."""
    launched = Launch([], tmp_path)
    workers = []

    def run(*codes, limits=Limits(), beats=None, first=0):
        for index, code in enumerate(codes, first):
            log, beat = tmp_path / f"process_{index}.log", tmp_path / f"heartbeat_{index}"
            beat.write_bytes((beats[index - first] if beats else Beat("start-up", 0, time.monotonic())).pack())
            with open(log, "wb") as output:
                environment = dict(os.environ) | {PARENT: launched.mark, heartbeat.VARIABLE: str(beat)}
                process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=output, start_new_session=True)
            workers.append(Worker(index, process, log, 0, beat))
        return Watch(launched, workers, limits).to_end()

    yield run
    launched.kill(workers)


def ended(process_id):
    try:
        return open(f"/proc/{process_id}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_success_is_the_success_of_all(run):
    assert run("", "").code == 0


def test_a_failure_ends_the_others_at_once(run):
    started = time.monotonic()
    outcome = run(SLEEP, "import sys; print('the last words', file=sys.stderr); sys.exit(3)")
    assert (outcome.code, outcome.culprit.process, outcome.culprit.exit_code) == (1, 1, 3)
    assert outcome.culprit.lines == ("the last words",)
    assert time.monotonic() - started < 60


def test_a_host_that_has_other_processes_than_the_first_names_its_own(run):
    outcome = run("", "import sys; print('the last words', file=sys.stderr); sys.exit(3)", first=4)
    assert (outcome.culprit.process, outcome.culprit.lines) == (5, ("the last words",))


def test_a_killed_process_is_the_culprit_though_a_peer_finds_words(run):
    outcome = run("import sys, time; time.sleep(0.1); sys.exit(2)", KILL_ITSELF)
    assert outcome.culprit.process == 1 and "SIGKILL" in outcome.culprit.what


def test_who_says_that_it_follows_another_is_not_the_culprit_though_it_is_gone_first(run):
    """Process 0 lets the others end before it does, and may take long to end."""
    words = Ending(0, 1, "MemoryError: x").last_words
    outcome = run(
        "import sys, time; time.sleep(2); print('MemoryError: x', file=sys.stderr); sys.exit(1)",
        f"import os, sys; print({words!r}, file=sys.stderr, flush=True); os.abort()",
    )
    assert (outcome.culprit.process, outcome.culprit.exit_code) == (0, 1)


def test_nobody_waits_for_the_culprit_of_another_host(run):
    words = Ending(0, None).last_words
    outcome = run(SLEEP, f"import os, sys; print({words!r}, file=sys.stderr, flush=True); os.abort()", first=4)
    assert outcome.culprit.process == 5


@pytest.mark.parametrize("code", [2, 75])
def test_the_users_mistakes_and_stops_keep_their_code(run, code):
    assert run(f"import sys; sys.exit({code})").code == code


def test_a_mistake_that_only_another_process_met_has_its_message(run, monkeypatch):
    monkeypatch.setattr("sharder.launch.watch.GRACE_S", 0.2)
    outcome = run(SLEEP, "import sys; print('error: the way out', file=sys.stderr); sys.exit(2)")
    assert outcome.code == 2 and "the way out" in outcome.culprit.lines[-1]


def test_grandchildren_end_too_even_in_a_session_of_their_own(run, tmp_path):
    code = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); sys.exit(1)"
    )
    run(code, SLEEP)
    grandchild = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while not ended(grandchild) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended(grandchild)


def test_a_process_that_does_not_report_is_stuck_and_shows_where(run):
    loop = (
        "import faulthandler, signal, sys; faulthandler.register(signal.SIGUSR1); print('ready', file=sys.stderr, flush=True)\n"
        "def forever():\n    while True: pass\nforever()"
    )
    beats = [Beat("compile", 0, time.monotonic() - 1), Beat("compile", 0, time.monotonic())]
    outcome = run(loop, SLEEP, limits=Limits(startup_s=8.0), beats=beats)
    assert outcome.code == 1 and outcome.culprit.process == 0 and "has not reported" in outcome.culprit.what
    assert any("in forever" in line for line in outcome.culprit.lines)


def test_a_stopped_process_is_the_culprit_though_the_others_gave_up_first(run, monkeypatch):
    monkeypatch.setattr("sharder.launch.watch.GRACE_S", 2.0)
    outcome = run("import sys; sys.exit(2)", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    assert (outcome.code, outcome.culprit.process) == (1, 1) and "SIGSTOP" in outcome.culprit.what


def test_the_limit_of_a_step_follows_the_median_and_spares_the_first():
    pace, limits = Pace(), Limits(startup_s=600.0)
    for step, time_s in ((1, 0.0), (2, 50.0), (3, 52.0), (4, 54.0), (5, 56.0), (6, 58.0)):
        beat = Beat("step", step, time_s)
        pace.see(beat)
        assert limits.of(beat, pace) == (600.0 if step < 3 else max(30.0, 20 * pace.median_s))
    assert pace.median_s == 2.0 and limits.of(beat, pace) == 40.0
    assert limits.of(Beat("save", 6, 58.0), pace) == 600.0
    assert Limits(step_s=5.0).of(beat, pace) == 5.0


@pytest.mark.parametrize(
    "events, by_itself",
    [
        ([("spawn", None), ("stopped", "runs/a/STOP")], True),
        ([("spawn", None), ("stopped", "--train.max-minutes 5")], True),
        ([("spawn", None), ("stopped", "SIGTERM")], False),
        ([("spawn", None), ("stopped", ELSEWHERE)], False),
        ([("stopped", "runs/a/STOP"), ("spawn", None)], False),
    ],
)
def test_a_signal_to_a_worker_is_no_stop_of_the_run_itself(tmp_path, events, by_itself):
    """A worker that a cluster evicts is started again; a run that was asked to stop is not."""
    lines = [json.dumps({"time_s": 1.0, "kind": kind, "reason": reason}) for kind, reason in events]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert stopped_by_itself(tmp_path) == by_itself


def test_the_environment_of_a_worker_is_whole_and_without_proxies_and_settings_of_another():
    found = worker_environment(
        {"http_proxy": "x", "HTTPS_PROXY": "y", "PATH": "p", "JAX_PROCESS_ID": "9", PARENT: "1.x"}, "host:1234", 4, 2
    )
    assert found == {"PATH": "p", "JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"processes": 0}, "--processes is 0"),
        ({"processes": 2, "min_processes": 3}, "--min-processes is 3"),
        ({"processes": 2, "max_restarts": -1}, "--max-restarts is -1"),
        ({"processes": 2, "limits": Limits(startup_s=0)}, "--startup-limit-s is 0"),
        ({"processes": 2, "limits": Limits(step_s=0)}, "--step-limit-s is 0"),
    ],
)
def test_what_cannot_be_supervised_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        Options(**options)


def test_logs_of_a_refused_command_leave_nothing(tmp_path):
    with log_folder(tmp_path / "a" / "run") as folder:
        (folder / "process_1.log").write_text("refused")
    assert list(tmp_path.iterdir()) == []


def test_logs_of_a_run_stay(tmp_path):
    with log_folder(tmp_path / "run") as folder:
        (folder / "process_1.log").write_text("trained")
        (tmp_path / "run" / "config.json").write_text("{}")
    assert (tmp_path / "run" / "logs" / "process_1.log").read_text() == "trained"


def test_a_foreign_folder_gets_no_logs(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="exists and is not a run"):
        launch(["recipes"], Options(1), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_the_way_of_the_run_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/run is a file, or lies below one"):
        launch(["recipes"], Options(1), tmp_path / "file" / "run")

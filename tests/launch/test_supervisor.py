import os
import subprocess
import sys
import time

import pytest

from sharder.config import UserError
from sharder.launch.supervisor import Worker, launch, log_folder, watch, worker_environment


def worker(index, code, log=None):
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL)
    return Worker(index, process, log)


SLEEP = "import time; time.sleep(60)"


def test_success_is_the_success_of_all():
    assert watch([worker(0, ""), worker(1, "")]) == 0


def test_a_failure_ends_the_others(monkeypatch, capsys):
    monkeypatch.setattr("sharder.launch.supervisor.GRACE_S", 0.2)
    workers = [worker(0, SLEEP), worker(1, "import sys; sys.exit(3)")]
    started = time.monotonic()
    assert watch(workers) == 1
    assert time.monotonic() - started < 10
    assert all(w.process.poll() is not None for w in workers)
    assert "process 1 of 2 exited with code 3" in capsys.readouterr().err


def test_an_abort_of_a_peer_is_not_the_culprit(capsys, tmp_path):
    """Peers of a dead process abort with -6 after it."""
    (tmp_path / "log").write_text("the last words")
    abort = worker(0, "import os; os.abort()")
    abort.process.wait()
    killed = worker(1, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", tmp_path / "log")
    assert watch([abort, killed]) == 1
    errors = capsys.readouterr().err
    assert "process 1 of 2 was ended by SIGKILL" in errors and "the last words" in errors


def test_the_first_that_ended_is_the_culprit(monkeypatch, capsys, tmp_path):
    """A peer of a killed process may end with a code of its own: a save that failed, a stop."""
    (tmp_path / "log").write_text("the last words")
    peer = worker(0, "import sys, time; time.sleep(1); sys.exit(2)")
    assert watch([peer, worker(1, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", tmp_path / "log")]) == 1
    assert "process 1 of 2 was ended by SIGKILL" in capsys.readouterr().err


def test_of_two_found_ended_at_once_the_killed_one_is_the_culprit(capsys, tmp_path):
    (tmp_path / "log").write_text("the last words")
    workers = [worker(0, "import sys; sys.exit(2)"), worker(1, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", tmp_path / "log")]
    for w in workers:
        w.process.wait()
    assert watch(workers) == 1
    assert "process 1 of 2 was ended by SIGKILL" in capsys.readouterr().err


@pytest.mark.parametrize("code", [2, 75])
def test_the_users_mistakes_and_stops_keep_their_code(code):
    assert watch([worker(0, f"import sys; sys.exit({code})")] * 1) == code


def test_grandchildren_end_too(monkeypatch, tmp_path):
    monkeypatch.setattr("sharder.launch.supervisor.GRACE_S", 0.2)
    code = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(60)"
    parent = worker(0, code)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    watch([parent, worker(1, "import sys; sys.exit(1)")])
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and os.path.exists(f"/proc/{pid}") and "Z" not in open(f"/proc/{pid}/stat").read().split()[2]:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}") or open(f"/proc/{pid}/stat").read().split()[2] == "Z"


def test_the_environment_of_a_worker_is_whole_and_without_proxies():
    found = worker_environment({"http_proxy": "x", "HTTPS_PROXY": "y", "PATH": "p", "JAX_PROCESS_ID": "9"}, 1234, 4, 2)
    assert found == {"PATH": "p", "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}


def test_no_processes_is_refused(tmp_path):
    with pytest.raises(UserError, match="--processes is 0"):
        launch(["recipes"], 0, tmp_path)


def test_a_mistake_that_only_another_process_met_is_shown(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("sharder.launch.supervisor.GRACE_S", 0.2)
    (tmp_path / "log").write_text("error: the way out")
    assert watch([worker(0, SLEEP), worker(1, "import sys; sys.exit(2)", tmp_path / "log")]) == 2
    assert "the way out" in capsys.readouterr().err


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
        launch(["recipes"], 1, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_the_way_of_the_run_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/run is a file, or lies below one"):
        launch(["recipes"], 1, tmp_path / "file" / "run")

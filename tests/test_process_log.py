import subprocess
import sys

from sharder.process_log import ProcessLog, log_path

PRINTS = """
import os, sys
from pathlib import Path
from sharder.process_log import ProcessLog
with ProcessLog() as log:
    print("early")
    print("to error", file=sys.stderr)
    log.open(Path(sys.argv[1]), 3, "attempt 1, process 3 of 4")
    print("late", flush=True)
    print("\\x1b[2K progress")
    {then}
"""


def prints(run_dir, then="pass", **named):
    return subprocess.run([sys.executable, "-c", PRINTS.format(then=then), str(run_dir)], text=True, **named)


def test_what_a_process_prints_is_printed_and_kept(tmp_path):
    result = prints(tmp_path, capture_output=True)
    assert result.stdout == "early\nlate\n\x1b[2K progress\n" and result.stderr == "to error\n"
    heading, *lines = log_path(tmp_path, 3).read_text().splitlines()
    assert "attempt 1, process 3 of 4; number " in heading and lines[:3] == ["early", "to error", "late"]
    assert not any("progress" in line for line in lines)


def test_a_later_attempt_is_appended(tmp_path):
    for _ in range(2):
        prints(tmp_path, capture_output=True)
    assert log_path(tmp_path, 3).read_text().count("late\n") == 2


def test_the_last_words_of_a_process_that_ends_natively_are_there(tmp_path):
    prints(tmp_path, "os.abort()", capture_output=True)
    text = log_path(tmp_path, 3).read_text()
    assert "late\n" in text and "Fatal Python error: Aborted" in text


def test_an_exception_is_kept(tmp_path):
    prints(tmp_path, "raise ValueError('the reason')", capture_output=True)
    assert "ValueError: the reason" in log_path(tmp_path, 3).read_text()


def test_what_the_launcher_sends_there_already_is_not_doubled(tmp_path):
    log_path(tmp_path, 3).parent.mkdir()
    with open(log_path(tmp_path, 3), "ab") as log:
        prints(tmp_path, stdout=log, stderr=log)
    assert log_path(tmp_path, 3).read_text().count("late\n") == 1


def test_nothing_is_written_before_it_is_opened(tmp_path, capsys):
    with ProcessLog():
        print("refused")
    assert capsys.readouterr().out == "refused\n" and list(tmp_path.iterdir()) == []

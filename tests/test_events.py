import subprocess
import sys

import pytest

from sharder import events
from sharder.events import EventLog, LineFile, read_json_lines


def test_lines_that_are_no_objects_are_counted_not_returned(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n\xff\n42\nnull\n[1]\n{"a": 2}\n{"a": ')
    assert read_json_lines(tmp_path / "x.jsonl") == ([{"a": 1}, {"a": 2}], 5)


def test_an_event_is_in_the_file_at_once(tmp_path):
    log = EventLog(tmp_path, attempt=3)
    log.write("start", 7)
    assert [(e["kind"], e["attempt"], e["step"]) for e in read_json_lines(tmp_path / "events.jsonl")[0]] == [("start", 3, 7)]


def test_a_line_that_cannot_be_written_names_its_file(tmp_path):
    """And leaves nothing behind that would be written at exit."""
    code = (
        "import resource, signal, sys; from pathlib import Path; from sharder.events import LineFile\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "lines = LineFile(Path(sys.argv[1]))\n"
        "for text in ('12345', '12345', 'x'): lines.write(text)\n"
        "try: lines.close()\n"
        "except OSError as error: print(error.filename)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path / "x"], capture_output=True, text=True)
    assert (
        result.stdout == f"{tmp_path / 'x'}\n"
        and result.stderr.count("cannot be written: File too large. Its lines wait in memory") == 1
    )
    assert (tmp_path / "x").read_text() == "12345\n1234"


def test_lines_that_wait_are_written_when_there_is_room_again(tmp_path, capsys):
    lines = LineFile(tmp_path / "x")
    lines.write("a")
    file, lines._file = lines._file, open("/dev/full", "ab", buffering=0)
    lines.write("b")
    lines.write("c")
    lines._file = file
    lines.write("d")
    lines.close()
    assert (tmp_path / "x").read_text() == "a\nb\nc\nd\n" and capsys.readouterr().err.count("No space left") == 1


def test_memory_for_lines_that_wait_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "MAX_WAITING_BYTES", 100)
    lines = LineFile(tmp_path / "x")
    lines._file = open("/dev/full", "ab", buffering=0)
    with pytest.raises(OSError, match="No space left"):
        for _ in range(20):
            lines.write("0123456789")

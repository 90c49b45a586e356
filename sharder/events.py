"""Events of a run, one JSON line each in RUN_DIR/events.jsonl. Standard library only."""

import json
import os
import sys
import threading
import time
from pathlib import Path

from sharder.fields import UserError

MAX_WAITING_BYTES = 64 << 20
"""Of lines that a full disk does not take; about a million."""


class LineFile:
    """Appends lines to a file, each at once and unbuffered, so that a kill loses at most the line being written.

    Lines that cannot be written (the disk is full, or a limit on file sizes is reached) wait in memory, in order, and are written
    with the next line that can be; that is said once. Any thread may write.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = open(path, "ab", buffering=0)
        self._lock = threading.Lock()
        self._waiting = b""
        self._has_said = False

    def write(self, line: str) -> None:
        """Raises OSError naming the file where more waits than memory should hold."""
        with self._lock:
            self._waiting += line.encode() + b"\n"
            error = self._flush()
        if error is not None and len(self._waiting) > MAX_WAITING_BYTES:
            raise error
        if error is not None and not self._has_said:
            self._has_said = True
            print(
                f"{error.filename} cannot be written: {error.strerror}. Its lines wait in memory.", file=sys.stderr, flush=True
            )

    def _flush(self) -> OSError | None:
        try:
            while self._waiting:
                written = self._file.write(self._waiting)
                self._waiting = self._waiting[written:]
        except OSError as error:
            return OSError(error.errno, error.strerror, str(self.path))

    def close(self) -> None:
        """Raises OSError naming the file where lines are lost."""
        with self._lock:
            error = self._flush()
            self._file.close()
        if error is not None:
            raise error


class EventLog:
    """Appends events. Without a run_dir nothing is written: process 0 keeps the log for all."""

    def __init__(self, run_dir: Path | None, attempt: int, process: int = 0):
        self.attempt, self.process = attempt, process
        self._lines = LineFile(Path(os.devnull) if run_dir is None else run_dir / "events.jsonl")

    def write(self, kind: str, step: int | None = None, **fields) -> None:
        record = {"time_s": time.time(), "kind": kind, "attempt": self.attempt, "process": self.process, "step": step, **fields}
        self._lines.write(json.dumps(record))

    def close(self) -> None:
        self._lines.close()


def parse_json_lines(path: Path) -> list[dict | None]:
    """Every line of a .jsonl file in order, None where it is no object; nothing where there is no file.

    Raises UserError where the file cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Restore it from a copy.") from None
    return [_parse(line) for line in content.splitlines()]


def _parse(line: bytes) -> dict | None:
    try:
        record = json.loads(line)
    except ValueError:  # also where it is not UTF-8
        return None
    return record if isinstance(record, dict) else None


def read_json_lines(path: Path) -> tuple[list[dict], int]:
    """All whole records of a .jsonl file, and how many lines were not readable (a kill truncates the last)."""
    parsed = parse_json_lines(path)
    records = [record for record in parsed if record is not None]
    return records, len(parsed) - len(records)


def end_with_newline(path: Path) -> None:
    """Closes a line that a kill cut off, so that the next record starts on its own line."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")

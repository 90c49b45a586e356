"""Events of a run, one JSON line each in RUN_DIR/events.jsonl. Standard library only."""

import errno
import json
import os
import time
from pathlib import Path

from sharder.fields import UserError


class LineFile:
    """Appends lines to a file, each at once and unbuffered, so that a kill loses at most the line being written.

    Raises OSError naming the file where one cannot be written whole: the disk is full, or a limit on file sizes is reached.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = open(path, "ab", buffering=0)

    def write(self, line: str) -> None:
        content = line.encode() + b"\n"
        try:
            written = self._file.write(content)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        if written != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        self._file.close()


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

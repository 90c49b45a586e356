"""Events of a run, one JSON line each in RUN_DIR/events.jsonl. Standard library only."""

import json
import os
import time
from pathlib import Path


class EventLog:
    """Appends events; every line is flushed at once, so that a kill loses at most the line being written.

    Without a run_dir nothing is written: process 0 keeps the log for all.
    """

    def __init__(self, run_dir: Path | None, attempt: int, process: int = 0):
        self.attempt, self.process = attempt, process
        self._file = open(os.devnull if run_dir is None else run_dir / "events.jsonl", "a")

    def write(self, kind: str, step: int | None = None, **fields) -> None:
        record = {"time_s": time.time(), "kind": kind, "attempt": self.attempt, "process": self.process, "step": step, **fields}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: Path) -> tuple[list[dict], int]:
    """All whole records of a .jsonl file, and how many lines were not readable (a kill truncates the last)."""
    records, broken = [], 0
    if not path.exists():
        return records, broken
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            broken += 1
            continue
        records.append(record)
    return records, broken


def end_with_newline(path: Path) -> None:
    """Closes a line that a kill cut off, so that the next record starts on its own line."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")

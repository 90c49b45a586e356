"""RUN_DIR/logs/process_N.log: a copy of what each process of a run prints. Standard library only."""

import faulthandler
import os
import socket
import sys
import time
import traceback
from pathlib import Path


def log_path(run_dir: Path, index: int) -> Path:
    return run_dir / "logs" / f"process_{index}.log"


class ProcessLog:
    """A context in which what this process prints is copied. It is kept in memory until `open`: a command that is refused
    leaves nothing behind."""

    def __init__(self):
        self._kept: list[bytes] = []
        self._file: int | None = None
        self._replaced: tuple | None = None

    def __enter__(self) -> "ProcessLog":
        self._replaced = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_Copied(stream, self) for stream in self._replaced)
        return self

    def open(self, run_dir: Path, index: int, heading: str) -> None:
        """The file, to which earlier attempts wrote too. Raises OSError where it cannot be made."""
        path = log_path(run_dir, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        is_copy = self._prints_to(path)
        kept, self._kept = b"" if is_copy else b"".join(self._kept), []
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        self.write(f"--- {when} {heading}; number {os.getpid()} on {socket.gethostname()}\n".encode() + kept)
        if not faulthandler.is_enabled():
            faulthandler.enable(self._file)
        if is_copy:
            self._restore()

    @staticmethod
    def _prints_to(path: Path) -> bool:
        """Whether standard error is this very file already, as the launcher arranges it."""
        try:
            return os.path.samestat(os.fstat(2), os.stat(path))
        except OSError:
            return False

    def write(self, content: bytes) -> None:
        """Appends, at once. A disk that is full loses lines of the log, and nothing else."""
        if self._file is None:
            self._kept.append(content)
            return
        try:
            os.write(self._file, content)
        except OSError:
            pass

    def _restore(self) -> None:
        if self._replaced is not None:
            (sys.stdout, sys.stderr), self._replaced = self._replaced, None

    def __exit__(self, kind, error, trace) -> None:
        if error is not None and self._replaced is not None:
            self.write("".join(traceback.format_exception(kind, error, trace)).encode(errors="replace"))
        self._restore()
        # The file stays open for what ends the process natively.


class _Copied:
    """A stream whose text goes into the log too, but for what moves the cursor of a terminal."""

    def __init__(self, stream, log: ProcessLog):
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        if "\x1b" not in text:
            self._log.write(text.encode(errors="replace"))
        return self._stream.write(text)

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

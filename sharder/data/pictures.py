"""Pictures of a batch: decoded in this process, or divided among worker processes."""

import os
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np

from sharder.config import UserError
from sharder.data.frames import FrameReader, Wanted

MAX_WORKERS = 8


def default_workers() -> int:
    """One less than the cores that this process may use, at most 8, at least 1."""
    return min(MAX_WORKERS, max(1, len(os.sched_getaffinity(0)) - 1))


def divide(jobs: list[Wanted], parts: int) -> list[list[tuple[int, np.ndarray, Wanted]]]:
    """The rows of all jobs in at most `parts` pieces of nearly the same number of rows, neighbours kept together.

    A piece lists (job, places in the job's rows, what to read).
    """
    order = [np.argsort(job.rows, kind="stable") for job in jobs]
    ends = np.cumsum([len(o) for o in order])
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.linspace(0, total, parts + 1).astype(int)
    pieces = []
    for low, high in zip(cuts[:-1], cuts[1:]):
        piece = []
        for number, (job, o) in enumerate(zip(jobs, order)):
            begin = int(ends[number]) - len(o)
            places = o[max(0, low - begin) : max(0, high - begin)]
            if len(places):
                piece.append((number, places, job.at(places)))
        if piece:
            pieces.append(piece)
    return pieces


class Worker:
    """A `decode_worker` process, at this end."""

    def __init__(self, settings: tuple):
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "sharder.data.decode_worker", str(theirs.fileno()), str(os.getpid())]
        # A signal to the whole group is for the parent to act on: it may have a step to finish, with pictures from here.
        # The worker inherits the mask, so that no signal finds it unprepared.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        try:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.connection: Connection = ours
        self.connection.send(settings)

    def end(self) -> None:
        self.connection.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Pictures:
    """Reads pictures by file and row. Safe to call from several threads, one at a time is served.

    With `num_workers` 0 everything happens in the calling thread. A worker that dies is replaced, and its work done once more.
    """

    def __init__(self, height_width: tuple[int, int] | None, num_workers: int = 0, cache_bytes: int = 0):
        """`cache_bytes`: for decoded pictures, over all workers."""
        self._settings = (height_width, cache_bytes // max(1, num_workers))
        self._lock = threading.Lock()
        self._reader = FrameReader(*self._settings) if num_workers == 0 else None
        self._workers = [Worker(self._settings) for _ in range(num_workers)]

    def read(self, jobs: list[Wanted]) -> list[np.ndarray]:
        """For each job uint8 (rows, height, width, 3). Raises UserError naming file and frame."""
        with self._lock:
            if self._reader is not None:
                return [self._reader.read(job) for job in jobs]
            return self._read_with_workers(jobs)

    def _read_with_workers(self, jobs: list[Wanted]) -> list[np.ndarray]:
        pieces = divide(jobs, len(self._workers))
        for number, piece in enumerate(pieces):
            self._send(number, piece)
        # Every answer is taken before any is acted on, so that the next question finds no old answers.
        answers = [self._receive(number, piece) for number, piece in enumerate(pieces)]
        found: list = [None] * len(jobs)
        for piece, (kind, value) in zip(pieces, answers):
            if kind == "user":
                raise UserError(value)
            if kind == "failed":
                raise RuntimeError(f"a worker could not decode pictures:\n{value}")
            for (number, places, _), pictures in zip(piece, value):
                if found[number] is None:
                    found[number] = np.empty((len(jobs[number].rows), *pictures.shape[1:]), np.uint8)
                found[number][places] = pictures
        return found

    def _send(self, number: int, piece: list) -> None:
        try:
            self._workers[number].connection.send([wanted for _, _, wanted in piece])
        except OSError:
            pass  # it is gone, as `_receive` will find

    def _receive(self, number: int, piece: list) -> tuple[str, object]:
        for attempt in range(2):
            try:
                return self._workers[number].connection.recv()
            except (EOFError, OSError):
                self._workers[number].end()
                code = self._workers[number].process.returncode
                self._workers[number] = Worker(self._settings)
                if attempt == 0:
                    self._send(number, piece)
        paths = sorted({wanted.path for _, _, wanted in piece})
        raise RuntimeError(
            f"a worker that decodes pictures died twice (last with {code}) over {', '.join(paths[:3])}; is there enough memory?"
        )

    def close(self) -> None:
        with self._lock:
            for worker in self._workers:
                worker.end()
            self._workers = []
            if self._reader is not None:
                self._reader.close()

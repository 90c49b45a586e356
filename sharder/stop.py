"""What asks a run to stop: signals, a STOP file, a time limit. Standard library only: signals must be blocked before jax starts
its threads.

JAX's own notifier would take SIGTERM, fire about a second late, and only once (measured with 0.10.2). Here the
signals are blocked everywhere and a thread waits for them, so one is seen at once even inside a long compilation.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

PREEMPTED = 75
"""Exit code of a run that was stopped and can be resumed (EX_TEMPFAIL)."""

ELSEWHERE = "a signal to another process"
"""Why a run stops whose process 0 was not asked to."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 120.0
POLL_S = 0.5


class StopRequest:
    """Becomes `requested` with the first signal; a second one ends the process at once.

    Until `training` is called there is nothing new to save, so that the first signal ends the process already, and the others
    of its run, which `tell` lets know; while they are still to be found (`wait_for_others`) it becomes `requested` only.
    """

    def __init__(self):
        self.requested = False
        self.reason = ""
        self.grace_s = GRACE_S
        """From the first request to the end of the process, saved or not."""
        self._listening = self._signalled = self._training = self._others_awaited = False
        self._tell: Callable[[int, str], None] = lambda code, text: None
        self._lock = threading.RLock()
        self._started = time.monotonic()
        self._closed = threading.Event()

    def listen(self) -> "StopRequest":
        """Starts to wait for signals; call it before jax is imported."""
        self._listening = True
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=self._wait, name="signals", daemon=True).start()
        return self

    def wait_for_others(self) -> None:
        """Until `found_others`, a request is for those to hear who meet this process."""
        with self._lock:
            self._others_awaited = True

    def found_others(self, tell: Callable[[int, str], None]) -> None:
        """`tell` lets the other processes know that this one ends, with an exit code and a reason."""
        with self._lock:
            self._others_awaited, self._tell = False, tell
            if self._listening and self.requested:
                self._end("before the first step; nothing is lost")

    def training(self) -> None:
        """From now on a request is carried by the steps, and what was trained is saved."""
        with self._lock:
            self._training = True

    def watch(self, file: Path, max_minutes: float | None) -> None:
        """Requests a stop when `file` appears, or `max_minutes` after this object was made; until `close`."""

        def poll() -> None:
            while not self._closed.wait(POLL_S):
                if file.exists():
                    return self.request(f"{file}")
                if max_minutes is not None and time.monotonic() - self._started >= 60 * max_minutes:
                    return self.request(f"--train.max-minutes {max_minutes:g}")

        threading.Thread(target=poll, name="stop file", daemon=True).start()

    def close(self) -> None:
        """No more requests, but by signals."""
        self._closed.set()

    def request(self, reason: str, is_signal: bool = False) -> None:
        """The first request saves and stops; a second signal ends the process."""
        with self._lock:
            if is_signal and self._signalled:
                self.reason = reason
                self._end("without a save")
            self._signalled |= is_signal
            if self.requested:
                return
            self.requested, self.reason = True, reason
            if self._listening:
                if not self._training and not self._others_awaited:
                    self._end("before the first step; nothing is lost")
                threading.Thread(target=self._end_after_grace, name="grace", daemon=True).start()
        if self._training:
            print(f"{reason}: finishing the step, then saving; a second signal ends at once.", file=sys.stderr, flush=True)

    def _wait(self) -> None:
        while True:
            self.request(signal.Signals(signal.sigwait(SIGNALS)).name, is_signal=True)

    def _end_after_grace(self) -> None:
        time.sleep(self.grace_s)
        with self._lock:
            late = "without a save, which took" if self._training else "before the first step; telling the others took"
            self._end(f"{late} more than {self.grace_s:g} s (--cluster.grace-s)")

    def _end(self, how: str) -> None:
        text = f"{self.reason}: ended {how}; resume with the same command."
        print(text, file=sys.stderr, flush=True)
        self._tell(PREEMPTED, text)
        os._exit(PREEMPTED)

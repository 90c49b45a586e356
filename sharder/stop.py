"""Signals that ask a run to stop. Standard library only: signals must be blocked before jax starts its threads.

JAX's own notifier would take SIGTERM, fire about a second late, and only once (measured with 0.10.2). Here the
signals are blocked everywhere and a thread waits for them, so one is seen at once even inside a long compilation.
"""

import os
import signal
import sys
import threading

PREEMPTED = 75
"""Exit code of a run that was stopped and can be resumed (EX_TEMPFAIL)."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Becomes `requested` with the first signal; a second one ends the process at once.

    Until `training` is called there is nothing new to save, so that the first signal ends the process already.
    """

    def __init__(self):
        self.requested = False
        self.reason = ""
        self._training = False
        self._lock = threading.Lock()

    def listen(self) -> "StopRequest":
        """Starts to wait for signals; call it before jax is imported."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=self._wait, name="signals", daemon=True).start()
        return self

    def training(self) -> None:
        with self._lock:
            self._training = True

    def _wait(self) -> None:
        while True:
            name = signal.Signals(signal.sigwait(SIGNALS)).name
            with self._lock:
                if self.requested or not self._training:
                    saved = "without a save" if self.requested else "before the first step; nothing is lost"
                    print(f"{name}: ended {saved}; resume with the same command.", file=sys.stderr, flush=True)
                    os._exit(PREEMPTED)
                self.requested, self.reason = True, name
            print(f"{name}: finishing the step, then saving; a second signal ends at once.", file=sys.stderr, flush=True)

"""Where a process's own time goes between steps: RUN_DIR/steps/process_N.jsonl, one line for every ten steps.

The main thread is always in one part, or in none (`other`): waiting for the loader to read (data_wait) or to copy to the devices
(host_to_device), handing a step to the devices (dispatch), waiting for its results (device), making its record and writing it
(logging), saving (checkpoint) or evaluating (evaluation). The parts and `other` sum to wall time.
"""

import json
import time
from contextlib import contextmanager
from pathlib import Path

from sharder.events import LineFile, end_with_newline

PARTS = ("data_wait", "host_to_device", "dispatch", "device", "checkpoint", "evaluation", "logging")
WINDOW = 10
"""Steps of a line, counted from step 0, so that lines of all processes are of the same steps."""


class StepLedger:
    """Of one process. Without a run_dir it counts and writes nothing."""

    def __init__(self, run_dir: Path | None, process: int, attempt: int = 1):
        self.process, self.attempt = process, attempt
        self._lines = None
        if run_dir is not None:
            path = run_dir / "steps" / f"process_{process}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            end_with_newline(path)
            self._lines = LineFile(path)
        self.restart()

    def restart(self) -> None:
        """Forgets what was before: call it when the first step begins."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._began, self._num_steps = time.perf_counter(), 0

    @contextmanager
    def part(self, name: str):
        """Counts the time inside to a part."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started

    def move(self, source: str, target: str, seconds: float) -> None:
        """Of what was counted to one part, so much belongs to another."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def end_step(self, step: int) -> None:
        """`step` steps are complete."""
        self._num_steps += 1
        if step % WINDOW == 0:
            self.write(step)

    def write(self, step: int) -> None:
        """Writes a line of the steps since the last one, if there are any."""
        if self._num_steps == 0:
            return
        wall_s = time.perf_counter() - self._began
        parts = {f"{name}_s": round(seconds, 6) for name, seconds in self.seconds.items()}
        record = {"time_s": time.time(), "attempt": self.attempt, "process": self.process, "step": step, "num_steps": self._num_steps,
                  "wall_s": round(wall_s, 6), **parts, "other_s": round(wall_s - sum(self.seconds.values()), 6)}  # fmt: skip
        if self._lines is not None:
            self._lines.write(json.dumps(record))
        self.restart()

    def close(self, step: int) -> None:
        self.write(step)
        if self._lines is not None:
            self._lines.close()


class NoLedger(StepLedger):
    """Counts nothing: what a benchmark compares with."""

    def __init__(self):
        super().__init__(None, 0)

    @contextmanager
    def part(self, name: str):
        yield

    def end_step(self, step: int) -> None:
        pass

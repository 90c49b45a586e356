"""Interpreters that have loaded jax already, so that a restart need not wait for imports.

A spare is `python -m sharder.launch.spares`; one line of JSON on its standard input makes a worker of it. Imports of jax are
inside `main`: the supervisor, which imports this module, has none.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

from sharder.lifeline import PARENT, hold


class Spares:
    """Spare interpreters of one launch."""

    def __init__(self, mark: str):
        self.mark = mark
        self._spares: list[subprocess.Popen] = []

    def fill(self, num: int) -> None:
        """Starts spares until there are `num`; they take seconds until they are ready."""
        self._spares = [spare for spare in self._spares if spare.poll() is None]
        while len(self._spares) < num:
            environment = dict(os.environ) | {PARENT: self.mark}
            self._spares.append(
                subprocess.Popen(
                    [sys.executable, "-m", "sharder.launch.spares"],
                    env=environment,
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                )
            )

    def take(
        self, module: str, arguments: list[str], environment: dict[str, str], log: Path, quiet: bool
    ) -> subprocess.Popen | None:
        """A worker made of a spare, or None where there is none. `quiet`: its standard output goes to the log too."""
        while self._spares:
            spare = self._spares.pop(0)
            job = {"module": module, "arguments": arguments, "environment": environment, "log": str(log), "quiet": quiet}
            try:
                spare.stdin.write(json.dumps(job).encode() + b"\n")
                spare.stdin.close()
            except OSError:  # it has ended
                spare.wait()
                continue
            return spare
        return None

    def pids(self) -> set[int]:
        return {spare.pid for spare in self._spares}

    def close(self) -> None:
        for spare in self._spares:
            spare.kill()
            spare.stdin.close()
            spare.wait()
        self._spares = []


def main() -> None:
    """Loads what a training run needs, waits for the line, and does as told."""
    hold(dict(os.environ))
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # before jax has threads (sharder.stop)
    import orbax.checkpoint  # noqa: F401

    import sharder.train.loop  # noqa: F401

    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(0)
    job = json.loads(line)
    os.environ.clear()
    os.environ.update(job["environment"])
    log = os.open(job["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 2)
    if job["quiet"]:
        os.dup2(log, 1)
    os.close(log)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # `python -m MODULE`, but for what is imported already.
    sys.argv = [job["module"], *job["arguments"]]
    runpy.run_module(job["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

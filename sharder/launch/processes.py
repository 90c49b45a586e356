"""The processes of one attempt: started in groups of their own, and ended for certain."""

import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from sharder import heartbeat as hearts
from sharder.config import UserError
from sharder.launch import guard
from sharder.launch.spares import Spares
from sharder.lifeline import PARENT, STACKS_SIGNAL

MODULE = "sharder"
"""What a worker runs, `python -m`; another one only where faults are injected (sharder.launch.faults)."""

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
"""They would catch the connection to the coordinator."""


@dataclass
class Worker:
    """A started process, the leader of its own group."""

    index: int
    process: subprocess.Popen
    log: Path | None = None
    """Its standard error; beside process 0 its standard output too."""
    log_start: int = 0
    """Where this attempt's part of the log begins."""
    heartbeat: Path | None = None

    def beat(self) -> hearts.Beat | None:
        try:
            return None if self.heartbeat is None else hearts.read(self.heartbeat)
        except OSError:
            return None

    def last_lines(self, num: int = 10) -> list[str]:
        if self.log is None:
            return []
        try:
            with open(self.log, "rb") as file:
                file.seek(max(self.log_start, os.fstat(file.fileno()).st_size - 20_000))
                return file.read().decode(errors="replace").splitlines()[-num:]
        except OSError:
            return []

    def is_stopped(self) -> bool:
        """By SIGSTOP, as the kernel says."""
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except (OSError, IndexError):
            return False

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)


@dataclass
class Launch:
    """What all attempts of a launch share."""

    arguments: list[str]
    log_dir: Path
    spares: Spares | None = None
    mark: str = field(default_factory=lambda: f"{os.getpid()}.{secrets.token_hex(8)}")
    _guard: subprocess.Popen | None = None

    def open(self) -> None:
        """Starts the guard, which ends everything should this process be killed."""
        command = [sys.executable, "-I", "-S", guard.__file__, f"{PARENT}={self.mark}"]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)

    def close(self) -> None:
        """Ends everything that is left of the launch."""
        if self.spares is not None:
            self.spares.close()
        guard.sweep(f"{PARENT}={self.mark}")
        if self._guard is not None:
            self._guard.stdin.close()
            self._guard.wait()

    def start(self, num_processes: int) -> list[Worker]:
        """Starts `sharder <arguments>` so many times, from spare interpreters where there are any."""
        coordinator = f"127.0.0.1:{free_port()}"
        return [self.start_one(index, num_processes, coordinator) for index in range(num_processes)]

    def start_one(self, index: int, num_processes: int, coordinator: str) -> Worker:
        """Process `index` of so many, which find one another at `coordinator` (host:port)."""
        log, beat = self.log_dir / f"process_{index}.log", self.log_dir / f"heartbeat_{index}"
        hearts.create(beat)
        environment = worker_environment(dict(os.environ), coordinator, num_processes, index)
        environment |= {PARENT: self.mark, hearts.VARIABLE: str(beat)}
        with open(log, "ab") as errors:
            log_start = errors.tell()
            process = self.spares and self.spares.take(MODULE, self.arguments, environment, log, quiet=index > 0)
            if process is None:
                command = [sys.executable, "-m", MODULE, *self.arguments]
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=errors if index else None, stderr=errors,
                    start_new_session=True,
                )  # fmt: skip
        return Worker(index, process, log, log_start, beat)

    def kill(self, workers: list[Worker]) -> None:
        """Ends them and everything that they started, for certain."""
        for worker in workers:
            try:
                os.killpg(worker.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for worker in workers:
            worker.process.wait()
        guard.sweep(f"{PARENT}={self.mark}", self.spares.pids() if self.spares else set())


def free_port() -> int:
    """Raises UserError where the machine has none."""
    try:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            return sock.getsockname()[1]
    except OSError as error:
        raise UserError(f"there is no free port for the coordinator: {error.strerror}. End other programs, or wait.") from None


def worker_environment(environ: dict[str, str], coordinator: str, num_processes: int, index: int) -> dict[str, str]:
    """The environment of one worker: whole, and without what was meant for another process."""
    kept = {k: v for k, v in environ.items() if k.lower() not in PROXIES and k not in (PARENT, hearts.VARIABLE)}
    return kept | {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": str(num_processes),
        "JAX_PROCESS_ID": str(index),
    }


def ask_for_stacks(workers: list[Worker]) -> None:
    """Lets each print where its threads are; one that has not come far enough to answer would end, and is left out."""
    for worker in workers:
        beat = worker.beat()
        if beat is not None and beat.phase != "start-up":
            worker.signal(STACKS_SIGNAL)

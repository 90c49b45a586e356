"""Starts the processes of a run on this machine, and ends all of them when one fails. Imports no jax."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sharder.config import UserError
from sharder.facts import is_run

POLL_S = 0.1
GRACE_S = 5.0
"""How long the others may take to end by themselves after one has failed."""


@dataclass(frozen=True)
class Worker:
    """One started process, the leader of its own process group."""

    index: int
    process: subprocess.Popen
    log: Path | None
    """Where its output goes; process 0 writes to the terminal."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def worker_environment(environ: dict[str, str], port: int, num_processes: int, index: int) -> dict[str, str]:
    """The environment of one worker; proxies would catch the connection to the coordinator."""
    kept = {k: v for k, v in environ.items() if k.lower() not in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")}
    return kept | {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(num_processes),
        "JAX_PROCESS_ID": str(index),
    }


def start(arguments: list[str], num_processes: int, log_dir: Path) -> list[Worker]:
    """Starts `sharder <arguments>` num_processes times."""
    port = free_port()
    log_dir.mkdir(parents=True, exist_ok=True)
    workers = []
    for index in range(num_processes):
        log = None if index == 0 else log_dir / f"process_{index}.log"
        output = None if log is None else open(log, "ab")
        command = [sys.executable, "-m", "sharder", *arguments]
        environment = worker_environment(dict(os.environ), port, num_processes, index)
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        if output is not None:
            output.close()
        workers.append(Worker(index, process, log))
    return workers


def kill(workers: list[Worker]) -> None:
    """Ends every process group for certain."""
    for worker in workers:
        try:
            os.killpg(worker.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    for worker in workers:
        worker.process.wait()


def forward_signals(workers: list[Worker]) -> None:
    """The first signal becomes a request to save and stop in every worker; the second ends them."""
    received = []

    def handle(number, _frame):
        received.append(number)
        for worker in workers:
            if worker.process.poll() is None:
                os.killpg(worker.process.pid, signal.SIGTERM if len(received) == 1 else signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)


def watch(workers: list[Worker]) -> int:
    """Waits until all have ended, or one has failed and the rest is ended; returns the exit code of the run.

    That is the code of the first that failed; -6 counts last, since peers of a dead process abort with it, and of several
    that ended within one look a signal counts first, since a peer of a killed process may still find words for its own end.
    """
    failed_at = None
    order: list[int] = []
    while True:
        codes = [w.process.poll() for w in workers]
        ended = [i for i, code in enumerate(codes) if code not in (None, 0) and i not in order]
        order += sorted(ended, key=lambda i: codes[i] > 0)
        if all(code is not None for code in codes):
            break
        if failed_at is None and any(code not in (None, 0) for code in codes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            kill([w for w, code in zip(workers, codes) if code is None])
            break
        time.sleep(POLL_S)
    if not order:
        return 0
    first = min(order, key=lambda i: codes[i] == -signal.SIGABRT)
    culprit, code = workers[first], codes[first]
    if code == 75 or (code == 2 and codes[0] == 2):
        return code
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    print(f"process {culprit.index} of {len(workers)} {how}; the others were ended.", file=sys.stderr)
    if culprit.log is not None:
        tail = culprit.log.read_text(errors="replace").splitlines()[-10:]
        print(f"the end of {culprit.log}:", *tail, sep="\n  ", file=sys.stderr)
    return 2 if code == 2 else 1


def launch(arguments: list[str], num_processes: int, run_dir: Path | None) -> int:
    """Runs `sharder <arguments>` in `num_processes` processes; returns the exit code.

    What processes beside 0 print goes to RUN_DIR/logs, or without a run to a temporary folder. Raises UserError for bad
    counts and for a folder that cannot hold a run.
    """
    if num_processes < 1:
        raise UserError(f"--processes is {num_processes}, but must be at least 1.")
    with log_folder(run_dir) as log_dir:
        workers = start(arguments, num_processes, log_dir)
        try:
            forward_signals(workers)
            return watch(workers)
        finally:
            kill(workers)


@contextlib.contextmanager
def log_folder(run_dir: Path | None) -> Iterator[Path]:
    """A folder for logs; nothing of it is left where no run was begun."""
    if run_dir is None:
        with tempfile.TemporaryDirectory(prefix="sharder-logs-") as folder:
            yield Path(folder)
        return
    existed = is_run(run_dir)
    made = [path for path in (run_dir / "logs", run_dir, *run_dir.parents) if not path.exists()]
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {run_dir} cannot be used: {error.strerror}. Choose another folder.") from None
    try:
        yield run_dir / "logs"
    finally:
        if not existed and not (run_dir / "config.json").exists():
            remove_logs(run_dir / "logs", made)


def remove_logs(log_dir: Path, made: list[Path]) -> None:
    """The logs of a run that was never begun, and the folders made for them."""
    for log in log_dir.glob("process_*.log"):
        log.unlink()
    for path in made:
        try:
            path.rmdir()
        except OSError:  # something else is in it
            return

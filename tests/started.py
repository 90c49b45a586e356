"""Processes of one run, each started by hand as on hosts of their own."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from small import RECIPE, environment

from sharder.events import read_json_lines
from sharder.launch.processes import free_port

LONG_S = 240
"""For what takes seconds on an idle machine."""


@contextmanager
def started(commands, count=None, extra=None, environments=None):
    """One process for each command, `sharder ...` or a script for `python -c`; killed at the end, if still there. `extra`:
    variables of all, `environments`: of each."""
    address = f"127.0.0.1:{free_port()}"
    processes = []
    for index, command in enumerate(commands):
        place = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(count or len(commands)),
            "JAX_PROCESS_ID": str(index),
        }
        arguments = ["-c", command] if isinstance(command, str) else ["-m", "sharder", *map(str, command)]
        own = {**(extra or {}), **(environments or {}).get(index, {})}
        env = environment(**place | {"PYTHONPATH": str(Path(__file__).parent)} | own)
        out = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        processes.append(subprocess.Popen([sys.executable, *arguments], env=env, stdin=subprocess.DEVNULL, **out))
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def ended(processes, timeout_s=LONG_S):
    """(exit code, output) of each."""
    until = time.monotonic() + timeout_s
    return [
        (output, p.returncode)[::-1]
        for p in processes
        for output in [p.communicate(timeout=max(1, until - time.monotonic()))[0]]
    ]


def train(run_dir, *options, recipe=RECIPE):
    return ("train", recipe, "--run-dir", run_dir, "--cluster.cpu-devices", 1, *options)


def wait_for(condition, processes, timeout_s=LONG_S):
    """Until the condition holds, or a process has ended, or time is up; returns whether it holds."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until and all(p.poll() is None for p in processes):
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def steps(run_dir):
    return [r["step"] for r in read_json_lines(run_dir / "metrics.jsonl")[0]]


def send(process, number=signal.SIGTERM):
    os.kill(process.pid, number)

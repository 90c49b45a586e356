"""How a process ends: its exit code, what it prints, and what the other processes of its run are told. Standard library only."""

import contextlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from sharder.config import UserError
from sharder.stop import PREEMPTED

CLOSED = 128 + signal.SIGPIPE
"""As a shell reports what ends because nobody reads it."""


def end_with(command: Callable[[], int], with_traceback: bool = False) -> NoReturn:
    """Runs a command and ends the process with the exit code that it returns, or that stands for what it raises."""
    try:
        code, text = _with_its_output(command), ""
    except UserError as error:
        code, text = 2, str(error)
        if with_traceback:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        code, text = 130, "interrupted."
        if with_traceback:
            traceback.print_exc()
        print(text, file=sys.stderr)
    except Exception as error:  # noqa: BLE001  ours or a library's: everything is said before the process ends
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            leave(CLOSED, "standard output was closed")
        code, text = 1, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        traceback.print_exc()
    leave(code, text)


def _with_its_output(command: Callable[[], int]) -> int:
    """What it returns, when all that it printed is written."""
    try:
        code = command()
    except SystemExit:  # of --help
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def _reader_is_gone() -> bool:
    """Whether what reads standard output has left, as `head` does; then nothing more is written to it."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return gone


def leave(code: int, text: str = "") -> NoReturn:
    """Exits; after a failure without waiting for anything: other processes of the run may be gone, jax would wait for them, and
    orbax ends the process natively where a save has failed."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    if code in (0, PREEMPTED):
        sys.exit(code)
    cluster = sys.modules.get("sharder.cluster")  # imported by what needs devices
    if cluster is not None:
        cluster.tell_end(code, text)
    os._exit(code)

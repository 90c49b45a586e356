"""Locks on files that the kernel releases when their holder ends, however it ends. Standard library only."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO


class InUse(Exception):
    """Another process has the lock; the text says which."""


@contextlib.contextmanager
def wait_for_lock(path: Path) -> Iterator[bool]:
    """Holds the lock, after whoever has it; yields False where the file system has no locks."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def take_lock(path: Path) -> IO[str]:
    """Takes the lock at once and writes who holds it; it is held until the file returned is closed or the process ends.

    Where the file system has no locks nothing is held. Raises InUse naming the holder, OSError where the file cannot be made.
    """
    while True:
        file = open(path, "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise InUse(holder) from None
        except OSError:
            return file
        # Whoever had it may have removed the file since it was opened.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file

"""Ends what a launch started when its supervisor is gone, however it went.

Run as a file of its own, with the launch's mark as argument; the end of standard input is the end of the supervisor.
Processes are found by the mark in their environment, which everything that they start inherits, in whatever group it is.
"""

import os
import signal
import sys
import time


def marked(mark: str) -> set[int]:
    """Processes whose environment had `mark` (NAME=value) when they were started."""
    wanted, found = mark.encode(), set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.add(int(entry))
        except OSError:  # it has ended, or is somebody else's
            pass
    return found


def sweep(mark: str, keep: set[int] = frozenset()) -> int:
    """Kills all processes with the mark but `keep`, and those that they start meanwhile; returns how many there were."""
    killed = set()
    for _ in range(100):
        left = marked(mark) - keep - {os.getpid()}
        if not left:
            break
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        killed |= left
        time.sleep(0.01)
    return len(killed)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(sys.argv[1])


if __name__ == "__main__":
    main()

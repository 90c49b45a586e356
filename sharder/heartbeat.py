"""What a process of a run says of itself: the phase it is in, its step, and since when. Standard library only.

`enter` notes it in a small file that is mapped into memory, where a supervisor reads it, and, on a change of phase, as an
event, from which the ledger of the run is made.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from sharder.events import EventLog

VARIABLE = "SHARDER_HEARTBEAT"
"""Names the file; without it there is no supervisor."""

PHASES = ("start-up", "bring-up", "set-up", "restore", "compile", "data", "step", "evaluate", "save", "end")
LOOP = ("data", "step")
"""These alternate in every step; the ledger takes them as one phase."""

FORMAT = struct.Struct("<iqd")


@dataclass(frozen=True)
class Beat:
    phase: str
    step: int
    """Completed steps once this one is done; 0 before the first."""
    time_s: float
    """When the phase or the step began, on the machine's monotonic clock."""

    def pack(self) -> bytes:
        return FORMAT.pack(PHASES.index(self.phase), self.step, self.time_s)


def create(path: Path) -> None:
    """The file of a process that is about to be started."""
    path.write_bytes(Beat("start-up", 0, time.monotonic()).pack())


def read(path: Path) -> Beat:
    """The last beat. Raises OSError where there is no such file."""
    content = path.read_bytes()
    while (again := path.read_bytes()) != content:  # it was being written
        content = again
    phase, step, time_s = FORMAT.unpack(content)
    return Beat(PHASES[phase], step, time_s)


class _Heart:
    """Of this process, which has one."""

    def __init__(self):
        self.phase, self.step = "start-up", 0
        self.events: EventLog | None = None
        self.waiting: list[dict] = [{"name": "start-up", "time_s": time.time()}]
        """Changes of phase before there was an event log."""
        self.map: mmap.mmap | None = None
        path = os.environ.get(VARIABLE)
        if path:
            with open(path, "r+b") as file:
                self.map = mmap.mmap(file.fileno(), FORMAT.size)


_heart: _Heart | None = None


def begin() -> None:
    """Call it as early as possible: it is when the process begins to start up."""
    global _heart
    _heart = _Heart()


def end() -> None:
    """The run is over; another one in this process begins anew."""
    global _heart
    _heart = None


def enter(phase: str, step: int | None = None) -> None:
    """Notes that a phase begins; in the loop, a step too. `step`: unset: as before."""
    if _heart is None:
        begin()
    heart = _heart
    changed = phase != heart.phase and not (phase in LOOP and heart.phase in LOOP)
    heart.phase, heart.step = phase, heart.step if step is None else step
    if heart.map is not None:
        heart.map[:] = Beat(phase, heart.step, time.monotonic()).pack()
    if changed:
        _note({"name": "step" if phase in LOOP else phase, "step": step, "time_s": time.time()})


def attach(events: EventLog) -> None:
    """From now on changes of phase are events; those so far are written."""
    if _heart is None:
        begin()
    _heart.events = events
    for fields in _heart.waiting:
        events.write("phase", **fields)
    _heart.waiting.clear()


def _note(fields: dict) -> None:
    if _heart.events is None:
        _heart.waiting.append(fields)
    else:
        _heart.events.write("phase", **fields)

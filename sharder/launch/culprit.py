"""Who failed, and why: pure functions of what was seen of the processes of an attempt."""

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sharder.channel import followed
from sharder.heartbeat import PHASES, Beat
from sharder.stop import PREEMPTED


@dataclass(frozen=True)
class Death:
    """A process that ended by itself, before the supervisor ended any."""

    process: int
    code: int
    """As of subprocess: minus the signal where one ended it."""
    beat: Beat | None
    lines: tuple[str, ...] = ()
    """The end of its log."""
    out_of_memory: bool = False
    """The kernel ended a process for lack of memory meanwhile."""

    @property
    def follows(self) -> int | None:
        """The process because of whose end this one ended, by its own words."""
        return next((n for line in reversed(self.lines) if (n := followed(line)) is not None), None)


@dataclass(frozen=True)
class Silent:
    """A process that is alive and has not reported for longer than it may."""

    process: int
    beat: Beat
    silent_s: float
    limit_s: float
    stopped: bool
    """The kernel says that it is stopped (SIGSTOP)."""


@dataclass(frozen=True)
class Culprit:
    process: int
    what: str
    """was ended by SIGKILL, exited with code 3, has not reported for 31 s (limit 30 s)."""
    phase: str
    step: int
    lines: tuple[str, ...]
    exit_code: int | None
    """None where it was alive; minus the signal where one ended it."""

    def to_json(self) -> dict:
        return asdict(self)

    @property
    def error(self) -> str:
        """What would be the same if the failure came again: the last words of a process that ended with words of its own."""
        return self.lines[-1].strip() if self.lines and self.exit_code is not None and self.exit_code > 0 else ""


OUT_OF_MEMORY = ("MemoryError", "bad_alloc", "RESOURCE_EXHAUSTED", "Out of memory", "Cannot allocate memory")


def first_own(deaths: Sequence[Death]) -> Death | None:
    """Of deaths in the order in which they came, the first with a reason of its own.

    Peers of a dead process abort (-6) or fail in its wake with words of their own, so order decides; an abort counts last, since
    jax lets peers abort for a process that is alive but does not answer, too.
    """
    failed = [d for d in deaths if d.code != 0]
    return min(failed, key=lambda d: d.code == -signal.SIGABRT, default=None)


def in_order(codes: dict[int, int]) -> list[int]:
    """Processes found ended within one look, the likely causes first: a signal from outside, then words of their own."""
    rank = lambda code: 2 if code == -signal.SIGABRT else 0 if code < 0 else 1  # noqa: E731
    return sorted(codes, key=lambda process: rank(codes[process]))


def first_silent(silent: Sequence[Silent]) -> Silent:
    """The one that others wait for: stopped by the kernel, else behind the others, in the step and in its phase."""
    return min(silent, key=lambda s: (not s.stopped, s.beat.step, PHASES.index(s.beat.phase), s.beat.time_s))


def of_death(death: Death) -> Culprit:
    code = death.code
    what = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    if code == PREEMPTED:
        what += " (saved, to be resumed)"
    said = next((word for line in reversed(death.lines) for word in OUT_OF_MEMORY if word in line), None)
    if code == -signal.SIGKILL and death.out_of_memory:
        what += ", by the kernel, for lack of memory"
    elif code not in (2, PREEMPTED) and said:
        what += f", out of memory ({said})"
    beat = death.beat or Beat("start-up", 0, 0.0)
    return Culprit(death.process, what, beat.phase, beat.step, death.lines, code)


def of_silence(silent: Silent, lines: tuple[str, ...]) -> Culprit:
    how = "is stopped (SIGSTOP) and" if silent.stopped else "is alive but"
    what = f"{how} has not reported for {silent.silent_s:.0f} s (limit {silent.limit_s:.0f} s)"
    return Culprit(silent.process, what, silent.beat.phase, silent.beat.step, lines, None)


def describe(culprit: Culprit, num_processes: int) -> str:
    where = f"in step {culprit.step}" if culprit.phase == "step" else f"in {culprit.phase}"
    if culprit.phase in ("data", "evaluate", "save"):
        where += f", step {culprit.step}"
    return f"process {culprit.process} of {num_processes} {culprit.what}, {where}"

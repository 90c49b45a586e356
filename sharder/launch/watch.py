"""Watches the processes of one attempt until all have ended, and says how it went."""

import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sharder.heartbeat import LOOP, Beat
from sharder.launch import culprit as culprits
from sharder.launch.culprit import Culprit, Death, Silent
from sharder.launch.memory_facts import count_oom_kills
from sharder.launch.processes import Launch, Worker, ask_for_stacks
from sharder.stop import PREEMPTED

POLL_S = 0.05
SETTLE_S = 0.15
"""How long after a failure is looked for others that ended with it."""
GRACE_S = 5.0
"""How long the others may take to say the same, where one ended with a message to the user or to be resumed; and one that failed and
lets the others end first (`sharder.channel`)."""
STACKS_S = 0.3
"""How long stuck processes get to print their stacks."""


@dataclass(frozen=True)
class Limits:
    """How long a process may not report."""

    startup_s: float = 600.0
    """In any phase but a step: bring-up, compilation, restore, evaluation, save."""
    step_s: float | None = None
    """In a step; unset: 20 times the median step, but at least 30 s. The first step of an attempt has `startup_s`."""

    def of(self, beat: Beat, pace: "Pace") -> float:
        if beat.phase not in LOOP or not pace.past_first:
            return self.startup_s
        return self.step_s if self.step_s is not None else max(30.0, 20 * pace.median_s)


@dataclass
class Pace:
    """How long steps take, as seen from outside."""

    _last: Beat | None = None
    _first_step: int | None = None
    past_first: bool = False
    _durations: deque = field(default_factory=lambda: deque(maxlen=50))

    def see(self, beat: Beat) -> None:
        if beat.phase not in LOOP or (self._last and beat.step <= self._last.step):
            return
        if self._last is not None:
            self._durations.append((beat.time_s - self._last.time_s) / (beat.step - self._last.step))
        self._first_step = beat.step if self._first_step is None else self._first_step
        # Steps are dispatched one ahead: with the third the first is over.
        self.past_first = beat.step >= self._first_step + 2
        self._last = beat

    @property
    def median_s(self) -> float:
        return statistics.median(self._durations) if self._durations else 0.0


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    code: int
    """0 done, 2 the user's to mend, 75 to be resumed, 1 failed."""
    culprit: Culprit | None
    step: int
    """The furthest step that was begun."""
    failed_at: float
    """Wall clock: when the first failure was seen, else when all had ended."""


class Watch:
    """Of one attempt."""

    def __init__(
        self, launch: Launch, workers: list[Worker], limits: Limits, tick: Callable[[Beat | None], None] = lambda beat: None
    ):
        """`tick` is called at every look, with the beat of process 0."""
        self.launch, self.workers, self.limits, self.tick = launch, workers, limits, tick
        # A host need not have process 0, nor all.
        self._by_index = {w.index: w for w in workers}
        self.deaths: list[Death] = []
        self.pace = Pace()
        self.step = 0
        self.oom_before = count_oom_kills()
        self._shown = workers[0].log_start if workers else 0

    def to_end(self) -> Outcome:
        """Returns when no process of the attempt is left."""
        failed_at = None
        while True:
            ended = self.look()
            failure = culprits.first_own(self.deaths)
            if failed_at is None and failure is not None:
                failed_at = time.time()
            if ended:
                return self._ended(failed_at or time.time())
            if failed_at is not None and time.time() - failed_at > self._grace_s(failure):
                return self._ended(failed_at)
            if failed_at is None and (silent := self.silent()):
                return self._stuck(silent)
            time.sleep(POLL_S)

    def _grace_s(self, failure: Death) -> float:
        """How long to look for other deaths after this one."""
        waits = failure.code in (2, PREEMPTED) or failure.follows in {w.index for w in self.workers if w.process.poll() is None}
        return GRACE_S if waits else SETTLE_S

    def look(self) -> bool:
        """Takes notice of beats and deaths; whether all processes have ended."""
        known = {d.process for d in self.deaths}
        codes = {w.index: w.process.poll() for w in self.workers}
        new = {i: code for i, code in codes.items() if code is not None and i not in known}
        beats = [beat for w in self.workers if (beat := w.beat()) is not None]
        for beat in beats[:1]:
            self.pace.see(beat)
        self.step = max([self.step, *(beat.step for beat in beats)])
        for index in culprits.in_order(new):
            worker = self._by_index[index]
            oom = new[index] < 0 and count_oom_kills() > self.oom_before
            self.deaths.append(Death(index, new[index], worker.beat(), tuple(worker.last_lines()), oom))
        self._show()
        self.tick(beats[0] if beats else None)
        return all(code is not None for code in codes.values())

    def silent(self) -> list[Silent]:
        """Where one has not reported for too long, all that are alive, for they wait for it."""
        alive = self._alive()
        return alive if any(s.silent_s > s.limit_s for s in alive) else []

    def _alive(self) -> list[Silent]:
        now = time.monotonic()
        beats = [(w, w.beat()) for w in self.workers if w.process.poll() is None]
        return [
            Silent(w.index, beat, now - beat.time_s, self.limits.of(beat, self.pace), w.is_stopped())
            for w, beat in beats
            if beat is not None
        ]

    def _stuck(self, silent: list[Silent]) -> Outcome:
        failed_at, first = time.time(), culprits.first_silent(silent)
        ask_for_stacks(self.workers)
        time.sleep(STACKS_S)
        self.launch.kill(self.workers)
        self._show()
        return Outcome(1, culprits.of_silence(first, tuple(self._by_index[first.process].last_lines(30))), self.step, failed_at)

    def _ended(self, failed_at: float) -> Outcome:
        self.look()
        first = culprits.first_own(self.deaths)
        stopped = [s for s in self._alive() if s.stopped]
        if stopped and first is not None and (first.code > 0 or first.code == -signal.SIGABRT) and first.code != PREEMPTED:
            return self._stuck(stopped)  # the others gave up waiting for it
        self.launch.kill(self.workers)
        self._show()
        if first is None:
            return Outcome(0, None, self.step, failed_at)
        code = first.code if first.code in (2, PREEMPTED) else 1
        return Outcome(code, culprits.of_death(first), self.step, failed_at)

    def _show(self) -> None:
        """Process 0 speaks to the terminal: what is new in its log goes to standard error."""
        log = self.workers[0].log if self.workers else None
        if log is None or not Path(log).exists():
            return
        with open(log, "rb") as file:
            file.seek(self._shown)
            new = file.read()
        self._shown += len(new)
        if new:
            sys.stderr.write(new.decode(errors="replace"))
            sys.stderr.flush()


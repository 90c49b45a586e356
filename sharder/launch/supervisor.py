"""Runs a command in several processes of this machine, attempt after attempt, until it is done. Imports no jax.

launch -> processes (start, end for certain) -> watch (how an attempt went) -> culprit (who failed)
       -> elastic (what to do) -> the next attempt; every turn is an event, from which the ledger is made.
"""

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sharder.config import UserError
from sharder.events import EventLog, read_json_lines
from sharder.facts import is_run, read_config, read_facts
from sharder.heartbeat import Beat
from sharder.launch import culprit as culprits
from sharder.launch import elastic
from sharder.launch.ledger import describe as describe_ledger
from sharder.launch.ledger import read_ledger
from sharder.launch.logs import log_folder
from sharder.launch.processes import Launch
from sharder.launch.spares import Spares
from sharder.launch.watch import Limits, Outcome, Watch
from sharder.lock import InUse, take_lock
from sharder.stop import ELSEWHERE, PREEMPTED


@dataclass(frozen=True)
class Options:
    """How a command is supervised."""

    processes: int
    min_processes: int | None = None
    """Smallest number of processes to go on with; None: as many as asked for."""
    max_restarts: int = 10
    """Within an hour."""
    limits: Limits = Limits()
    spares: bool = True
    """Keep interpreters ready that have loaded jax, for the next attempt."""
    regrow_s: float = 60.0

    def __post_init__(self):
        smallest = self.min_processes
        if self.processes < 1:
            raise UserError(f"--processes is {self.processes}, but must be at least 1.")
        if smallest is not None and not 1 <= smallest <= self.processes:
            raise UserError(f"--min-processes is {smallest}, but must be in 1 .. {self.processes} (--processes).")
        if self.max_restarts < 0:
            raise UserError(f"--max-restarts is {self.max_restarts}, but must be at least 0.")
        for name, value in (("--startup-limit-s", self.limits.startup_s), ("--step-limit-s", self.limits.step_s)):
            if value is not None and value <= 0:
                raise UserError(f"{name} is {value:g}, but must be above 0: no process could report in time.")


def launch(arguments: list[str], options: Options, run_dir: Path | None) -> int:
    """Runs `sharder <arguments>` until it is done; returns the exit code.

    A command without a run is started once. Raises UserError for a folder that cannot hold a run, or that another supervisor
    holds.
    """
    with log_folder(run_dir) as log_dir, _lock(log_dir, run_dir):
        return Supervisor(arguments, options, run_dir, log_dir).run()


@contextlib.contextmanager
def _lock(log_dir: Path, run_dir: Path | None) -> Iterator[None]:
    """Held by one living supervisor; the kernel takes it from a dead one."""
    path = log_dir / "supervisor.lock"
    try:
        file = take_lock(path)
    except InUse as holder:
        raise UserError(f"{run_dir} is supervised by {holder}: wait for it, stop it, or choose another --run-dir.") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


@dataclass
class Journal:
    """The supervisor's events; kept back until the run has begun, so that a refused command leaves nothing."""

    run_dir: Path | None
    _waiting: list[tuple[str, dict]] = field(default_factory=list)

    def write(self, kind: str, **fields) -> None:
        self._waiting.append((kind, {"time_s": time.time(), "attempt": None, "process": None, **fields}))
        self.flush()

    def flush(self) -> None:
        if self._waiting and self.run_dir is not None and (self.run_dir / "config.json").exists():
            events = EventLog(self.run_dir, 0)
            for kind, fields in self._waiting:
                events.write(kind, **fields)
            events.close()
            self._waiting.clear()


class Supervisor:
    """Of one launch."""

    def __init__(self, arguments: list[str], options: Options, run_dir: Path | None, log_dir: Path):
        self.options, self.run_dir, self.log_dir = options, run_dir, log_dir
        self.launch = Launch(arguments, log_dir)
        self.journal = Journal(run_dir)
        self.num_signals = 0
        self.watch: Watch | None = None
        self.resizing: elastic.Resize | None = None

    def run(self) -> int:
        self._listen()
        self.launch.open()
        try:
            return self._attempts()
        finally:
            self.launch.close()
            self.journal.flush()

    # Signals.

    def _listen(self) -> None:
        """The first signal becomes a request to save and stop in every worker; the second ends them."""

        def handle(number, _frame):
            self.num_signals += 1
            if self.watch is not None:
                for worker in self.watch.workers:
                    worker.signal(signal.SIGTERM if self.num_signals == 1 else signal.SIGKILL)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handle)

    # The story.

    def _attempts(self) -> int:
        self.policy = policy_of(self.options, self.run_dir)
        self.state, action = elastic.begin(self.policy, self._capacity())
        self.journal.write("launch", processes=action.processes, supervisor=os.getpid())
        while True:
            outcome = self._attempt(action)
            self.policy = policy_of(self.options, self.run_dir)
            if self.resizing is not None and outcome.code == PREEMPTED and not self.num_signals:
                action, self.resizing = elastic.Start(self.resizing.processes, 0.0, self.resizing.why), None
                self._say(f"going on with {action.processes} process(es): {action.why}.")
                continue
            self.resizing = None
            found = outcome.culprit
            event = elastic.Ended(
                outcome.failed_at, outcome.code, outcome.step, found and found.process, found.error if found else "",
                asked_to_stop=bool(self.num_signals) or (outcome.code == PREEMPTED and stopped_by_itself(self.run_dir)),
            )  # fmt: skip
            self.state, action = elastic.after(self.policy, self.state, event, self._capacity(), random.random())
            if found is not None and outcome.code != PREEMPTED:
                self._tell(outcome)
            if isinstance(action, elastic.Finish):
                return self._finish(action)
            self.journal.write("restart", processes=action.processes, delay_s=action.delay_s, why=action.why or None)
            self._say(f"starting again with {action.processes} process(es){f': {action.why}' if action.why else ''}.")
            if not self._wait(action.delay_s):
                return self._finish(elastic.Finish(PREEMPTED, ""))

    def _attempt(self, action: elastic.Start) -> Outcome:
        """One attempt from start to end."""
        spawned_s = time.time()
        workers = self.launch.start(action.processes)
        self.journal.write("spawn", time_s=spawned_s, processes=action.processes, pids=[w.process.pid for w in workers])
        self.watch, self.num_workers = Watch(self.launch, workers, self.options.limits, self._tick), len(workers)
        if self.num_signals:  # it came before there was anybody to tell
            for worker in workers:
                worker.signal(signal.SIGTERM)
        outcome = self.watch.to_end()
        self.watch = None
        self.journal.write(
            "ended", step=outcome.step, code=outcome.code, failed_at=outcome.failed_at,
            culprit=outcome.culprit and outcome.culprit.to_json(),
        )  # fmt: skip
        return outcome

    def _tick(self, beat: Beat | None) -> None:
        """At every look: spares once the run steps; the machine's capacity."""
        self.journal.flush()
        if beat is None or self.watch is None or not self.watch.pace.past_first or self.num_signals:
            return
        if self.options.spares and self.options.max_restarts and self.run_dir is not None:
            self.launch.spares = self.launch.spares or Spares(self.launch.mark)
            self.launch.spares.fill(self.options.processes)
        if self.resizing is None:
            event = elastic.Capacity(time.time(), self._capacity(), beat.step)
            self.state, self.resizing = elastic.look(self.policy, self.state, event)
            if self.resizing is not None:
                self.journal.write("resize", processes=self.resizing.processes, why=self.resizing.why)
                self.watch.workers[0].signal(signal.SIGTERM)

    def _finish(self, action: elastic.Finish) -> int:
        self.journal.write("closed", code=action.code, why=action.why or None)
        if action.why:
            self._say(f"giving up: {action.why}.")
        if self.run_dir is not None and (self.run_dir / "config.json").exists() and action.code != 2:
            self._say(describe_ledger(read_ledger(self.run_dir)))
        return action.code

    # What it knows.

    def _capacity(self) -> int:
        """How many processes have room: what stands in logs/capacity, which whoever watches the devices may write; else all."""
        try:
            return int((self.log_dir / "capacity").read_text())
        except (OSError, ValueError):
            return self.options.processes

    def _wait(self, delay_s: float) -> bool:
        """Whether nobody asked to stop meanwhile."""
        deadline = time.monotonic() + delay_s
        while time.monotonic() < deadline and not self.num_signals:
            time.sleep(0.05)
        return not self.num_signals

    def _tell(self, outcome: Outcome) -> None:
        found = outcome.culprit
        self._say(f"{culprits.describe(found, self.num_workers)}; the others were ended.")
        if found.lines and found.process != 0:
            print(f"the end of {self.log_dir / f'process_{found.process}.log'}:", *found.lines, sep="\n  ", file=sys.stderr)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def policy_of(options: Options, run_dir: Path | None) -> elastic.Policy:
    """What is allowed; which worlds are, is known from the run's own files, once it has begun."""
    asked, smallest = options.processes, options.min_processes or options.processes
    restarts = options.max_restarts if run_dir is not None else 0
    if run_dir is None or not is_run(run_dir):
        return elastic.Policy(elastic.allowed_worlds(asked, smallest, 1, None), restarts, regrow_s=options.regrow_s)
    config, facts = read_config(run_dir), read_facts(run_dir)
    devices = facts["devices"]["count"] // facts["num_processes"]
    known = {
        "parallel": {name: getattr(config.parallel, name) for name in ("tensor", "data", "fsdp", "virtual_workers")},
        "global_batch_size": config.train.global_batch_size,
        "exact": config.parallel.reduction == "exact",
    }
    return elastic.Policy(elastic.allowed_worlds(asked, smallest, devices, known), restarts, regrow_s=options.regrow_s)


def stopped_by_itself(run_dir: Path | None) -> bool:
    """Whether a run that is to be resumed stopped for a reason of its own: a STOP file, a time limit; a signal to a worker is none."""
    if run_dir is None:
        return True
    events, _ = read_json_lines(run_dir / "events.jsonl")
    last = next((e for e in reversed(events) if e.get("kind") in ("stopped", "spawn")), {})
    reason = str(last.get("reason"))
    return last.get("kind") == "stopped" and reason != ELSEWHERE and not reason.startswith("SIG")

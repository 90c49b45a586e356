"""Stepping: dispatch a step, then read the results of the one before it, so that the devices never wait for the host."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from sharder.events import EventLog
from sharder.train.metrics import StepFacts, Writer, make_record
from sharder.train.nonfinite import Nonfinite, as_json, find_nonfinite
from sharder.train.setup import Setup
from sharder.train.state import TrainState
from sharder.train.step import stop_flags
from sharder.train.step_ledger import StepLedger

# Named, so that a test can watch when results leave the devices.
fetch = jax.device_get


@dataclass(frozen=True)
class _InFlight:
    """A step that was dispatched and whose results are still on the devices."""

    step: int
    metrics: dict[str, jax.Array]
    data_wait_s: float
    interval_s: float
    """Since the step before it was dispatched; 0.0 where other work was between them."""


class Stepper:
    """One step at a time, one step late."""

    def __init__(
        self, setup: Setup, facts: StepFacts, writers: list[Writer], events: EventLog, ledger: StepLedger | None = None
    ):
        self.setup, self.facts, self.writers, self.events = setup, facts, writers, events
        self.ledger = ledger or StepLedger(None, 0)
        self.train_step: Callable | None = None
        """The compiled step; set once its arguments are known."""
        self.seed = jax.device_put(np.uint32(setup.config.train.seed), setup.replicated())
        self._flags = [stop_flags(setup.mesh, value) for value in (False, True)]
        self._halted = jax.device_put(np.bool_(False), setup.replicated())
        self._in_flight: _InFlight | None = None
        self._last_read = time.perf_counter()
        self._last_dispatch: float | None = None
        self.stop_agreed = False
        """A process was asked to stop; all processes see it at the same step."""
        self.evaluation_interrupted = False
        self.nonfinite: Nonfinite | None = None
        """Why the run is halted; the state is that before this step, as are `record` and `leaf_digests`."""
        self.num_skipped = 0
        self.record: dict = {}
        """Of the last step read."""
        self.leaf_digests: np.ndarray | None = None
        self._lacks_new = True
        """No step has been finished yet that no earlier attempt had done."""

    def arguments(self, state: TrainState, batch: dict, stop: bool) -> tuple:
        """What the compiled step takes."""
        return state, batch, self.seed, self._flags[int(stop)], self._halted

    def dispatch(self, state: TrainState, batch: dict, step: int, data_wait_s: float, stop: bool) -> TrainState:
        """Starts the step that makes `step` completed steps; then reads and writes the one before it."""
        previous, now = self._in_flight, time.perf_counter()
        interval_s, self._last_dispatch = now - (self._last_dispatch or now), now
        with self.ledger.part("dispatch"):
            state, metrics = self.train_step(*self.arguments(state, batch, stop))
        self.ledger.move("dispatch", "device", getattr(self.train_step, "waited_s", 0.0))
        self._halted = metrics["halted"]
        self._in_flight = _InFlight(step, metrics, data_wait_s, interval_s)
        if previous is not None:
            self.write_if_due(self._read(previous))
        self.ledger.end_step(step)
        return state

    def drain(self) -> dict | None:
        """Waits for the step in flight, if any, and returns its record, not yet written; None where it is not kept."""
        in_flight, self._in_flight = self._in_flight, None
        # A step that the host, and not the device, sets the pace of is over when the one before it is read.
        return None if in_flight is None else self._read(in_flight, at_least_s=in_flight.interval_s)

    def write_pending(self) -> None:
        """Waits for the step in flight, if any, and writes its record."""
        self.write_if_due(self.drain())

    def resume_clock(self) -> None:
        """Call it after work between steps, so that its time is not counted into the next step."""
        self._last_read, self._last_dispatch = time.perf_counter(), None

    def _read(self, done: _InFlight, at_least_s: float = 0.0) -> dict | None:
        with self.ledger.part("device"):
            metrics = fetch(done.metrics)
        now = time.perf_counter()
        if not self.record:
            self.events.write("first_step", done.step)
        if self._lacks_new and done.step > self.facts.reached:
            self.events.write("new_step", done.step)
            self._lacks_new = False
        step_time_s, self._last_read = max(now - self._last_read, at_least_s), now
        self.stop_agreed |= bool(metrics["stop"])
        nonfinite = find_nonfinite(done.step, metrics, self.facts.gradient_paths)
        if nonfinite is not None and self.nonfinite is None:
            self._report(nonfinite)
        if self.nonfinite is not None:  # this step, or one before it: what follows has changed nothing
            return None
        self.leaf_digests = np.asarray(metrics["digests"])
        with self.ledger.part("logging"):
            self.record = make_record(self.facts, done.step, metrics, step_time_s, done.data_wait_s)
        if self.facts.skips_nonfinite:
            self.record["num_skipped"] = self.num_skipped
        return self.record

    def _report(self, found: Nonfinite) -> None:
        ids, skips = [int(i) for i in self.facts.example_ids(found.step)], self.facts.skips_nonfinite
        if skips:
            self.num_skipped += 1
        else:
            self.nonfinite = found
        if jax.process_index() == 0:
            print(found.describe(ids, skips), file=sys.stderr, flush=True)
        values = {"loss": as_json(found.loss), "grad_norm": as_json(found.grad_norm), "leaf": found.leaf}
        self.events.write("nonfinite", found.step, **values, examples=ids, action="skip" if skips else "stop")

    def write_if_due(self, record: dict | None) -> None:
        """Writes the record every log_every steps."""
        if record is not None and record["step"] % self.setup.config.train.log_every == 0:
            self.write(record)

    def write(self, record: dict) -> None:
        with self.ledger.part("logging"):
            for writer in self.writers:
                writer.write(record)

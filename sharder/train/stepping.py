"""Stepping: dispatch a step, then read the results of the one before it, so that the devices never wait for the host."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from sharder.events import EventLog
from sharder.train.metrics import StepFacts, Writer, make_record
from sharder.train.setup import Setup
from sharder.train.state import TrainState
from sharder.train.step import stop_sharding
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

    def __init__(self, setup: Setup, facts: StepFacts, writers: list[Writer], events: EventLog, ledger: StepLedger | None = None):
        self.setup, self.facts, self.writers, self.events = setup, facts, writers, events
        self.ledger = ledger or StepLedger(None, 0)
        self.train_step: Callable | None = None
        """The compiled step; set once its arguments are known."""
        self.seed = jax.device_put(np.uint32(setup.config.train.seed), setup.replicated())
        self._flags = [self._flag(value) for value in (0, 1)]
        self._in_flight: _InFlight | None = None
        self._last_read = time.perf_counter()
        self._last_dispatch: float | None = None
        self.stop_agreed = False
        """A process was asked to stop; all processes see it at the same step."""
        self.record: dict = {}
        """Of the last step read."""
        self.leaf_digests: np.ndarray | None = None

    def _flag(self, value: int) -> jax.Array:
        local = np.full(jax.local_device_count(), value, np.int32)
        return jax.make_array_from_process_local_data(stop_sharding(self.setup.mesh), local)

    def arguments(self, state: TrainState, batch: dict, stop: bool) -> tuple:
        """What the compiled step takes."""
        return state, batch, self.seed, self._flags[int(stop)]

    def dispatch(self, state: TrainState, batch: dict, step: int, data_wait_s: float, stop: bool) -> TrainState:
        """Starts the step that makes `step` completed steps; then reads and writes the one before it."""
        previous, now = self._in_flight, time.perf_counter()
        interval_s, self._last_dispatch = now - (self._last_dispatch or now), now
        with self.ledger.part("dispatch"):
            state, metrics = self.train_step(*self.arguments(state, batch, stop))
        self.ledger.move("dispatch", "device", getattr(self.train_step, "waited_s", 0.0))
        self._in_flight = _InFlight(step, metrics, data_wait_s, interval_s)
        if previous is not None:
            self.write_if_due(self._read(previous))
        self.ledger.end_step(step)
        return state

    def drain(self) -> dict | None:
        """Waits for the step in flight, if any, and returns its record, not yet written."""
        in_flight, self._in_flight = self._in_flight, None
        # A step that the host, and not the device, sets the pace of is over when the one before it is read.
        return None if in_flight is None else self._read(in_flight, at_least_s=in_flight.interval_s)

    def write_pending(self) -> None:
        """Waits for the step in flight, if any, and writes its record."""
        record = self.drain()
        if record is not None:
            self.write_if_due(record)

    def resume_clock(self) -> None:
        """Call it after work between steps, so that its time is not counted into the next step."""
        self._last_read, self._last_dispatch = time.perf_counter(), None

    def _read(self, done: _InFlight, at_least_s: float = 0.0) -> dict:
        with self.ledger.part("device"):
            metrics = fetch(done.metrics)
        now = time.perf_counter()
        if not self.record:
            self.events.write("first_step", done.step)
        step_time_s, self._last_read = max(now - self._last_read, at_least_s), now
        self.stop_agreed |= bool(metrics["stop"])
        self.leaf_digests = np.asarray(metrics["digests"])
        with self.ledger.part("logging"):
            self.record = make_record(self.facts, done.step, metrics, step_time_s, done.data_wait_s)
        return self.record

    def write_if_due(self, record: dict) -> None:
        """Evaluations are always written, other steps every log_every."""
        if record["step"] % self.setup.config.train.log_every == 0 or "validation_loss" in record:
            with self.ledger.part("logging"):
                for writer in self.writers:
                    writer.write(record)

"""Reads the next batches and copies them to the devices while the current step computes.

A batch on the devices has shape (slots, slot_size, ...): slot i holds the rows i x slot_size .. of the global batch
and is divided over the replicas in order, so that in every slot a process reads one contiguous slice.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharder.data.dataset import Batch, Dataset
from sharder.data.order import Order
from sharder.sharding.mesh import REPLICA_AXES


@dataclass(frozen=True)
class BatchLayout:
    """Where the rows of a global batch go."""

    mesh: Mesh
    num_slots: int
    slot_size: int
    """Examples of all replicas in one accumulation slot."""

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(None, REPLICA_AXES))

    def local_rows(self) -> tuple[int, int]:
        """Rows start..stop of every slot that live on this process's devices."""
        shape = (self.num_slots, self.slot_size)
        spans = {
            (s[1].start or 0, s[1].stop or self.slot_size)
            for s in self.sharding.addressable_devices_indices_map(shape).values()
        }
        start, stop = min(a for a, _ in spans), max(b for _, b in spans)
        assert sum(b - a for a, b in spans) == stop - start, f"rows of this process are not contiguous: {sorted(spans)}"
        return start, stop

    def to_devices(self, local: Batch) -> dict[str, jax.Array]:
        """Global arrays from this process's rows, which come as (slots x local rows, ...)."""

        def put(x: np.ndarray) -> jax.Array:
            x = x.reshape(self.num_slots, -1, *x.shape[1:])
            return jax.make_array_from_process_local_data(self.sharding, x, (self.num_slots, self.slot_size, *x.shape[2:]))

        return {name: put(x) for name, x in local.items()}

    def abstract(self, example: Batch) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch on the devices, given any number of examples."""
        rows = (self.num_slots, self.slot_size)
        return {k: jax.ShapeDtypeStruct(rows + x.shape[1:], x.dtype, sharding=self.sharding) for k, x in example.items()}


@dataclass(frozen=True)
class WorkerLayout(BatchLayout):
    """Exact mode: in slot i replica r computes virtual worker i x replicas + r, which is one contiguous slice of the batch.

    On the devices a batch is a list with one entry per slot, arrays (replicas x num_microbatches, microbatch_size, ...).
    """

    num_microbatches: int
    """Accumulation slots inside a virtual worker."""

    @property
    def worker_size(self) -> int:
        """Examples of one virtual worker."""
        return self.slot_size // (self.mesh.shape["data"] * self.mesh.shape["fsdp"])

    def _slot_shape(self, example_shape: tuple[int, ...]) -> tuple[int, ...]:
        microbatch_size = self.worker_size // self.num_microbatches
        return (self.slot_size // microbatch_size, microbatch_size, *example_shape)

    def to_devices(self, local: Batch) -> list[dict[str, jax.Array]]:
        def put(x: np.ndarray) -> jax.Array:
            shape = self._slot_shape(x.shape[1:])
            return jax.make_array_from_process_local_data(self.slot_sharding, x.reshape(-1, *shape[1:]), shape)

        slots = [{k: x.reshape(self.num_slots, -1, *x.shape[1:])[i] for k, x in local.items()} for i in range(self.num_slots)]
        return [{k: put(x) for k, x in slot.items()} for slot in slots]

    def abstract(self, example: Batch) -> list[dict[str, jax.ShapeDtypeStruct]]:
        shapes = {
            k: jax.ShapeDtypeStruct(self._slot_shape(x.shape[1:]), x.dtype, sharding=self.slot_sharding)
            for k, x in example.items()
        }
        return [shapes] * self.num_slots

    @property
    def slot_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXES))


def read_step(dataset: Dataset, order: Order, layout: BatchLayout, step: int) -> Batch:
    """This process's rows of the batch of `step`, slot after slot."""
    start, stop = layout.local_rows()
    ids = [order.ids(step, i * layout.slot_size + start, i * layout.slot_size + stop) for i in range(layout.num_slots)]
    return dataset.read(np.concatenate(ids))


def overlap_s(copied: tuple[float, float], since: float) -> float:
    """Seconds of a copy, given by its beginning and its end, that fall after a moment."""
    began, ended = copied
    return max(0.0, ended - max(began, since))


class Prefetcher:
    """Iterates over `copy(make(first))`, `copy(make(first + 1))`, ..., computed `depth` ahead in a thread.

    An exception in either is raised by `next`. `wait_s` is how long the last `next` had to wait, `copy_wait_s` how long of that for
    `copy`.
    """

    def __init__(
        self, make: Callable[[int], object], first: int, depth: int, copy: Callable[[object], object] = lambda made: made
    ):
        self._queue: queue.Queue = queue.Queue(depth)
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self.wait_s, self.copy_wait_s = 0.0, 0.0
        self._thread = threading.Thread(target=self._run, args=(make, copy, first), name="loader", daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[int], object], copy: Callable[[object], object], step: int) -> None:
        while not self._stop.is_set():
            try:
                made, began = make(step), time.perf_counter()
                item = (copy(made), None, (began, time.perf_counter()))
            except BaseException as error:  # noqa: BLE001  handed to the consumer, which raises it
                item = (None, error, (0.0, 0.0))
            while not self._stop.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if item[1] is not None:
                return
            step += 1

    def __next__(self):
        started = time.perf_counter()
        if self._failed is None:
            assert not self._stop.is_set(), "closed"
            value, self._failed, copied = self._queue.get()
            self.copy_wait_s = overlap_s(copied, started)
        self.wait_s = time.perf_counter() - started
        if self._failed is not None:
            raise self._failed
        return value

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def open_loader(dataset: Dataset, order: Order, layout: BatchLayout, first_step: int, depth: int) -> Prefetcher:
    """Batches on the devices from `first_step` on, without end."""
    return Prefetcher(lambda step: read_step(dataset, order, layout, step), first_step, depth, layout.to_devices)


def sequential_batches(dataset: Dataset, layout: BatchLayout, limit: int | None) -> Iterator[dict[str, jax.Array]]:
    """The dataset once, in order, at most `limit` batches; the last is filled up with rows of `valid` 0."""
    start, stop = layout.local_rows()
    size = layout.num_slots * layout.slot_size
    num_batches = -(-len(dataset) // size)
    for number in range(num_batches if limit is None else min(limit, num_batches)):
        rows = np.arange(number * size, (number + 1) * size).reshape(layout.num_slots, -1)[:, start:stop].reshape(-1)
        batch = dataset.read(np.minimum(rows, len(dataset) - 1))
        yield layout.to_devices({**batch, "valid": (rows < len(dataset)).astype(np.float32)})

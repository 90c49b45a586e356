import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharder.data.loader import BatchLayout, Prefetcher, open_loader, overlap_s, read_step, sequential_batches
from sharder.data.order import Order
from sharder.sharding.mesh import MeshShape, make_mesh


class Ids:
    """Examples that are their own ids."""

    fingerprint = "ids"

    def __init__(self, num_examples: int, fail_at: int | None = None):
        self.num_examples, self.fail_at = num_examples, fail_at

    def __len__(self) -> int:
        return self.num_examples

    def read(self, ids):
        if self.fail_at in ids:
            raise OSError(f"example {self.fail_at} cannot be read")
        return {"id": ids.astype(np.int32), "row": np.stack([ids, -ids], 1).astype(np.int32)}


@dataclass(frozen=True)
class OfProcess(BatchLayout):
    """What a process sees that has only some of the devices."""

    devices: tuple[int, ...] = ()

    @property
    def sharding(self):
        whole = super().sharding
        mine = lambda shape: {d: s for d, s in whole.devices_indices_map(shape).items() if d.id in self.devices}  # noqa: E731
        return SimpleNamespace(addressable_devices_indices_map=mine)


def layout(num_slots: int, slot_size: int, shape: MeshShape = MeshShape(2, 4, 1)) -> BatchLayout:
    return BatchLayout(make_mesh(shape), num_slots, slot_size)


def loader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "loader"]


@pytest.mark.parametrize("shape", [MeshShape(8, 1, 1), MeshShape(2, 4, 1), MeshShape(1, 4, 2)], ids=str)
@pytest.mark.parametrize("num_slots", [1, 3])
def test_slots_hold_the_global_order(shape, num_slots):
    dataset, order, where = Ids(100), Order(100, num_slots * 16, 0), layout(num_slots, 16, shape)
    loader = open_loader(dataset, order, where, first_step=2, depth=1)
    batch = next(loader)
    loader.close()
    expected = dataset.read(order.ids(2))
    assert np.array_equal(batch["row"], expected["row"].reshape(num_slots, 16, 2))


@pytest.mark.parametrize("shape", [MeshShape(2, 4, 1), MeshShape(2, 2, 2)], ids=str)
def test_replica_r_holds_the_rth_rows_of_every_slot(shape):
    where, rows = layout(3, 16, shape), 16 // shape.num_replicas
    batch = where.to_devices({"id": np.arange(48)})["id"]
    for shard in batch.addressable_shards:
        replica = shard.device.id // shape.tensor
        assert np.array_equal(shard.data, np.arange(48).reshape(3, 16)[:, replica * rows : (replica + 1) * rows])


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_processes_read_one_contiguous_slice_of_every_slot(num_processes):
    order, each, mesh = Order(100, 48, 0), 8 // num_processes, make_mesh(MeshShape(2, 4, 1))
    parts = []
    for process in range(num_processes):
        where = OfProcess(mesh, 3, 16, tuple(range(process * each, (process + 1) * each)))
        parts.append(read_step(Ids(100), order, where, 1)["id"].reshape(3, -1))
    assert np.concatenate(parts, 1).reshape(-1).tolist() == order.ids(1).tolist()


def test_devices_that_hold_scattered_rows_are_a_mistake():
    with pytest.raises(AssertionError, match="not contiguous"):
        OfProcess(make_mesh(MeshShape(2, 4, 1)), 1, 16, (0, 2)).local_rows()


def test_abstract_batch_is_the_batch_on_the_devices():
    where, example = layout(2, 8), Ids(16).read(np.arange(16))
    described = {k: (x.shape, x.dtype, x.sharding) for k, x in where.abstract(example).items()}
    assert described == {k: (x.shape, x.dtype, x.sharding) for k, x in where.to_devices(example).items()}


def test_steps_follow_one_another():
    loader = Prefetcher(lambda step: step, first=5, depth=2)
    assert [next(loader) for _ in range(4)] == [5, 6, 7, 8]
    loader.close()


def test_no_more_than_depth_batches_are_ready():
    made = []
    loader = Prefetcher(made.append, first=0, depth=2)
    time.sleep(0.3)
    loader.close()
    assert len(made) == 3  # two in the queue, and one in the thread's hands


def test_an_error_of_the_dataset_is_raised_by_next():
    order = Order(32, 8, 0)
    failing = Ids(32, fail_at=order.ids(2)[5])
    loader = open_loader(failing, order, layout(1, 8), first_step=0, depth=1)
    next(loader), next(loader)
    with pytest.raises(OSError, match="cannot be read"):
        next(loader)
    loader.close()


def test_close_ends_a_thread_that_waits_for_room():
    loader = Prefetcher(lambda step: step, first=0, depth=1)
    time.sleep(0.05)
    loader.close()
    assert loader_threads() == []


def test_an_error_ends_the_thread():
    loader = Prefetcher(lambda step: 1 // 0, first=0, depth=1)
    with pytest.raises(ZeroDivisionError):
        next(loader)
    for thread in loader_threads():
        thread.join(1)
    alive = loader_threads()
    loader.close()
    assert alive == []


def test_wait_is_the_time_that_next_took():
    loader = Prefetcher(lambda step: time.sleep(0.2), first=0, depth=1)
    next(loader)
    loader.close()
    assert 0.1 < loader.wait_s < 2


@settings(max_examples=30)
@given(st.integers(1, 70), st.integers(1, 3))
def test_one_pass_covers_every_example_once(num_examples, num_slots):
    batches = list(sequential_batches(Ids(num_examples), layout(num_slots, 8), None))
    ids = np.concatenate([np.asarray(b["id"])[np.asarray(b["valid"]) == 1] for b in batches])
    assert ids.tolist() == list(range(num_examples))


def test_rows_that_fill_up_the_last_batch_are_invalid():
    last = list(sequential_batches(Ids(21), layout(2, 8), None))[-1]
    assert np.asarray(last["valid"]).tolist() == [[1, 1, 1, 1, 1, 0, 0, 0], [0] * 8]


@pytest.mark.parametrize("limit, count", [(None, 3), (2, 2), (9, 3)])
def test_limit_counts_batches(limit, count):
    assert len(list(sequential_batches(Ids(40), layout(1, 16), limit))) == count


@pytest.mark.parametrize("since, seconds", [(9.0, 2.0), (11.0, 1.0), (13.0, 0.0)])
def test_only_the_part_of_a_copy_that_was_waited_for_counts(since, seconds):
    assert overlap_s((10.0, 12.0), since) == seconds


def test_waiting_for_the_copy_is_part_of_waiting():
    layout, order = BatchLayout(make_mesh(MeshShape(8, 1, 1)), 1, 8), Order(16, 8, 0)
    loader = open_loader(Ids(16), order, layout, 0, 1)
    try:
        next(loader)
        assert 0 <= loader.copy_wait_s <= loader.wait_s
    finally:
        loader.close()

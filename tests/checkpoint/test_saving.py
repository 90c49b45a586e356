"""Saves: what is refused, what stays, what training never waits for, and that the bits are those of the step."""

import asyncio
import dataclasses
import functools
import threading
import time

import jax
import numpy as np
import pytest
from small import small

from sharder import checkpoint
from sharder.checkpoint import save
from sharder.checkpoint.restore import restore_numpy
from sharder.checkpoint.retention import remove_others, retained
from sharder.checkpoint.save import SaveFailed, Saver, bytes_at_once, bytes_to_copy, no_room
from sharder.config import CheckpointConfig, OptimizerConfig, UserError
from sharder.events import EventLog, read_json_lines
from sharder.train.fingerprint import digests, hex_digest
from sharder.train.saved import check_fits, restore_state
from sharder.train.setup import prepare
from sharder.train.state import by_path, create_state

POLICIES = {1: {"policy": "dp"}, 2: {"policy": "zero"}, 4: {"policy": "fsdp"}, 8: {"policy": "fsdp", "tensor": 2}}


@functools.cache
def on_devices(count):
    config = dataclasses.replace(small(), parallel=dataclasses.replace(small().parallel, **POLICIES[count]))
    return prepare(config, jax.devices()[:count])


def save_once(run_dir, leaves, step=0, events=None, **config):
    saver = Saver(run_dir, CheckpointConfig(**config), events or EventLog(None, 1))
    found = np.asarray(jax.jit(digests)(leaves))
    saver.save(step, leaves, {"leaf_fingerprints": {p: hex_digest(d) for p, d in zip(sorted(leaves), found)}})
    return saver


@pytest.mark.parametrize("written", [1, 2, 4, 8])
def test_any_number_of_devices_restores_what_any_number_wrote(tmp_path, written):
    """dp on 1, zero on 2, fsdp on 4, fsdp with tensor 2 on 8, in every direction; the fingerprints are compared on the devices."""
    setup = on_devices(written)
    leaves = by_path(create_state(setup.config, setup.declared, setup.state_shardings))
    save_once(tmp_path, leaves).close()
    for read in POLICIES:
        found = by_path(restore_state(on_devices(read), tmp_path, 0))
        assert all((np.asarray(found[p]) == np.asarray(leaves[p])).all() for p in leaves)
        assert len(found["params/blocks/mlp_in"].sharding.device_set) == read


@pytest.mark.parametrize("moments", [pytest.param("bfloat16", marks=pytest.mark.slow), "int8"])
def test_moments_in_fewer_bits_are_restored_on_any_number_of_devices(tmp_path, moments):
    """Random bits in all that is narrow."""

    def on(count):
        config = on_devices(count).config
        return prepare(dataclasses.replace(config, optimizer=OptimizerConfig(moments=moments)), jax.devices()[:count])

    setup, rng = on(2), np.random.default_rng()
    leaves = by_path(create_state(setup.config, setup.declared, setup.state_shardings))
    narrow = {p: x for p, x in leaves.items() if p.startswith("opt_state") and x.dtype in ("uint8", "uint16", "bfloat16")}
    assert {p.split("/")[2] for p in narrow} >= {"mu", "nu", "nu_exponents"}
    bits = {p: rng.integers(0, 1 << 7, x.shape, f"uint{8 * x.dtype.itemsize}") for p, x in narrow.items()}
    leaves |= {p: jax.device_put(bits[p].view(x.dtype), x.sharding) for p, x in narrow.items()}
    save_once(tmp_path, leaves).close()
    for read in (1, 4, 8):
        found = by_path(restore_state(on(read), tmp_path, 0))
        assert all(np.asarray(found[p]).tobytes() == np.asarray(leaves[p]).tobytes() for p in leaves)
        assert (
            found["opt_state/0/nu/blocks/mlp_in"].addressable_shards[0].data.size == leaves["params/blocks/mlp_in"].size // read
        )
    with pytest.raises(UserError, match="opt_state/0/"):
        check_fits(on_devices(4), tmp_path, 0)


def small_leaves():
    return {"params/x": jax.numpy.arange(1 << 20, dtype=jax.numpy.float32), "step": jax.numpy.int32(0)}


def test_a_slow_file_system_saves_the_bits_of_the_step(tmp_path, monkeypatch):
    """Copies are slow to take, and writing begins only when the arrays have been donated and overwritten four times."""
    from orbax.checkpoint._src.serialization import replica_slices, serialization

    write, overwritten, waited = serialization.async_serialize_from_host, threading.Event(), []
    copy = replica_slices.transfer_arrays_to_host

    def slow_copy(*args, **kwargs):
        time.sleep(0.3)
        return copy(*args, **kwargs)

    async def slow(*args, **kwargs):
        while not overwritten.is_set():
            waited.append(True)
            await asyncio.sleep(0.01)
        return await write(*args, **kwargs)

    monkeypatch.setattr(replica_slices, "transfer_arrays_to_host", slow_copy)
    monkeypatch.setattr(serialization, "async_serialize_from_host", slow)
    overwrite = jax.jit(lambda leaves: jax.tree.map(lambda x: x * 0 - 1, leaves), donate_argnums=0)
    leaves = small_leaves()
    expected = np.asarray(leaves["params/x"]).copy()
    saver = save_once(tmp_path, leaves)
    for _ in range(4):
        leaves = overwrite(leaves)
    jax.block_until_ready(leaves)
    while not waited:  # by the thread that writes
        time.sleep(0.01)
    assert not checkpoint.list_steps(tmp_path)
    overwritten.set()
    saver.close()
    assert (restore_numpy(tmp_path, 0)["params/x"] == expected).all() and (np.asarray(leaves["params/x"]) == -1).all()


def test_the_stall_is_measured(tmp_path):
    events = EventLog(tmp_path, 1)
    save_once(tmp_path, small_leaves(), events=events).close()
    begun, saved = read_json_lines(tmp_path / "events.jsonl")[0]
    assert (begun["kind"], saved["kind"]) == ("save", "saved")
    assert begun["bytes"] == begun["local_bytes"] == 4 * (1 << 20) + 4
    assert 0 < begun["stall_s"] < saved["save_s"] and begun["wait_s"] >= 0


def test_copies_of_a_shard_are_taken_once(tmp_path):
    replicated = jax.device_put(np.zeros(1000, np.float32), on_devices(8).replicated())
    assert bytes_to_copy({"x": replicated}) == 4000


def failing(monkeypatch, name, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(save, name, fail)


def test_a_save_that_storage_refuses_is_said_once_and_takes_nothing_else(tmp_path, monkeypatch):
    events, said = EventLog(tmp_path, 1), []
    save_once(tmp_path, small_leaves()).close()
    saver = Saver(tmp_path, CheckpointConfig(), events, said.append)
    failing(monkeypatch, "write_manifest", OSError(28, "No space left on device", "manifest.json.tmp"))
    for step in (1, 2):
        saver.save(step, small_leaves(), {"leaf_fingerprints": {}})
        saver.wait()
    monkeypatch.undo()
    assert (
        len(said) == 1 and "checkpoints/1 cannot be written: [Errno 28] No space left" in said[0] and "is of step 0" in said[0]
    )
    assert [p.name for p in checkpoint.folder(tmp_path).iterdir()] == ["0"]
    saver.save(3, small_leaves(), {"leaf_fingerprints": {}})
    saver.close()
    assert checkpoint.list_steps(tmp_path) == [0, 3]
    kinds = [(e["kind"], e["step"]) for e in read_json_lines(tmp_path / "events.jsonl")[0]]
    assert kinds == [("save", 1), ("save_failed", 1), ("save", 2), ("save_failed", 2), ("save", 3), ("saved", 3)]


def test_where_the_last_save_fails_closing_says_so(tmp_path, monkeypatch):
    failing(monkeypatch, "write_manifest", OSError(28, "No space left on device"))
    with pytest.raises(SaveFailed, match="checkpoints/0 cannot be written: .*No space left"):
        save_once(tmp_path, small_leaves()).close()


def test_a_save_without_room_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "available_bytes", lambda: 1 << 20)
    message = r"a copy of 4,194,304 bytes in host memory for its largest array alone, and half of .* is 524,288: free"
    with pytest.raises(SaveFailed, match=message):
        save_once(tmp_path, small_leaves()).close()
    monkeypatch.undo()
    fault = no_room(tmp_path, 1 << 60, 0, None, prepares=True)
    assert fault.startswith("it takes about 1,152,921,504,606,846,976 bytes, and ")
    save_once(tmp_path, small_leaves()).close()
    # The last one says better what the next one takes.
    assert no_room(tmp_path, 1 << 60, 0, None, prepares=True) is None


def test_processes_of_a_host_share_its_memory():
    assert bytes_at_once(100, None, 4) is None and bytes_at_once(100, 400, 4) is None
    assert bytes_at_once(100, 399, 4) == 49 and bytes_at_once(100, 399, 1) is None


def test_a_divided_state_that_was_written_part_by_part_is_restored_elsewhere(tmp_path, monkeypatch):
    setup = on_devices(8)
    leaves = by_path(create_state(setup.config, setup.declared, setup.state_shardings))
    monkeypatch.setattr(save, "available_bytes", lambda: bytes_to_copy(leaves) - 1)
    save_once(tmp_path, leaves, events=EventLog(tmp_path, 1)).close()
    assert read_json_lines(tmp_path / "events.jsonl")[0][0]["bytes_at_once"] == (bytes_to_copy(leaves) - 1) // 2
    found = by_path(restore_state(on_devices(2), tmp_path, 0))
    assert all((np.asarray(found[p]) == np.asarray(leaves[p])).all() for p in leaves)


def test_what_does_not_fit_into_host_memory_is_copied_and_written_part_by_part(tmp_path, monkeypatch):
    """16 arrays of 1 MiB with room for two at a time; nothing may be donated before all are written."""
    from orbax.checkpoint._src.serialization import jax_array_handlers

    transfer, batches = jax_array_handlers.replica_slices.transfer_arrays_to_host, []

    def watched(arrays, *args, **kwargs):
        batches.append(sum(x.nbytes for x in arrays))
        return transfer(arrays, *args, **kwargs)

    monkeypatch.setattr(jax_array_handlers.replica_slices, "transfer_arrays_to_host", watched)
    drawn = np.random.default_rng(0).normal(size=(16, 1 << 18)).astype(np.float32)
    leaves = {f"params/{i:02}": jax.numpy.asarray(x) for i, x in enumerate(drawn)} | {"step": jax.numpy.int32(0)}
    monkeypatch.setattr(save, "available_bytes", lambda: 5 << 20)
    saver = save_once(tmp_path, leaves, events=EventLog(tmp_path, 1))
    for x in leaves.values():
        x.delete()
    saver.close()
    assert max(batches) <= 5 << 19 and sum(batches) == drawn.nbytes + 4
    saved = restore_numpy(tmp_path, 0)
    assert all((saved[f"params/{i:02}"] == x).all() for i, x in enumerate(drawn))
    assert read_json_lines(tmp_path / "events.jsonl")[0][0]["bytes_at_once"] == 5 << 19


@pytest.mark.parametrize(
    "config, kept",
    [
        ({"keep_last": 1}, {50}),
        ({"keep_last": 2}, {40, 50}),
        ({"keep_last": 1, "keep_every": 20}, {20, 40, 50}),
        ({"keep_last": 2, "keep_every": 30}, {30, 40, 50}),
        ({"keep_last": 1, "best": "validation_loss"}, {20, 50}),
        ({"keep_last": 1, "keep_every": 30, "best": "validation_loss"}, {20, 30, 50}),
    ],
)
def test_retention(config, kept):
    assert retained({10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: None}, CheckpointConfig(**config)) == kept


def test_the_best_is_read_from_the_manifests(tmp_path):
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
        checkpoint.entry(tmp_path, step).mkdir(parents=True)
        checkpoint.write_manifest(checkpoint.entry(tmp_path, step), {"step": step, "leaves": {}, "metrics": {"loss": loss}})
    remove_others(tmp_path, CheckpointConfig(keep_last=1, best="loss"))
    assert checkpoint.list_steps(tmp_path) == [2, 3]


def test_a_process_that_is_gone_is_no_lack_of_room(tmp_path, monkeypatch, capsys):
    """The run ends with 1, not with 2 and the advice to free space."""
    from sharder.agreement import PeerLost
    from sharder.stop import StopRequest
    from sharder.train.loop import train

    def exchange(name, value, timeout_s=0):
        if name.endswith("written"):
            raise PeerLost("process 1 did not answer within 1800 s (save/5/written): it is gone")
        return [value]

    monkeypatch.setattr(save, "exchange", exchange)
    assert train(small(), tmp_path / "run", "auto", StopRequest()) == 1
    errors = capsys.readouterr().err
    assert "error: process 1 did not answer" in errors and "space" not in errors

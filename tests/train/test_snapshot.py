"""RAM snapshots: what a killed run goes on from, and when it must not."""

import dataclasses
import json
import os
import shutil
import time

import jax
import numpy as np
import pytest
from small import small

from sharder import checkpoint
from sharder.checkpoint.manifest import checksum
from sharder.checkpoint.shards import ShardFile, generations
from sharder.config import UserError
from sharder.events import read_json_lines
from sharder.facts import read_facts
from sharder.report.verify import compare
from sharder.stop import StopRequest
from sharder.train import snapshot
from sharder.train.fingerprint import numpy_fingerprint
from sharder.train.loop import train
from sharder.train.setup import prepare
from sharder.train.snapshot import interval
from sharder.train.state import by_path, create_state, declare_state, with_shardings
from sharder.train.stepping import Stepper


class Killed(Exception):
    """Stands for the end of all processes."""


def config(**checkpoint):
    return dataclasses.replace(small(), checkpoint=dataclasses.replace(small().checkpoint, **checkpoint))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    train(config(snapshot_every=0), run_dir, "auto", StopRequest())
    return run_dir


@pytest.fixture
def killed(tmp_path, monkeypatch):
    """A run that took snapshots at 7 and 8 and was killed in step 9; its last checkpoint is of step 5."""
    dispatch = Stepper.dispatch

    def dies(self, state, batch, step, *rest):
        while step == 9:
            if checkpoint.list_steps(tmp_path / "run"):
                raise Killed
            time.sleep(0.01)
        return dispatch(self, state, batch, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "dispatch", dies)
        with pytest.raises(Killed):
            train(config(snapshot_every=1), tmp_path / "run", "auto", StopRequest())
    yield tmp_path / "run"
    shutil.rmtree(place(tmp_path / "run"), ignore_errors=True)


def place(run_dir):
    return snapshot.MEMORY / f"sharder-{os.getuid()}" / read_facts(run_dir)["run_id"]


def events(run_dir, kind):
    return [e for e in read_json_lines(run_dir / "events.jsonl")[0] if e["kind"] == kind]


def resume(run_dir, whole, **checkpoint):
    """Continues and returns the step that was restored; the bits are those of the run that was not interrupted."""
    assert train(config(**checkpoint), run_dir, "auto", StopRequest()) == 0
    assert compare(run_dir, whole).identical
    return events(run_dir, "restored")[-1]


def test_a_killed_run_goes_on_from_memory_and_leaves_nothing_there(killed, whole):
    assert sorted(g.facts["step"] for g in generations(place(killed))[0]) == [7, 8]
    restored = resume(killed, whole, snapshot_every=1)
    assert (restored["step"], restored["source"]) == (8, "snapshot")
    assert [r["step"] for r in read_json_lines(killed / "metrics.jsonl")[0] if r["attempt"] == 2] == [9, 10, 11, 12]
    assert not place(killed).exists()


def test_an_attempt_killed_before_its_first_snapshot_leaves_what_it_was_restored_from(killed, whole, monkeypatch):
    def dies(self, *rest):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "dispatch", dies)
        with pytest.raises(Killed):
            train(config(snapshot_every=1), killed, "auto", StopRequest())
    assert [g.facts["step"] for g in generations(place(killed))[0]] == [8]
    restored = resume(killed, whole, snapshot_every=1)
    assert (restored["attempt"], restored["step"], restored["source"]) == (3, 8, "snapshot")


def flip(run_dir, number):
    """One bit in the middle of both generations, or of the newer."""
    for generation in generations(place(run_dir))[0][-number:]:
        with open(generation.files[0][0], "r+b") as file:
            file.seek(generation.facts["size"] // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))


def cut_off(run_dir, number):
    for generation in generations(place(run_dir))[0][-number:]:
        os.truncate(generation.files[0][0], 100)


def spoil_tables(run_dir, number):
    for generation in generations(place(run_dir))[0][-number:]:
        table = generation.files[0][0].with_suffix(".json")
        table.write_text(table.read_text().replace('"size"', '"sise"'))


def call_it_another_step(run_dir, number):
    """Tables that are whole, but of other steps than their states."""
    for generation in generations(place(run_dir))[0][-number:]:
        path = generation.files[0][0].with_suffix(".json")
        table = json.loads(path.read_text())
        table["step"] += 2
        path.write_text(json.dumps({**table, "sha256": checksum(table)}))


@pytest.mark.parametrize("damage", [flip, cut_off, spoil_tables, call_it_another_step])
def test_on_doubt_the_last_checkpoint_is_used_and_that_is_said(killed, whole, damage, capsys):
    damage(killed, 2)
    restored = resume(killed, whole, snapshot_every=1)
    assert (restored["step"], restored["source"]) == (5, "checkpoint")
    (refused,) = events(killed, "snapshot_refused")
    assert refused["reason"] and "not used: " + refused["reason"] in capsys.readouterr().out


def test_the_generation_before_is_used_where_the_newer_is_cut_off(killed, whole):
    cut_off(killed, 1)
    assert resume(killed, whole)["step"] == 7


def test_a_newer_checkpoint_goes_before_an_older_snapshot(killed, whole, tmp_path, monkeypatch):
    """What a run leaves that was stopped, saved at step 12, and could not clean up."""
    kept = {p.name: p.read_bytes() for p in place(killed).glob("*")}
    where = place(killed)
    resume(killed, whole)
    where.mkdir(mode=0o700)
    for name, content in kept.items():
        (where / name).write_bytes(content)
    longer = dataclasses.replace(config(), train=dataclasses.replace(small().train, steps=13))
    assert train(longer, killed, "auto", StopRequest()) == 0
    assert events(killed, "restored")[-1]["step"] == 12 and not events(killed, "snapshot_refused")


def test_another_run_in_the_same_folder_has_nothing_to_do_with_it(killed, whole, tmp_path):
    killed.rename(tmp_path / "elsewhere")
    assert train(config(), killed, "auto", StopRequest()) == 0
    assert not events(killed, "restored") and compare(killed, whole).identical
    shutil.rmtree(place(tmp_path / "elsewhere"))


@pytest.mark.parametrize("parallel", [{"policy": "dp"}, {"policy": "fsdp", "fsdp": 4}, {"policy": "fsdp", "tensor": 2}])
def test_any_layout_of_the_same_host_finds_its_parts(tmp_path, parallel):
    """Written under fsdp on eight devices."""
    written = prepare(dataclasses.replace(small(), parallel=dataclasses.replace(small().parallel, policy="fsdp")))
    state = by_path(create_state(written.config, written.declared, written.state_shardings))
    ShardFile(tmp_path / "1-0-0.bin", 1 << 22).write(state, {"step": 3, "attempt": 1})
    setup = prepare(dataclasses.replace(small(), parallel=dataclasses.replace(small().parallel, **parallel)))
    target = with_shardings(declare_state(setup.config, setup.declared), setup.state_shardings)
    (generation,), faults = generations(tmp_path)
    assert generation.covers(target) and not faults
    found = generation.read(target)
    assert all(found[p].sharding == target[p].sharding for p in target)
    assert numpy_fingerprint({p: np.asarray(x) for p, x in found.items()}) == numpy_fingerprint(
        {p: np.asarray(x) for p, x in state.items()}
    )


def test_what_is_not_covered_is_not_read(tmp_path):
    """Half of the shards, as on one of two hosts, do for that half and not for the whole."""
    setup = prepare(small())
    target = with_shardings(declare_state(setup.config, setup.declared), setup.state_shardings)
    state = by_path(create_state(setup.config, setup.declared, setup.state_shardings))
    ShardFile(tmp_path / "1-0-0.bin", 1 << 22).write(state, {"step": 3, "attempt": 1})
    ((generation,), _) = generations(tmp_path)
    ((path, pieces),) = generation.files
    half = dataclasses.replace(generation, files=((path, tuple(p for p in pieces if not any(p.start))),))
    assert generation.covers(target) and not half.covers(target)


def test_a_generation_that_was_being_written_over_counts_no_more(tmp_path, monkeypatch):
    """A process may be killed anywhere in it: half a new state must not stand under the old table."""
    file, state = ShardFile(tmp_path / "1-0-0.bin", 4096), {"a": jax.numpy.arange(8.0), "b": jax.numpy.arange(4.0)}
    file.write(state, {"step": 3, "attempt": 1})
    assert [g.facts["step"] for g in generations(tmp_path)[0]] == [3]

    def dies(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(np, "copyto", dies)
        with pytest.raises(Killed):
            file.write(state, {"step": 5, "attempt": 1})
    assert generations(tmp_path) == ([], [])
    file.write(state, {"step": 7, "attempt": 1})
    assert [g.facts["step"] for g in generations(tmp_path)[0]] == [7]


def test_memory_that_would_not_do_is_refused_with_the_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(snapshot, "available_bytes", lambda: 1000)
    with pytest.raises(UserError, match=r"two of them take [\d,]+ bytes on this host, and 1,000 are free"):
        train(config(snapshot_every=5), tmp_path / "asked", "auto", StopRequest())
    assert train(config(), tmp_path / "auto", "auto", StopRequest()) == 0
    assert "no snapshots in memory: two of them take" in capsys.readouterr().out


def test_the_place_is_private(killed):
    assert [oct(p.stat().st_mode & 0o777) for p in (place(killed), place(killed).parent)] == ["0o700", "0o700"]


def test_a_place_that_others_can_read_is_not_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(snapshot, "MEMORY", tmp_path)
    (tmp_path / f"sharder-{os.getuid()}").mkdir(mode=0o755)
    assert train(config(), tmp_path / "run", "auto", StopRequest()) == 0
    assert "is not a private folder of this user" in capsys.readouterr().out


def test_the_default_costs_one_percent():
    assert interval(0.003, 0.3) == 1 and interval(0.03, 0.3) == 10 and interval(0.0301, 0.3) == 11


def test_without_being_told_the_interval_comes_from_what_was_measured(tmp_path):
    long = dataclasses.replace(config(every=0), train=dataclasses.replace(small().train, steps=40))
    assert train(long, tmp_path / "run", "auto", StopRequest()) == 0
    first = events(tmp_path / "run", "snapshot")[0]
    assert first["step"] == snapshot.FIRST_AFTER and first["every"] >= 1 and first["local_bytes"] > 800_000


def test_what_killed_runs_left_is_freed_when_their_folder_is_gone(tmp_path, monkeypatch):
    for name, exists in (("a", True), ("b", False)):
        (tmp_path / "base" / name).mkdir(parents=True)
        (tmp_path / name).mkdir() if exists else None
        (tmp_path / "base" / name / "run_dir").write_text(str(tmp_path / name))
    snapshot.remove_orphans(tmp_path / "base")
    assert [p.name for p in (tmp_path / "base").iterdir()] == ["a"]

"""A run at an address whose processes share no folder: each has a staging folder of its own, as on hosts of their own."""

import contextlib
import shutil
import signal

import pytest
from small import RECIPE, needs_tested_jax, sharder
from started import ended, send, started, wait_for

from sharder.events import read_json_lines

OPTIONS = ("--parallel.reduction", "exact", "--parallel.policy", "fsdp", "--checkpoint.snapshot-every", "0")


class Hosts:
    """A store in a folder, and hosts that lose everything between two attempts."""

    def __init__(self, place):
        self.place, self.address = place, f"file://{place}/store/run"
        self.store = place / "store" / "run"

    def start(self, count, steps, *options):
        command = (
            "train", RECIPE, *OPTIONS, "--run-dir", self.address, "--train.steps", steps, "--cluster.cpu-devices", 2 // count,
            *options,
        )  # fmt: skip
        alone = {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"} if count == 1 else {}
        return started([command] * count, environments={i: self.host(i) | alone for i in range(count)})

    def host(self, index):
        return {"SHARDER_STAGING": str(self.place / f"host{index}")}

    def lose(self):
        for host in self.place.glob("host*"):
            shutil.rmtree(host)

    def steps(self):
        return sorted(int(p.parent.name) for p in self.store.glob("checkpoints/*/manifest.json"))

    def read(self, *command):
        return sharder(*command, SHARDER_STAGING=str(self.place / "reader"))


@pytest.mark.slow
@needs_tested_jax
def test_hosts_that_share_nothing_but_the_store_go_on_after_all_of_them_are_lost(tmp_path):
    hosts = Hosts(tmp_path)
    with hosts.start(2, 1000) as processes:
        # What is in the store is not kept here.
        assert wait_for(lambda: 5 in hosts.steps() and not list(tmp_path.glob("host*/run-*/checkpoints/5")), processes)
        send(processes[1], signal.SIGKILL)
        send(processes[0], signal.SIGKILL)
        ended(processes)
    saved = max(hosts.steps())
    assert {p.name for p in hosts.store.glob(f"checkpoints/{saved}/params/ocdbt.*")} == {"ocdbt.process_0", "ocdbt.process_1"}
    hosts.lose()
    # One host has room for both shards; the other number of processes is no matter.
    for count, steps in ((1, saved + 3), (2, saved + 5)):
        with hosts.start(count, steps) as processes:
            assert [code for code, _ in ended(processes)] == [0] * count
        assert steps in hosts.steps()
        hosts.lose()
    verified = hosts.read("checkpoints", hosts.address, "--verify")
    assert verified.returncode == 0 and f"step {saved + 5:>8}  verified" in verified.stdout.replace("\n", " ")
    whole = tmp_path / "whole"
    assert sharder("train", RECIPE, *OPTIONS, "--run-dir", whole, "--train.steps", saved + 5).returncode == 0
    compared = hosts.read("verify", hosts.address, whole)
    assert compared.returncode == 0 and f"(1 .. {saved + 5}" in compared.stdout, compared.stdout
    restored = [e["step"] for e in read_json_lines(hosts.store / "events.jsonl")[0] if e["kind"] == "restored"]
    assert restored == [saved, saved + 3]


@pytest.mark.slow
@needs_tested_jax
def test_a_store_that_goes_away_costs_hosts_their_saves_and_not_the_run(tmp_path):
    """Nothing is where it was: the next save that reaches the store is whole."""
    hosts = Hosts(tmp_path)
    with hosts.start(2, 1000) as processes:
        assert wait_for(lambda: hosts.steps(), processes)
        while not (hosts.store / "checkpoints").is_file():
            shutil.rmtree(hosts.store / "checkpoints", ignore_errors=True)
            with contextlib.suppress(OSError):
                (hosts.store / "checkpoints").touch()
        assert wait_for(lambda: "save_failed" in events(tmp_path), processes)
        (hosts.store / "checkpoints").unlink()
        assert wait_for(lambda: hosts.steps(), processes)
        send(processes[1])
        assert [code for code, _ in ended(processes)] == [75, 75]
    assert hosts.steps() and hosts.read("checkpoints", hosts.address, "--verify").returncode == 0


def events(place):
    return [e["kind"] for path in place.glob("host0/run-*/events.jsonl") for e in read_json_lines(path)[0]]

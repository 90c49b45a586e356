"""SIGTERM and SIGINT to one of two real processes, in every phase: all end with 75, and what was trained is saved."""

import signal
from pathlib import Path

import pytest
from small import RECIPE
from started import ended, send, started, steps, train, wait_for

SLOW = Path(__file__).with_name("slow_phases.py")
BOTH = [pytest.param(0, marks=pytest.mark.slow), 1]


def run(tmp_path, phase, who, *options, number=signal.SIGTERM, recipe=None, seen=None):
    """Two processes of a run until `phase`, the signal to process `who`; their exit codes and outputs."""
    commands = [train(tmp_path / "run", *options, recipe=recipe or f"{SLOW}:{phase}")] * 2
    with started(commands, extra={"SHARDER_TEST_MARKS": str(tmp_path)}) as processes:
        seen = seen or (lambda: all((tmp_path / f"{phase}.{i}").exists() for i in (0, 1)))
        assert wait_for(seen, processes), [(p.poll(), p.communicate()[0]) for p in processes if p.poll() is not None]
        send(processes[who], number)
        found = ended(processes)
    assert [code for code, _ in found] == [75, 75], found
    return found


def newest(run_dir):
    return max((int(m.parent.name) for m in (run_dir / "checkpoints").glob("*/manifest.json")), default=None)


def have_met(process):
    """Whether another process is connected to the coordinator's port: local address and state 01 in the kernel's tables."""
    environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    port = int(next(e for e in environment if e.startswith(b"JAX_COORDINATOR_ADDRESS=")).rsplit(b":", 1)[1])
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_bring_up(tmp_path, who, number):
    """The third never comes."""
    with started([train(tmp_path / "run", "--cluster.bringup-timeout-s", 1000)] * 2, count=3) as processes:
        assert wait_for(lambda: have_met(processes[0]), processes)
        send(processes[who], number)
        found = ended(processes)
    for code, output in found:
        assert code == 75 and f"process {who} was stopped by {number.name}" in output, output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("who", BOTH)
def test_compile(tmp_path, who):
    found = run(tmp_path, "compile", who)
    assert "SIGTERM: ended before the first step; nothing is lost" in found[who][1]
    assert f"process {who} ended with code 75" in found[1 - who][1]


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_restore(tmp_path, who):
    with started([train(tmp_path / "run", "--train.steps", 2)] * 2) as processes:
        assert [code for code, _ in ended(processes)] == [0, 0]
    found = run(tmp_path, "restore", who)
    assert "nothing is lost" in found[who][1] and newest(tmp_path / "run") == 2


@pytest.mark.parametrize("who", BOTH)
def test_step(tmp_path, who):
    """All agree on a step, and save there."""
    run(
        tmp_path,
        "step",
        who,
        "--train.steps",
        100_000,
        "--checkpoint.every",
        0,
        recipe=RECIPE,
        seen=lambda: len(steps(tmp_path / "run")) > 2,
    )
    assert newest(tmp_path / "run") == steps(tmp_path / "run")[-1]


@pytest.mark.slow
def test_interrupts_of_both_are_one_request(tmp_path):
    with started([train(tmp_path / "run", "--train.steps", 100_000, "--checkpoint.every", 0)] * 2) as processes:
        assert wait_for(lambda: len(steps(tmp_path / "run")) > 2, processes)
        for process in processes:
            send(process, signal.SIGINT)
        assert [code for code, _ in ended(processes)] == [75, 75]
    assert newest(tmp_path / "run") == steps(tmp_path / "run")[-1]


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_evaluation(tmp_path, who):
    run(tmp_path, "evaluation", who)
    assert newest(tmp_path / "run") == 3 == steps(tmp_path / "run")[-1]


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_save(tmp_path, who):
    run(tmp_path, "save", who)
    assert newest(tmp_path / "run") == steps(tmp_path / "run")[-1] >= 5


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once_and_the_last_save_counts(tmp_path):
    """The first comes in a save that takes its time."""
    commands = [train(tmp_path / "run", "--checkpoint.every", 5, recipe=f"{SLOW}:save")] * 2
    with started(commands, extra={"SHARDER_TEST_MARKS": str(tmp_path)}) as processes:
        assert wait_for(lambda: (tmp_path / "save.1").exists(), processes)
        send(processes[1])
        assert any("a second signal ends at once" in line for line in processes[1].stdout)
        send(processes[1])
        found = ended(processes)
    assert [code for code, _ in found] == [75, 75] and "SIGTERM: ended without a save" in found[1][1], found

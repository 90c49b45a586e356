"""Real faults under the supervisor; every run must end as the one that nothing befell."""

import itertools
import json
import subprocess
import sys
import time

import pytest
from small import RECIPE, environment, needs_tested_jax, sharder

from sharder.events import read_json_lines
from sharder.launch.chaos import AFTER_A_RESTART, IN_PHASE, NOBODY_ENDS, Options, draw, happen, wrong_culprits, wrong_examples
from sharder.launch.faults import KINDS, PHASES, Fault
from sharder.launch.ledger import read_ledger
from sharder.report.verify import compare

pytestmark = needs_tested_jax
LAUNCHER_S = 3.0
"""To import and to leave a launcher, on a busy machine."""
SMALL = (
    "--parallel.reduction",
    "exact",
    "--parallel.virtual-workers",
    "4",
    "--checkpoint.every",
    "4",
    "--train.validate-every",
    "6",
    "--train.steps",
    "40",
)


def options(**fields):
    return Options(
        **(
            {
                "faults": 20,
                "seed": 1,
                "processes": 2,
                "devices_per_process": 1,
                "kinds": KINDS,
                "step_limit_s": 10.0,
                "startup_limit_s": 60.0,
                "reference": None,
            }
            | fields
        )
    )


def test_faults_are_drawn_from_the_seed_alone_and_fit_into_the_run():
    assert draw(options(), 200) == draw(options(), 200) != draw(options(seed=2), 200)
    drawn = draw(options(faults=50), 400)
    assert {f.kind for f in drawn} == set(KINDS) and max(f.step for f in drawn) < 400
    assert "evaluate" not in {f.phase for f in draw(options(faults=50), 400, evaluates=False)}
    assert drawn[0].phase not in ("bring-up", "compile", "restore")


def fault(process, number=0, what="SIGKILL"):
    return {"time_s": 1.0, "kind": "fault", "process": process, "what": what, "number": number}


def test_a_wrong_culprit_is_seen():
    ended = {"time_s": 2.0, "kind": "ended", "culprit": {"process": 0}}
    assert wrong_culprits([fault(0), ended]) == []
    assert "process 0" in wrong_culprits([fault(1), ended])[0]
    assert wrong_culprits([fault(0)])
    both = [fault(0), fault(1, number=1)]
    assert wrong_culprits([*both, ended]) == [], "two at once: one is named"
    later = {"time_s": 4.0, "kind": "ended", "culprit": {"process": 0}}
    assert "fault 1" in wrong_culprits([fault(0), ended, fault(1, number=1) | {"time_s": 3.0}, later])[0]
    assert wrong_culprits([fault(0, what=NOBODY_ENDS[0])]) == []


def test_lost_and_repeated_examples_are_seen(tmp_path):
    def write(run, process, rows):
        lines = [json.dumps({"attempt": attempt, "step": step, "ids": ids}) for attempt, step, ids in rows]
        (tmp_path / f"ids_{run}_{process}.jsonl").write_text("\n".join(lines) + "\n")

    write("ref", 0, [("x", 0, [1, 2, 3, 4]), ("x", 1, [5, 6, 7, 8])])
    write("run", 0, [("a", 0, [1, 2]), ("a", 1, [5, 6]), ("b", 1, [5, 6])])
    write("run", 1, [("a", 0, [3, 4]), ("b", 1, [7, 8])])
    assert wrong_examples(tmp_path, "run", "ref", 2) == []
    write("run", 1, [("a", 0, [3, 4]), ("b", 1, [7, 7])])
    assert "step 1" in wrong_examples(tmp_path, "run", "ref", 2)[0]
    write("run", 1, [("a", 0, [3, 4])])
    assert "without all of their examples: [1]" in wrong_examples(tmp_path, "run", "ref", 2)[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What the run is without faults, in a single process."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    result = sharder("train", RECIPE, "--run-dir", run_dir, "--cluster.cpu-devices", "2", *SMALL)
    assert result.returncode == 0, result.stderr
    return run_dir


def test_a_short_soak_ends_with_the_bits_of_the_uninterrupted_run(tmp_path):
    kinds = ("SIGKILL", "SIGTERM", "exception", "out of memory", "supervisor")
    arguments = ("--faults", "4", "--seed", "9", "--processes", "2", "--step-limit-s", "300", "--kinds", *kinds)
    result = sharder("chaos", RECIPE, "--run-dir", tmp_path / "run", *arguments, *SMALL, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 of 4 faults landed" in result.stdout and "no example lost or read twice" in result.stdout


def every_cell(options, steps, evaluates):
    """Every kind in every phase and process where it can be; what happens before the first step follows on a fault in the loop."""
    in_loop, before = [], []
    for kind, phase, process in itertools.product(KINDS, PHASES, range(options.processes)):
        if phase in IN_PHASE.get(kind, PHASES) and (process == 0 or kind not in NOBODY_ENDS):
            (before if phase in AFTER_A_RESTART else in_loop).append((kind, process, phase))
    # Nothing ends with a full disk, so that nothing can follow on it.
    in_loop.sort(key=lambda cell: cell[0] == "full disk")
    assert len(before) <= len(in_loop) - 1
    cells = [cell for pair in itertools.zip_longest(in_loop, before) for cell in pair if cell is not None]
    every = (steps - 8) // len(in_loop)
    return [Fault(n, kind, process, phase, 0 if phase in AFTER_A_RESTART else 3 + in_loop.index((kind, process, phase)) * every)
            for n, (kind, process, phase) in enumerate(cells)]  # fmt: skip


@pytest.mark.slow
def test_every_fault_in_every_phase_and_process(tmp_path, capsys):
    rest = [*SMALL[:-1], "400"]
    code = happen(RECIPE, options(faults=80), tmp_path / "run", rest, every_cell)
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "73 of 73 faults landed" in shown and "no example lost or read twice" in shown


def test_a_world_that_shrinks_and_grows_keeps_the_bits(reference, tmp_path):
    """Room for one process only, then for two again: the run saves and goes on each time, without a step redone."""
    run_dir = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "sharder",
        "launch",
        "--processes",
        "2",
        "--min-processes",
        "1",
        "--devices-per-process",
        "1",
    ]
    command += ["--", "train", RECIPE, "--run-dir", str(run_dir), *SMALL]
    began = time.time()
    launcher = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    capacity = run_dir / "logs" / "capacity"
    for world, room in ((1, "1"), (2, None)):
        before = len(steps_of(run_dir))
        while len(steps_of(run_dir)) < before + 6 and launcher.poll() is None:
            time.sleep(0.1)
        capacity.unlink() if room is None else capacity.write_text(room)
        while worlds(run_dir)[-1] != world and launcher.poll() is None:
            time.sleep(0.1)
    _, errors = launcher.communicate(timeout=600)
    outside_s = time.time() - began
    assert launcher.returncode == 0, errors
    assert worlds(run_dir) == [2, 1, 2]
    # None is redone; a record whose evaluation was interrupted by the stop is written again with it.
    records = read_json_lines(run_dir / "metrics.jsonl")[0]
    interrupted = [a["step"] for a, b in zip(records, records[1:]) if a["step"] == b["step"] and "validation_loss" in b]
    assert sorted(steps_of(run_dir)) == sorted([*range(1, 41), *interrupted])
    assert compare(reference, run_dir).identical
    # The classes have every second of a clock outside but those in which the launcher itself comes up and goes.
    assert 0 <= outside_s - sum(read_ledger(run_dir).seconds.values()) < 0.01 * outside_s + LAUNCHER_S


def steps_of(run_dir):
    return [r["step"] for r in read_json_lines(run_dir / "metrics.jsonl")[0]]


def worlds(run_dir):
    return [e["processes"] for e in read_json_lines(run_dir / "events.jsonl")[0] if e["kind"] == "spawn"]

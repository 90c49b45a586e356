"""`sharder chaos`: a supervised run with faults, beside the same run without any, and what came of it."""

import itertools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sharder.config import UserError
from sharder.events import read_json_lines
from sharder.facts import is_run, read_config, read_facts, snapshot_place
from sharder.launch import faults, guard
from sharder.launch.faults import Fault
from sharder.launch.ledger import Ledger, describe, read_ledger
from sharder.options import parse
from sharder.recipes import split_name
from sharder.report.verify import compare
from sharder.report.verify import describe as describe_comparison

MARK = "SHARDER_CHAOS"
"""In the environment of everything that a chaos run starts, so that what is left over can be found."""
AFTER_A_RESTART = ("bring-up", "compile", "restore")
IN_PHASE = {"data loop": ("step",), "full disk": ("save",), "corrupt checkpoint": ("step",), "lost snapshot": ("step",)}
USAGE = "sharder chaos RECIPE --faults N --seed S --processes N --run-dir DIR [--devices-per-process K] [options of train]"


@dataclass(frozen=True)
class Options:
    faults: int
    seed: int
    processes: int
    devices_per_process: int
    kinds: tuple[str, ...]
    step_limit_s: float
    startup_limit_s: float
    reference: Path | None


def draw(options: Options, steps: int, evaluates: bool = True) -> list[Fault]:
    """A fault every so many steps; during evaluations only where the run `evaluates` on its way. What happens before the first step of an attempt follows on a fault that begins one."""
    chance, drawn = random.Random(options.seed), []
    every = max(1, (steps - 4) // options.faults)
    for number in range(options.faults):
        kind = chance.choice(options.kinds)
        allowed = [p for p in IN_PHASE.get(kind, faults.PHASES) if evaluates or p != "evaluate"]
        # A run that was only asked to stop saves, and one whose disk is full goes on: no attempt follows for certain.
        follows = bool(drawn) and drawn[-1].kind not in ("full disk",) and drawn[-1].phase not in AFTER_A_RESTART
        phase = chance.choice([p for p in allowed if follows or p not in AFTER_A_RESTART])
        process = 0 if kind in ("supervisor", "full disk") else chance.randrange(options.processes)
        step = 0 if phase in AFTER_A_RESTART else 3 + number * every
        drawn.append(Fault(number, kind, process, phase, step))
    return drawn


def run(arguments: list[str]) -> int:
    """Train while processes, disk and memory fail, and compare with the run that nothing befell."""
    recipe, rest = split_name(arguments, "RECIPE", USAGE)

    def command(
        faults: int, processes: int, run_dir: Path, seed: int = 0, devices_per_process: int = 1,
        kinds: tuple[str, ...] = faults.KINDS, step_limit_s: float = 10.0, startup_limit_s: float = 90.0,
        reference: Path | None = None,
    ) -> tuple[Options, Path]:  # fmt: skip
        """
        Args:
            faults: How many.
            processes: Number of processes of the run.
            run_dir: Folder of the run; it must not exist. Its faults are kept beside it.
            seed: Decides the faults.
            devices_per_process: Simulated CPU devices of each.
            kinds: Those to draw from.
            step_limit_s: As of launch: how long a step may take until it counts as stuck.
            startup_limit_s: As of launch: how long anything else may take.
            reference: An uninterrupted run of the same recipe; unset: one is trained first, in a single process.
        """
        return Options(faults, seed, processes, devices_per_process, kinds, step_limit_s, startup_limit_s, reference), run_dir

    (options, run_dir), of_train = parse(
        command, args=rest, prog="sharder chaos RECIPE", description=f"{run.__doc__} {USAGE}", return_unknown_args=True
    )
    check(options, run_dir)
    return happen(recipe, options, run_dir, of_train)


def check(options: Options, run_dir: Path) -> None:
    """Raises UserError for what cannot be run."""
    if options.faults < 1 or options.processes < 1 or options.devices_per_process < 1:
        raise UserError("--faults, --processes and --devices-per-process must be at least 1.")
    unknown = set(options.kinds) - set(faults.KINDS)
    if unknown or not options.kinds:
        raise UserError(f"--kinds {', '.join(sorted(unknown)) or 'is empty'}: choose from {', '.join(faults.KINDS)}.")
    if run_dir.exists():
        raise UserError(f"--run-dir {run_dir} exists: choose another one.")


def happen(
    recipe: str, options: Options, run_dir: Path, rest: list[str], plan: Callable[[Options, int, bool], list[Fault]] = draw
) -> int:  # fmt: skip
    """0 where every fault landed and the run is what it would have been without them, else 1. `plan`: the faults of a run of so
    many steps, which does or does not evaluate on its way."""
    folder = run_dir.with_name(run_dir.name + ".faults")
    folder.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ) | {faults.PLAN: str(folder), MARK: secrets.token_hex(8)}
    try:
        reference = options.reference or train_reference(recipe, options, run_dir, rest, environment)
        planned = plan(options, steps_of(reference), read_config(reference).train.validate_every > 0)
        faults.write_plan(folder, planned)
        code, deaths = supervised(recipe, options, run_dir, rest, environment)
        time.sleep(0.5)
        orphans = guard.marked(f"{MARK}={environment[MARK]}")
    finally:
        guard.sweep(f"{MARK}={environment[MARK]}")
    wrong = problems(planned, folder, run_dir, reference, code)
    wrong += [f"{len(orphans)} process(es) were left: {sorted(orphans)}"] if orphans else []
    place = snapshot_place(read_facts(run_dir)["run_id"]) if is_run(run_dir) else None
    wrong += [f"left on tmpfs: {place}"] if place is not None and place.exists() else []
    examples = "; no example lost or read twice" if reference == own_reference(run_dir) else ""
    tell(planned, folder, read_ledger(run_dir), deaths, wrong, examples)
    return 1 if wrong else 0


def own_reference(run_dir: Path) -> Path:
    return run_dir.with_name(run_dir.name + ".reference")


def train_reference(recipe: str, options: Options, run_dir: Path, rest: list[str], environment: dict[str, str]) -> Path:
    reference = own_reference(run_dir)
    devices = str(options.processes * options.devices_per_process)
    command = [
        sys.executable,
        "-m",
        "sharder.launch.faults",
        "train",
        recipe,
        "--run-dir",
        str(reference),
        "--cluster.cpu-devices",
        devices,
    ]
    code = subprocess.run([*command, *rest], env=environment, stdout=subprocess.DEVNULL).returncode
    if code:
        raise UserError(f"the uninterrupted run ended with code {code}: {' '.join(command)}")
    return reference


def steps_of(reference: Path) -> int:
    return read_json_lines(reference / "metrics.jsonl")[0][-1]["step"]


def supervised(recipe: str, options: Options, run_dir: Path, rest: list[str], environment: dict[str, str]) -> tuple[int, int]:
    """Runs the supervisor until it ends by itself; its exit code, and how often it was killed."""
    command = [
        sys.executable, "-m", "sharder.launch.faults", "launch", "--processes", str(options.processes), "--max-restarts", str(10 * options.faults),
        "--step-limit-s", str(options.step_limit_s), "--startup-limit-s", str(options.startup_limit_s), "--devices-per-process", str(options.devices_per_process),
        "--", "train", recipe, "--run-dir", str(run_dir), *rest,
    ]  # fmt: skip
    for deaths in itertools.count():
        code = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode
        if code != -signal.SIGKILL or deaths > options.faults:
            return code, deaths


def problems(planned: list[Fault], folder: Path, run_dir: Path, reference: Path, code: int) -> list[str]:
    """What is not as it would be without faults, or was not as it should be with them."""
    found = [] if code == 0 else [f"the run ended with code {code}"]
    missing = sorted({f.number for f in planned} - set(faults.landed(folder)))
    found += [f"fault {n} did not land" for n in missing]
    if code == 0:
        result = compare(reference, run_dir)
        found += [] if result.identical and result.last_step == steps_of(reference) else [describe_comparison(result)]
        if reference == own_reference(run_dir):  # one from elsewhere did not write its examples down
            found += wrong_examples(folder, run_dir.name, reference.name, steps_of(reference))
    return found + wrong_culprits(read_json_lines(run_dir / "events.jsonl")[0])


def wrong_examples(folder: Path, run: str, reference: str, steps: int) -> list[str]:
    """Steps whose examples, as the processes wrote them down, are not those of the reference, each once."""
    expected = {step: ids for (_, step), ids in read_ids(folder, reference).items()}
    complete, found = set(), []
    for (attempt, step), ids in read_ids(folder, run).items():
        if step not in expected:
            continue  # read ahead
        if len(set(ids)) != len(ids) or not set(ids) <= set(expected[step]):
            found.append(f"step {step} of the attempt at {attempt} read other examples, or some twice")
        if sorted(ids) == sorted(expected[step]):
            complete.add(step)
    lost = sorted(set(range(steps)) - complete)
    return found + ([f"steps without all of their examples: {lost[:10]}"] if lost else [])


def read_ids(folder: Path, run: str) -> dict[tuple[str, int], list[int]]:
    """Examples by attempt and step, over all processes."""
    found = defaultdict(list)
    for path in sorted(folder.glob(f"ids_{run}_*.jsonl")):
        for record in read_json_lines(path)[0]:
            found[record["attempt"], record["step"]] += record["ids"]
    return dict(found)


NOBODY_ENDS = ("full disk", "supervisor")
"""Faults after which no process of the run is to blame."""


def wrong_culprits(events: list[dict]) -> list[str]:
    """Faults that the ledger lays at another process's door; of several before one end each is as good as the other."""
    found, since = [], []
    for event in [*sorted(events, key=lambda e: e["time_s"]), {"kind": "ended"}]:
        if event["kind"] == "fault" and event["what"] not in NOBODY_ENDS:
            since.append(event)
        elif event["kind"] == "ended":
            named = (event.get("culprit") or {}).get("process")
            hit = {fault["process"] for fault in since}
            # All processes save and stop together after a SIGTERM.
            wrong = [f for f in since if named is None or (named not in hit and f["what"] != "SIGTERM")]
            found += [
                f"fault {f['number']} ({f['what']}, process {f['process']}) is laid at the door of process {named}"
                for f in wrong
            ]
            since = []
    return found


def tell(planned: list[Fault], folder: Path, ledger: Ledger, deaths: int, wrong: list[str], examples: str) -> None:
    """The verdict on standard output; `examples`: what it says of them where all is well."""
    print(describe(ledger))
    happened = set(faults.landed(folder))
    kinds = defaultdict(int)
    for fault in planned:
        kinds[fault.kind] += fault.number in happened
    lost = ledger.wall_s - ledger.seconds["productive"] - ledger.seconds["stopped"]
    print(
        f"{len(happened)} of {len(planned)} faults landed ({', '.join(f'{k} {n}' for k, n in kinds.items())}); supervisor killed {deaths} times"
    )
    print(f"{lost / max(len(happened), 1):.2f} s lost for each fault; goodput {100 * ledger.goodput:.1f} %")
    print("\n".join(f"wrong: {w}" for w in wrong) or f"every step has the fingerprint of the uninterrupted run{examples}")
    (folder / "result.json").write_text(
        json.dumps({"landed": len(happened), "planned": len(planned), "wrong": wrong, "goodput": ledger.goodput})
    )

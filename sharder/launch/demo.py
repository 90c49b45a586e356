"""The demonstration: a run whose processes are killed, lost and brought back, beside the same run that nothing befalls.

Both are real runs of the command line; at the end their fingerprints are compared step by step.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from sharder.config import UserError
from sharder.events import read_json_lines
from sharder.launch.faults import corrupt_newest
from sharder.launch.ledger import describe as describe_ledger
from sharder.launch.ledger import read_ledger
from sharder.report.verify import compare, describe

STEPS = 36
MARK = ".sharder-demo"
"""A file in the demo's folder, so that nothing else is ever replaced."""
OPTIONS = (
    "--train.steps", str(STEPS), "--parallel.policy", "fsdp", "--parallel.reduction", "exact", "--data.seq-len", "64",
    "--train.global-batch-size", "16", "--checkpoint.every", "10", "--train.validate-every", "0",
)  # fmt: skip
LAUNCH = ("launch", "--processes", "2", "--devices-per-process", "1", "--min-processes", "1", "--step-limit-s", "20", "--")
KEYS = {"k": "kill", "s": "stop", "c": "corrupt", "q": "quit"}

SCRIPT = {8: "kill", 16: "lose", 24: "return"}
"""What happens when the supervised run has done so many steps."""


@dataclass
class Show:
    """Two runs, and what was done to the first."""

    folder: Path
    log: Path
    supervised: subprocess.Popen
    alone: subprocess.Popen
    done: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "supervised"

    @property
    def reference(self) -> Path:
        return self.folder / "alone"

    def running(self) -> bool:
        return self.supervised.poll() is None or self.alone.poll() is None

    def act(self, what: str, step: int) -> None:
        """Does it to the last process of the supervised run."""
        spawned = [e for e in read_json_lines(self.run / "events.jsonl")[0] if e["kind"] == "spawn"]
        if not spawned or self.supervised.poll() is not None:
            return
        victim, capacity = spawned[-1]["pids"][-1], self.run / "logs" / "capacity"
        match what:
            case "kill":
                told = f"process {len(spawned[-1]['pids']) - 1} killed (SIGKILL)"
                signalled(victim, signal.SIGKILL)
            case "stop":
                told = f"process {len(spawned[-1]['pids']) - 1} stopped (SIGSTOP): alive, but it does not answer"
                signalled(victim, signal.SIGSTOP)
            case "corrupt":
                path = corrupt_newest(self.run)
                told = (
                    "fewer than two checkpoints yet: none is corrupted, process killed"
                    if path is None
                    else f"a byte flipped in {path.relative_to(self.run)}, process killed"
                )
                signalled(victim, signal.SIGKILL)
            case "lose":
                told = "process 1 lost for good: its room is gone"
                capacity.write_text("1")
                signalled(victim, signal.SIGKILL)
            case "return":
                told = "its room is there again"
                capacity.unlink(missing_ok=True)
        self.done.append(f"after step {step}: {told}")


def signalled(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def sharder(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sharder", *arguments]


def begin(folder: Path) -> Show:
    """Starts both runs. Raises UserError for a foreign folder."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise UserError(f"{folder} is not empty and not an old demo: choose another --dir.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    log = folder / "launch.log"
    with open(log, "wb") as output:
        train = ("train", "tiny_lm", *OPTIONS)
        supervised = subprocess.Popen(
            sharder(*LAUNCH, *train, "--run-dir", str(folder / "supervised")), stdout=output, stderr=output
        )
        with open(folder / "alone.log", "wb") as other:
            command = sharder(*train, "--cluster.cpu-devices", "2", "--run-dir", str(folder / "alone"))
            alone = subprocess.Popen(command, stdout=other, stderr=other)
    return Show(folder, log, supervised, alone)


def records(run: Path) -> dict[int, dict]:
    return {r["step"]: r for r in read_json_lines(run / "metrics.jsonl")[0]}


def picture(show: Show, interactive: bool) -> Group:
    """The last steps of both runs, and what was done."""
    ours, theirs = records(show.run), records(show.reference)
    table = Table(
        "step",
        "loss",
        "fingerprint",
        "attempt",
        "alone: loss",
        "fingerprint",
        "",
        title="2 processes with faults, and 1 without",
    )
    for step in sorted(ours.keys() | theirs.keys())[-12:]:
        a, b = ours.get(step), theirs.get(step)
        same = "" if a is None or b is None else "same" if a["fingerprint"] == b["fingerprint"] else "DIFFERENT"
        cells = [
            *((a["loss_hex"], a["fingerprint"], str(a["attempt"])) if a else ("",) * 3),
            *((b["loss_hex"], b["fingerprint"]) if b else ("",) * 2),
        ]
        table.add_row(str(step), *cells, same)
    keys = ["k kill, s stop, c corrupt the newest checkpoint, q quit"] if interactive else []
    return Group(table, *show.done, *keys)


@contextlib.contextmanager
def keys(interactive: bool) -> Iterator[None]:
    """Single keys from the terminal, without Enter."""
    if not interactive:
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin.fileno())
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def pressed(wait_s: float, interactive: bool) -> str | None:
    if not interactive:
        time.sleep(wait_s)
        return None
    ready, _, _ = select.select([sys.stdin], [], [], wait_s)
    return KEYS.get(sys.stdin.read(1)) if ready else None


def play(show: Show, console: Console, scripted: bool) -> bool:
    """Until both runs have ended; False where the user quit."""
    interactive = sys.stdin.isatty() and console.is_terminal and not scripted
    script, told = dict(SCRIPT), 0
    with (
        keys(interactive),
        Live(picture(show, interactive), console=console, refresh_per_second=4)
        if console.is_terminal
        else contextlib.nullcontext() as live,
    ):
        while show.running():
            what = pressed(0.2, interactive)
            if what == "quit":
                return False
            step = max(records(show.run), default=0)
            due = next((s for s in script if s <= step), None)
            # What was pressed takes the place of the script.
            if what is not None:
                script.clear()
                show.act(what, step)
            elif due is not None:
                show.act(script.pop(due), step)
            if live is not None:
                live.update(picture(show, interactive))
            else:
                for line in show.done[told:]:
                    console.print(line, markup=False)
                told = len(show.done)
        if live is not None:
            live.update(picture(show, interactive))
    return True


def run_demo(folder: Path, scripted: bool = False) -> int:
    """Runs everything in `folder`; 0 where the two runs are identical, else 1. Raises UserError for a foreign folder."""
    console, started = Console(), time.monotonic()
    show = begin(folder)
    console.print(
        f"tiny_lm, {STEPS} steps in exact mode: 2 processes under the supervisor, and the same in 1; output in {folder}/*.log"
    )
    try:
        if not play(show, console, scripted):
            console.print("quit.")
            return 130
    finally:
        end(show)
    if not console.is_terminal:
        console.print(picture(show, False))
    for name, process, log in (("supervised", show.supervised, show.log), ("alone", show.alone, folder / "alone.log")):
        if process.returncode:
            console.print(log.read_text(errors="replace")[-2000:], markup=False)
            raise UserError(f"the {name} run ended with code {process.returncode}; its output is in {log}.")
    result = compare(show.reference, show.run)
    console.print(describe_ledger(read_ledger(show.run)), markup=False)
    verdict = f"identical through step {result.last_step}" if result.identical else describe(result)
    console.print(
        f"{verdict}: {result.num_compared} steps of two real runs; {time.monotonic() - started:.0f} s in all, runs in {folder}"
    )
    return 0 if result.identical and result.last_step == STEPS else 1


def end(show: Show) -> None:
    """Ends what still runs; the supervisor's guard ends its processes."""
    for process in (show.supervised, show.alone):
        if process.poll() is None:
            process.kill()
        process.wait()

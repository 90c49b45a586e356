"""Faults that really happen, at a chosen place of a run: `python -m sharder.launch.faults` is `sharder` with them.

The plan is a list of faults, each armed when the one before it has happened. Every process looks at it whenever it enters a
phase (`sharder.heartbeat.enter` is the one seam), and does to itself what the armed fault says. Nothing of the product knows
of this module.
"""

import json
import os
import resource
import runpy
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from sharder import heartbeat
from sharder.events import LineFile
from sharder.facts import read_facts, snapshot_place

PLAN = "SHARDER_FAULTS"
"""Names the folder with plan.json; what has happened and which examples were read are written beside it."""

KINDS = (
    "SIGKILL", "SIGTERM", "SIGSTOP", "exception", "data loop", "out of memory", "full disk", "corrupt checkpoint", "lost snapshot",
    "supervisor",
)  # fmt: skip
PHASES = ("bring-up", "compile", "restore", "step", "save", "evaluate")


@dataclass(frozen=True)
class Fault:
    number: int
    kind: str
    process: int
    phase: str
    step: int
    """Not before this step."""

    def is_due(self, process: int, phase: str, step: int) -> bool:
        return process == self.process and phase == self.phase and step >= self.step


def write_plan(folder: Path, faults: list[Fault]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps([asdict(f) for f in faults]))


def landed(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("landed_")) for p in folder.glob("landed_*"))


class Injector:
    """Of one process."""

    def __init__(self, folder: Path, run_dir: Path, process: int):
        self.folder, self.run_dir, self.process = folder, run_dir, process
        self.faults = [Fault(**f) for f in json.loads((folder / "plan.json").read_text())]
        self.looping = False
        self.full_since: int | None = None

    def armed(self) -> Fault | None:
        """The first that has not happened; none before the run has begun."""
        if not (self.run_dir / "config.json").exists():
            return None
        return next((f for f in self.faults if not (self.folder / f"landed_{f.number}").exists()), None)

    def enter(self, phase: str, step: int | None) -> None:
        """What is due happens."""
        fault = self.armed()
        step = step or 0
        if self.full_since is not None and step > self.full_since + 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            self.full_since = None
        if fault is not None and fault.is_due(self.process, phase, step):
            self.land(fault, step)

    def land(self, fault: Fault, step: int) -> None:
        try:
            os.close(os.open(self.folder / f"landed_{fault.number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        record = {
            "time_s": time.time(), "kind": "fault", "attempt": None, "process": fault.process, "step": step, "what": fault.kind,
            "phase": fault.phase, "number": fault.number, "landed": True,
        }  # fmt: skip
        LineFile(self.run_dir / "events.jsonl").write(json.dumps(record))
        print(f"fault {fault.number}: {fault.kind} in {fault.phase}, step {step}", file=sys.stderr, flush=True)
        self.act(fault, step)

    def act(self, fault: Fault, step: int) -> None:
        match fault.kind:
            case "SIGKILL" | "SIGTERM" | "SIGSTOP":
                os.kill(os.getpid(), getattr(signal, fault.kind))
            case "exception":
                raise RuntimeError(f"an injected exception in {fault.phase}, {in_letters(fault.number)}")
            case "data loop":
                self.looping = True
            case "out of memory":
                used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
                resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
                try:
                    bytearray(1 << 32)
                except MemoryError:
                    raise MemoryError(f"an injected lack of memory in {fault.phase}, {in_letters(fault.number)}") from None
            case "full disk":
                files = [self.run_dir / name for name in ("events.jsonl", "metrics.jsonl")]
                soft = max(f.stat().st_size for f in files) + (64 << 10)
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
                self.full_since = step
            case "corrupt checkpoint":
                corrupt_newest(self.run_dir)
                lose_snapshots(self.run_dir)
                os.kill(os.getpid(), signal.SIGKILL)
            case "lost snapshot":
                lose_snapshots(self.run_dir)
                os.kill(os.getpid(), signal.SIGKILL)
            case "supervisor":
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(60)  # the kernel ends this process meanwhile


def in_letters(number: int) -> str:
    """So that two faults are not taken for one error that came again, whose numbers may differ."""
    return "fault " + "".join("abcdefghij"[int(digit)] for digit in str(number))


def corrupt_newest(run_dir: Path) -> Path | None:
    """Flips a byte in the largest data file of the newest checkpoint; returns the file.

    None where there is not another one before it: a run of whose checkpoints none is good stops, as it must, and would end the test.
    """
    steps = [p.parent for p in (run_dir / "checkpoints").glob("*/manifest.json") if p.parent.name.isdecimal()]
    if len(steps) < 2:
        return None
    newest = max(steps, key=lambda p: int(p.name))
    files = [p for p in newest.rglob("*") if p.is_file() and "/d/" in str(p)]
    if not files:
        return None
    largest = max(files, key=lambda p: p.stat().st_size)
    with open(largest, "r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x40]))
    return largest


def lose_snapshots(run_dir: Path) -> None:
    """Removes what the run keeps in memory."""
    shutil.rmtree(snapshot_place(read_facts(run_dir)["run_id"]), ignore_errors=True)


class RecordingOrder:
    """An order that remembers which examples were asked for."""

    def __init__(self, order, ids: list):
        self._order, self._ids = order, ids

    def ids(self, step: int, start: int, stop: int):
        found = self._order.ids(step, start, stop)
        self._ids.extend(int(i) for i in found)
        return found


def install(injector: Injector | None, ids: LineFile | None) -> None:
    """Puts the faults in, and writes which examples each process reads."""
    import sharder.data.loader as loader

    enter, read_step = heartbeat.enter, loader.read_step

    def entering(phase: str, step: int | None = None) -> None:
        enter(phase, step)
        if injector is not None:
            injector.enter("step" if phase in heartbeat.LOOP and phase == "step" else phase, step)

    def reading(dataset, order, layout, step):
        while injector is not None and injector.looping:
            pass
        found: list[int] = []
        batch = read_step(dataset, RecordingOrder(order, found), layout, step)
        if ids is not None:
            attempt = os.environ.get("JAX_COORDINATOR_ADDRESS", str(os.getpid()))
            ids.write(json.dumps({"attempt": attempt, "step": step, "ids": found}))
        return batch

    heartbeat.enter, loader.read_step = entering, reading


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["launch"]:
        from sharder.launch import processes

        processes.MODULE = "sharder.launch.faults"
    run(arguments)


def run(arguments: list[str]) -> None:
    """`sharder <arguments>`, with the faults of the plan where the command trains."""
    from sharder.launch.command import run_dir_of

    folder, run_dir = os.environ.get(PLAN), run_dir_of(arguments)
    if folder and run_dir is not None and arguments[:1] == ["train"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # jax is imported before sharder.stop listens
        process = int(os.environ.get("JAX_PROCESS_ID", "0"))
        ids = LineFile(Path(folder) / f"ids_{run_dir.name}_{process}.jsonl")
        has_plan = (Path(folder) / "plan.json").exists() and "JAX_PROCESS_ID" in os.environ
        install(Injector(Path(folder), run_dir, process) if has_plan else None, ids)
    sys.argv = ["sharder", *arguments]
    runpy.run_module("sharder", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

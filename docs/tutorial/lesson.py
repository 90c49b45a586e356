"""What the lessons share: eight simulated devices, named checks, a record, a figure, and a reader of compiled programs."""

import argparse
import json
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import jax

NUM_DEVICES = 8

# A lesson leaves the accelerators of this machine alone. The CPU client reads the count once, when the first array is made;
# the older way, which needs no code, is XLA_FLAGS=--xla_force_host_platform_device_count=8 in the environment.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
# Threads of that client. By default there is one for each device, and a busy machine may hang where a device waits in two
# collectives at once, one inside a loop and one outside.
os.environ.setdefault("PJRT_NPROC", str(2 * NUM_DEVICES))

import matplotlib  # noqa: E402

matplotlib.use("svg")
matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "sharder"})

from matplotlib import pyplot  # noqa: E402

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ITEM_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "f64": 8, "pred": 1}


class Lesson:
    """Collects what a lesson checked and measured."""

    def __init__(self, name: str, out: Path):
        self.name, self.out = name, out
        self.checks: list[dict] = []
        self.measured: dict = {}
        self.started = time.perf_counter()

    def check(self, name: str, passed: bool, said: str) -> None:
        """One property, and the numbers that show it."""
        self._note(name, "ok" if passed else "failed", said)

    def close(self, name: str, actual, expected, limit: float = 1e-4) -> None:
        """The largest difference of two arrays, over the largest entry of the second, is below the limit."""
        actual, expected = jax.device_get((actual, expected))
        error = float(abs(actual - expected).max()) / max(float(abs(expected).max()), 1e-12)
        self.check(name, actual.shape == expected.shape and error < limit, f"relative error {error:.1e}, below {limit:.0e}")

    def refused(self, name: str, attempt: Callable[[], object], reason: str) -> None:
        """It raises an error whose message contains the reason."""
        try:
            attempt()
        except Exception as error:
            said = re.sub(r"\s+", " ", str(error))
            self.check(name, reason in said, f"{type(error).__name__}: {said[:240]}")
        else:
            self.check(name, False, "it was accepted")

    def skip(self, name: str, reason: str) -> None:
        self._note(name, "skipped", reason)

    def _note(self, name: str, state: str, said: str) -> None:
        if any(c["name"] == name for c in self.checks):
            raise ValueError(f"two checks are called {name}")
        self.checks.append({"name": name, "state": state, "said": said})
        print(f"  [{state:^7}] {name}: {said}")

    def save(self) -> int:
        """Writes the record; returns the number of checks that failed."""
        count = {state: sum(c["state"] == state for c in self.checks) for state in ("ok", "failed", "skipped")}
        record = {
            "lesson": self.name,
            "jax": jax.__version__,
            "num_devices": jax.device_count(),
            "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "seconds": round(time.perf_counter() - self.started, 2),
            "count": count,
            "checks": self.checks,
            "measured": self.measured,
        }
        (self.out / f"{self.name}.json").write_text(json.dumps(record, indent=2) + "\n")
        counted = ", ".join(f"{n} {state}" for state, n in count.items())
        print(f"{self.name}: {counted}; {record['seconds']} s; files in {self.out}")
        return count["failed"]


def run(teach: Callable[[Lesson], pyplot.Figure]) -> None:
    """Gives the lesson, saves its record and the figure that it returns; exit code 1 if a check failed."""
    script = Path(sys.argv[0])
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--out", type=Path, default=script.parent / "out", help="folder for the record and the figure")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    lesson = Lesson(script.stem, out)
    try:
        figure = teach(lesson)
        figure.tight_layout()
        figure.savefig(out / f"{lesson.name}.svg", metadata={"Date": None}, bbox_inches="tight")
    except Exception as error:
        traceback.print_exc()
        lesson.check("lesson_ran_to_its_end", False, f"{type(error).__name__}: {error}"[:160])
    sys.exit(1 if lesson.save() else 0)


def heading(text: str) -> None:
    print(f"\n{text}")


def collectives(compiled: jax.stages.Compiled) -> list[dict]:
    """The collectives of a compiled program: kind, number of devices that one group joins, bytes.

    A line of the program's text is `%name = type kind(operands), attributes`. The type is a tuple where the compiler has put
    several arrays into one collective. `payload_bytes` is the whole array: what a gather gives, what a reduction takes.
    `received_bytes` is what a device receives at least, on a ring (Patarasuk and Yuan 2009): (n - 1)/n of the payload, twice
    that for an all-reduce. Loops are not unrolled, what is inside one counts once; `sharder check` counts them too.
    """
    found = []
    for line in compiled.as_text().splitlines():
        match = re.search(rf"= (.+?) ({'|'.join(COLLECTIVES)})\(", line)
        if match:
            kind, n = match[2], group_size(line)
            arrays = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            payload = sum(ITEM_BYTES[dtype] * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in arrays)
            payload *= n if kind == "reduce-scatter" else 1  # whose result is a part
            share = 1 if kind == "collective-permute" else (2 if kind == "all-reduce" else 1) * (n - 1) / n
            found.append({"kind": kind, "group_size": n, "payload_bytes": payload, "received_bytes": share * payload})
    return found


def group_size(line: str) -> int:
    """How many devices one group of a collective joins, from the three ways to write groups.

    `{{0,1},{2,3}}` lists them; `[2,4]<=[8]` is 2 groups of 4; `mesh['a'=2,'b'=4] {'b'}` is along b, and `'b':(2)2` is a part
    of b of size 2.
    """
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line)
    if listed:
        return listed[1].count(",") + 1
    rows = re.search(r"replica_groups=\[\d+,(\d+)\]<=", line)
    if rows:
        return int(rows[1])
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line)
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        along = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in along)
    if "replica_groups=" in line.replace("replica_groups={}", ""):
        raise ValueError(f"groups written in an unknown way: {line.strip()[:200]}")
    return jax.device_count()


def kinds(compiled: jax.stages.Compiled) -> dict[str, int]:
    """How many collectives of each kind a program has."""
    names = [c["kind"] for c in collectives(compiled)]
    return {kind: names.count(kind) for kind in COLLECTIVES if kind in names}

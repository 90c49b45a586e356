"""`sharder scale RECIPE`: the same step on more and more devices, each point in processes of its own.

strong: the global batch stays, devices share it. weak: the examples of a device stay, the batch grows. Speed-up is that of
examples per second against the first point, efficiency speed-up over devices. Simulated devices share the cores of one host:
there no speed-up is claimed, and collectives and their bytes, which are those of real devices, are what counts.
"""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from sharder.config import UserError
from sharder.options import parse
from sharder.recipes import load_recipe, split_name
from sharder.report import plots
from sharder.study.points import Spread, has_accelerator, run_json, spread, write_json

Mode = Literal["strong", "weak"]
USAGE = "sharder scale RECIPE --devices 1,2,4,8 --mode strong|weak [--processes] [options of the recipe]"
SHARED = (
    "simulated devices share the cores of one host: step times and MFU say nothing about speed-up; collectives and bytes hold"
)


@dataclass(frozen=True)
class Point:
    """Medians over repeats, each in fresh processes."""

    devices: int
    global_batch_size: int
    step_time_s: Spread
    examples_per_s: float
    speed_up: float
    efficiency: float
    compute_share: float
    communication_share: float
    """With waiting for others."""
    tflops_per_s: float
    """Of all devices, exact products."""
    mfu: float | None
    mfu_exact: float | None
    num_collectives: int
    """Of a step and device."""
    received_bytes: float
    """By a device in a step."""


def run(arguments: list[str]) -> int:
    """Measure a step on more and more devices, strong or weak."""
    name, rest = split_name(arguments, "RECIPE", USAGE)

    def command(
        devices: str = "1,2,4,8", mode: Mode = "strong", processes: bool = False, repeats: int = 3, steps: int = 10,
        examples_per_device: int | None = None, out: Path | None = None, json: bool = False,  # noqa: A002
    ) -> tuple:  # fmt: skip
        """
        Args:
            devices: Numbers of devices, ascending.
            mode: strong: the same global batch for all; weak: as many examples for each device.
            processes: One process for each device, instead of one for all.
            repeats: Fresh processes for every point.
            steps: Timed steps of each.
            examples_per_device: In weak mode; unset: the recipe's batch over the largest number of devices.
            out: Folder for scaling.json and its figures.
            json: Print JSON, and nothing else.
        """
        return devices, mode, processes, repeats, steps, examples_per_device, out, json

    given, options = parse(command, args=rest, prog=f"sharder scale {name}", description=run.__doc__, return_unknown_args=True)
    devices, mode, processes, repeats, steps, per_device, out, as_json = given
    counts = parse_devices(devices)
    if repeats < 1:
        raise UserError(f"--repeats is {repeats}, but must be at least 1.")
    found = scale(name, counts, mode, processes, repeats, steps, per_device, options)
    if out is not None:
        write_json(out / "scaling.json", found)
        for figure, svg in figures(found).items():
            (out / f"{figure}.svg").write_text(svg)
    print(json.dumps(found, indent=1)) if as_json else show(found, Console())
    return 0


def parse_devices(text: str) -> list[int]:
    """Raises UserError unless they are ascending numbers."""
    try:
        counts = [int(x) for x in text.split(",")]
    except ValueError:
        counts = []
    if not counts or counts[0] < 1 or counts != sorted(set(counts)):
        raise UserError(f"--devices is {text!r}, but must be ascending numbers, as in 1,2,4,8.")
    return counts


def batch_of(mode: Mode, num_devices: int, whole: int, per_device: int | None, largest: int) -> int:
    if mode == "strong":
        return whole
    return num_devices * (per_device or max(1, whole // largest))


def scale(
    name: str,
    counts: list[int],
    mode: Mode,
    processes: bool,
    repeats: int,
    steps: int,
    per_device: int | None,
    options: list[str],
) -> dict:
    given = _value_of(options, "--train.global-batch-size")
    if given is not None and not given.isdecimal():
        raise UserError(f"--train.global-batch-size is {given!r}, but must be a number.")
    if per_device is not None and per_device < 1:
        raise UserError(f"--examples-per-device is {per_device}, but must be at least 1.")
    whole = int(given or load_recipe(name).train.global_batch_size)
    rest = _without(options, "--train.global-batch-size")
    points: list[Point] = []
    for count in counts:
        batch = batch_of(mode, count, whole, per_device, counts[-1])
        runs = [run_point(name, count, batch, processes, steps, rest) for _ in range(repeats)]
        points.append(summarise(runs, count, batch, points[0] if points else None))
    kind = runs[0]["devices"]
    return {
        "recipe": name, "mode": mode, "processes": processes, "repeats": repeats, "steps": steps, "options": options, "devices": kind,
        "versions": runs[0]["versions"], "shares_cores": kind["platform"] == "cpu", "points": [asdict(p) for p in points],
    }  # fmt: skip


def run_point(name: str, count: int, batch: int, processes: bool, steps: int, options: list[str]) -> dict:
    """profile.json of one fresh run."""
    simulated = not has_accelerator()
    visible = {} if simulated else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}
    with tempfile.TemporaryDirectory(prefix="sharder-scale-") as folder:
        inner = ["profile", name, "--steps", str(steps), "--train.global-batch-size", str(batch), *options, "--json"]
        if processes and count > 1:
            # Traces of several processes meet in one folder.
            inner = [
                "launch",
                "--processes",
                str(count),
                *(["--devices-per-process", "1"] if simulated else []),
                "--",
                *inner,
                "--run-dir",
                folder,
            ]
        elif simulated:
            inner += ["--cluster.cpu-devices", str(count)]
        return run_json(inner, extra=visible)


def summarise(runs: list[dict], count: int, batch: int, first: Point | None) -> Point:
    times = spread([r["step_time_s"] for r in runs])
    rate = batch / times.median
    speed_up = 1.0 if first is None else rate / first.examples_per_s
    middle = lambda value: spread([value(r) for r in runs]).median  # noqa: E731
    traffic = runs[0]["traffic"]
    return Point(
        devices=count, global_batch_size=batch, step_time_s=times, examples_per_s=rate, speed_up=speed_up,
        efficiency=speed_up * (1 if first is None else first.devices) / count,
        compute_share=middle(lambda r: 1 - r["kinds"].get("collective", 0.0) - r["kinds"]["idle"] - r["kinds"]["data wait"]),
        communication_share=middle(lambda r: r["kinds"].get("collective", 0.0)),
        tflops_per_s=middle(lambda r: r["tflops_per_s"]), mfu=middle(lambda r: r["mfu"]) if runs[0]["mfu"] is not None else None,
        mfu_exact=middle(lambda r: r["mfu_exact"]) if runs[0]["mfu_exact"] is not None else None,
        num_collectives=sum(c["executions"] for c in traffic), received_bytes=sum(c["received_bytes"] for c in traffic),
    )  # fmt: skip


def _value_of(options: list[str], name: str) -> str | None:
    for at, option in enumerate(options):
        key, _, value = option.partition("=")
        if key.replace("_", "-") == name:
            return value or (options[at + 1] if at + 1 < len(options) else None)
    return None


def _without(options: list[str], name: str) -> list[str]:
    kept, skip = [], False
    for option in options:
        key, given, _ = option.partition("=")
        if skip:
            skip = False
        elif key.replace("_", "-") == name:
            skip = not given
        else:
            kept.append(option)
    return kept


def figures(found: dict) -> dict[str, str]:
    points = found["points"]
    x = [p["devices"] for p in points]
    drawn = {
        "received": plots.lines(
            "bytes received",
            {"MiB": (x, [p["received_bytes"] / 2**20 for p in points])},
            "MiB per device and step",
            xlabel="devices",
            mark=True,
        ),
        "step_time": plots.lines(
            "step time", {"s": (x, [p["step_time_s"]["median"] for p in points])}, "step time, s", xlabel="devices", mark=True
        ),
    }
    if not found["shares_cores"]:
        series = {"measured": (x, [p["speed_up"] for p in points]), "ideal": (x, [n / x[0] for n in x])}
        drawn["speed_up"] = plots.lines("speed-up", series, "speed-up", xlabel="devices", mark=True)
    return drawn


def show(found: dict, console: Console) -> None:
    table = Table(
        title=f"{found['mode']} scaling of {found['recipe']}, {found['repeats']} x fresh processes, {found['steps']} steps each",
        box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    shared = found["shares_cores"]
    gains = () if shared else ("speed-\nup", "effi-\nciency")
    for heading in ("de-\nvices", "batch", "step, ms", "examples\n/s", *gains, "com-\npute", "com-\nmuni-\ncation", "TFLOP\n/s", "MFU", "collec-\ntives", "MiB re-\nceived"):  # fmt: skip
        table.add_column(heading, justify="right", overflow="fold", no_wrap=shared and heading != "step, ms")
    for p in found["points"]:
        t = p["step_time_s"]
        mfu = "-" if p["mfu_exact"] is None else f"{p['mfu_exact']:.1%}"
        table.add_row(
            str(p["devices"]), f"{p['global_batch_size']:,}", f"{t['median'] * 1e3:.1f} ({t['low'] * 1e3:.1f} to {t['high'] * 1e3:.1f})",
            f"{p['examples_per_s']:,.0f}", *(() if shared else (f"{p['speed_up']:.2f}", f"{p['efficiency']:.0%}")),
            f"{p['compute_share']:.0%}", f"{p['communication_share']:.0%}", f"{p['tflops_per_s']:.3f}", mfu, str(p["num_collectives"]),
            f"{p['received_bytes'] / 2**20:.1f}",
        )  # fmt: skip
    console.print(table)
    if found["shares_cores"]:
        console.print(SHARED, highlight=False)

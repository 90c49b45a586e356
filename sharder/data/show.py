"""The description of a dataset on the terminal."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from sharder.data.normalize import NormStats


def show(found: dict, sheet: Path | None) -> None:
    """Prints what `lerobot.inspect.describe` found."""
    console = Console()
    lengths = sorted(e["length"] for e in found["episodes"])
    console.print(
        f"{found['path']}: {found['codebase_version']}, robot {found['robot_type']}\n"
        f"{found['num_episodes']} episodes, {found['num_frames']} frames at {found['fps']} a second;"
        f" lengths {lengths[0]} to {lengths[-1]}, median {lengths[len(lengths) // 2]}",
        highlight=False, markup=False,
    )  # fmt: skip
    table = Table("feature", "dtype", "shape", "names")
    for name, feature in found["features"].items():
        table.add_row(name, feature["dtype"], " x ".join(map(str, feature["shape"])), ", ".join(feature["names"] or ()))
    console.print(table)
    tasks = Table("task", "text")
    for index, text in found["tasks"].items():
        tasks.add_row(index, text)
    console.print(tasks)
    console.print(
        f"cameras: {', '.join(found['cameras']) or 'none'}" + (f"; pictures in {sheet}" if sheet else ""),
        highlight=False,
        markup=False,
    )
    for frame in found["frames"]:
        _show_frame(console, frame)
    if not found["lints"]:
        console.print("no findings", highlight=False)
    for finding in found["lints"]:
        console.print(f"{finding['kind']}: {finding['feature']}: {finding['message']}", highlight=False, markup=False)


def show_stats(title: str, stats: dict[str, NormStats], findings: list[str]) -> None:
    """Prints statistics by dimension."""
    console = Console()
    console.print(title, highlight=False, markup=False)
    table = Table("feature", "dimension", "mean", "std", "q01", "q99")
    for name, s in stats.items():
        for d, row in enumerate(zip(s.mean, s.std, s.q01, s.q99)):
            table.add_row(name if d == 0 else "", str(d), *(f"{x:.6g}" for x in row))
    console.print(table)
    for finding in findings:
        console.print(finding, highlight=False, markup=False)


def _show_frame(console: Console, frame: dict) -> None:
    table = Table("frame", str(frame["index"]))
    for name in ("episode_index", "frame_index", "timestamp", "task"):
        table.add_row(name, str(frame[name]))
    for name in ("state", "action"):
        if name in frame:
            table.add_row(name, "  ".join(f"{x:.5g}" for x in frame[name]))
    if "is_pad" in frame:
        table.add_row("chunk", f"{len(frame['is_pad'])} steps, {sum(frame['is_pad'])} of them past the end")
    for camera, picture in frame["cameras"].items():
        table.add_row(camera, f"{picture['shape'][0]} x {picture['shape'][1]}, mean {picture['mean']:.2f}")
    console.print(table)

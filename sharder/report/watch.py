"""`sharder watch RUN`: a run in the terminal while it goes on, from its files."""

import time
from pathlib import Path

import tyro
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sharder.config import UserError
from sharder.facts import read_facts
from sharder.options import parse
from sharder.report.read import Recorded, read_run
from sharder.report.timeline import make_timeline

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH = 50
"""With the names and the values before it a line of 80 columns."""


def run(arguments: list[str]) -> int:
    """Follow a run in the terminal while it goes on."""

    def command(run: tyro.conf.Positional[Path], interval_s: float = 1.0, once: bool = False) -> tuple:
        """
        Args:
            run: Folder of the run.
            interval_s: Seconds between looks.
            once: Look once.
        """
        return run, interval_s, once

    run_dir, interval_s, once = parse(command, args=arguments, prog="sharder watch", description=run.__doc__)
    if interval_s <= 0:
        raise UserError(f"--interval-s is {interval_s}, but must be above 0.")
    return watch(run_dir, interval_s, once)


def watch(run_dir: Path, interval_s: float, once: bool) -> int:
    """Shows the run until it has ended, or Ctrl-C. Returns 0."""
    read_facts(run_dir)
    console = Console()
    if once:
        console.print(view(run_dir))
        return 0
    try:
        with Live(view(run_dir), console=console, auto_refresh=False) as live:
            while not has_ended(run_dir):
                time.sleep(interval_s)
                live.update(view(run_dir), refresh=True)
    except KeyboardInterrupt:
        pass
    return 0


def has_ended(run_dir: Path) -> bool:
    """Whether the last event is an end."""
    recorded = _read(run_dir)
    return recorded is not None and bool(recorded.events) and recorded.events[-1].get("kind") == "end"


def _read(run_dir: Path) -> Recorded | None:
    """None before the first step."""
    try:
        return read_run(run_dir)
    except UserError:
        return None


def spark(values: list[float], width: int = WIDTH) -> str:
    """The values as one line of blocks, each the mean of as many neighbours as it takes to fit."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    return "".join(BLOCKS[1 + round((len(BLOCKS) - 2) * (m - low) / ((high - low) or 1.0))] for m in means)


def view(run_dir: Path) -> Group | Text:
    recorded = _read(run_dir)
    if recorded is None or not recorded.records:
        return Text(f"{run_dir}: no step finished yet")
    table = Table.grid(padding=(0, 2))
    rates = [f for f in ("tokens_per_s", "examples_per_s") if recorded.series(f)[1]]
    for field in ("loss", "grad_norm", "learning_rate", *rates, "step_time_s", "mfu", "mfu_exact"):
        _, values = recorded.series(field)
        if values:
            table.add_row(field, f"{values[-1]:.4g}", spark(values))
    last = list(recorded.last_of_step.values())[-1]
    steps = ((recorded.facts or {}).get("config") or {}).get("train", {}).get("steps", "?")
    lines = [f"{run_dir}: step {last['step']} of {steps}, attempt {last.get('attempt')}, fingerprint {last.get('fingerprint')}"]
    found = make_timeline(recorded.events)
    for mark in (found.marks if found else [])[-3:]:
        lines.append(f"  {'fault' if mark.is_fault else 'stop'} at {mark.time_s:.0f} s: {mark.label}")
    if recorded.ledgers:
        total = {k: sum(p.parts[k] for p in recorded.ledgers.processes) for k in recorded.ledgers.processes[0].parts}
        wall = sum(total.values()) or 1.0
        lines.append("  " + ", ".join(f"{k.replace('_', ' ')} {v / wall:.0%}" for k, v in total.items() if v / wall >= 0.005))
        if recorded.ledgers.stragglers:
            lines.append(f"  stragglers: process {', '.join(map(str, recorded.ledgers.stragglers))}")
    lines += [f"  {count} unreadable line(s) of {name} skipped" for name, count in recorded.num_unreadable.items()]
    return Group(*(Text(line) for line in lines), table)

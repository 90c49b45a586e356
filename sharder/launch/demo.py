"""The demonstration: two real runs of the command line, one of them stopped half-way and resumed, compared step by step."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sharder.config import UserError
from sharder.events import read_json_lines
from sharder.report.verify import compare, describe
from sharder.stop import PREEMPTED

STEPS = 40
DEVICES = 4
MARK = ".sharder-demo"
"""A file in the demo's folder, so that nothing else is ever replaced."""


def sharder(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sharder", *arguments]


def train_command(run_dir: Path) -> list[str]:
    options = ["--train.steps", str(STEPS), "--cluster.cpu-devices", str(DEVICES), "--parallel.policy", "fsdp"]
    return sharder("train", "tiny_lm", "--run-dir", str(run_dir), *options, "--checkpoint.every", "20", "--train.validate-every", "0")


def last_step(run_dir: Path) -> int:
    records, _ = read_json_lines(run_dir / "metrics.jsonl")
    return records[-1]["step"] if records else 0


def run_to_end(command: list[str]) -> None:
    code = subprocess.run(command).returncode
    if code:
        raise UserError(f"the demo's command failed with code {code}: {' '.join(command)}")


def stop_half_way(command: list[str], run_dir: Path) -> int:
    """Starts the command, sends it Ctrl-C once it has passed half of its steps, and returns the step it saved."""
    process = subprocess.Popen(command)
    try:
        while process.poll() is None and last_step(run_dir) < STEPS // 2:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        code = process.wait()
    finally:
        process.kill()
    if code != PREEMPTED:
        raise UserError(f"the stopped run ended with code {code} instead of {PREEMPTED}.")
    return last_step(run_dir)


def generate(run_dir: Path) -> str:
    command = sharder("generate", str(run_dir), "--prompt", "The ", "--max-new-tokens", "100")
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def run_demo(folder: Path) -> int:
    """Runs everything in `folder`; 0 where the two runs are identical, else 1. Raises UserError for a foreign folder."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise UserError(f"{folder} is not empty and not an old demo: choose another --dir.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    whole, stopped = folder / "uninterrupted", folder / "stopped"
    console, started = Console(), time.monotonic()
    console.rule(f"1. tiny_lm, {STEPS} steps, FSDP over {DEVICES} simulated devices, uninterrupted")
    run_to_end(train_command(whole))
    console.rule("2. the same, stopped half-way with Ctrl-C")
    stop_step = stop_half_way(train_command(stopped), stopped)
    console.rule("3. the same command again: it resumes")
    run_to_end(train_command(stopped))
    console.rule("4. text from the trained model")
    text = generate(whole)
    console.print(text, markup=False)
    result = compare(whole, stopped)

    final = {run: read_json_lines(run / "metrics.jsonl")[0][-1] for run in (whole, stopped)}
    table = Table("", "uninterrupted", f"stopped after step {stop_step}, resumed", title="the same bits, with and without a stop")
    table.add_row("steps", *(str(final[r]["step"]) for r in final))
    table.add_row("attempts", *(str(final[r]["attempt"]) for r in final))
    table.add_row("final loss", *(final[r]["loss_hex"] for r in final))
    table.add_row("validation perplexity", *(f"{final[r]['validation_perplexity']:.3f}" for r in final))
    table.add_row("final fingerprint", *(final[r]["fingerprint"] for r in final))
    console.print(table)
    console.print(f"{describe(result)}; {time.monotonic() - started:.0f} s in all, runs in {folder}")
    return 0 if result.identical else 1

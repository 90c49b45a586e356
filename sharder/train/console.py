"""What a person sees of a run: a live line on a terminal, plain lines elsewhere."""

import sys
import time

import jax


def say(text: str) -> None:
    """Process 0 speaks for all."""
    if jax.process_index() == 0:
        print(text, flush=True)


def describe(record: dict) -> str:
    """One record in a line."""
    rate = record.get("tokens_per_s")
    speed = f"{rate:,.0f} tokens/s" if rate is not None else f"{record['examples_per_s']:,.0f} examples/s"
    mfu = "" if record["mfu"] is None else f"  MFU {record['mfu']:.1%}"
    validation = f"  validation {record['validation_loss']:.4f}" if "validation_loss" in record else ""
    if "validation_perplexity" in record:
        validation += f" (perplexity {record['validation_perplexity']:.3f})"
    return (
        f"step {record['step']:>6}  loss {record['loss']:.4f}  norm {record['grad_norm']:.3f}  {record['fingerprint']}"
        f"  {record['step_time_s'] * 1e3:.0f} ms  {speed}{mfu}{validation}"
    )


class Lines:
    """A line at most every `interval_s`, and for every evaluation."""

    def __init__(self, interval_s: float = 1.0):
        self.interval_s, self._last = interval_s, 0.0

    def write(self, record: dict) -> None:
        now = time.monotonic()
        if now - self._last >= self.interval_s or "validation_loss" in record:
            self._last = now
            print(describe(record), flush=True)

    def close(self) -> None:
        pass


class Live:
    """A progress bar that updates in place."""

    def __init__(self, first_step: int, num_steps: int):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self._task = self._progress.add_task("compiling", total=num_steps, completed=first_step)
        self._progress.start()

    def write(self, record: dict) -> None:
        self._progress.update(self._task, completed=record["step"], description=describe(record))
        if "validation_loss" in record:
            self._progress.console.print(describe(record))

    def close(self) -> None:
        self._progress.stop()


def open_console(first_step: int, num_steps: int) -> Lines | Live:
    return Live(first_step, num_steps) if sys.stdout.isatty() else Lines()

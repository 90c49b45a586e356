"""Which checkpoints stay when a new one is whole."""

import shutil
from pathlib import Path

from sharder.checkpoint.folders import entry, list_steps
from sharder.config import CheckpointConfig


def retained(steps: list[int], config: CheckpointConfig) -> set[int]:
    """Which of these steps stay: the last `keep_last`, and every multiple of `keep_every`."""
    every = {s for s in steps if config.keep_every and s % config.keep_every == 0}
    return set(sorted(steps)[-config.keep_last :]) | every


def remove_others(run_dir: Path, config: CheckpointConfig) -> None:
    """Removes the checkpoints that need not stay."""
    steps = list_steps(run_dir)
    for old in set(steps) - retained(steps, config):
        # The mark goes first: a half-removed checkpoint must not count.
        (entry(run_dir, old) / "manifest.json").unlink()
        shutil.rmtree(entry(run_dir, old), ignore_errors=True)

"""Which checkpoints stay when a new one is whole."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from sharder.checkpoint.folders import entry, list_steps, read_manifest
from sharder.config import CheckpointConfig


def retained(values: Mapping[int, float | None], config: CheckpointConfig) -> set[int]:
    """Which steps stay: the last `keep_last`, every multiple of `keep_every`, and of those with a value of `best` the lowest.

    `values`: by step; None where the metric was not measured there.
    """
    steps = sorted(values)
    every = {s for s in steps if config.keep_every and s % config.keep_every == 0}
    known = [s for s in steps if config.best and values[s] is not None]
    return set(steps[-config.keep_last :]) | every | set(sorted(known, key=lambda s: values[s])[:1])


def remove_others(run_dir: Path, config: CheckpointConfig) -> None:
    """Removes the checkpoints that need not stay."""
    values = {s: read_manifest(run_dir, s).get("metrics", {}).get(config.best) for s in list_steps(run_dir)}
    for old in values.keys() - retained(values, config):
        # The mark goes first: a half-removed checkpoint must not count.
        (entry(run_dir, old) / "manifest.json").unlink()
        shutil.rmtree(entry(run_dir, old), ignore_errors=True)

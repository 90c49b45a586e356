"""A run of a robot policy as if it had been trained: written in moments, since nothing is compiled."""

from pathlib import Path

import jax
import numpy as np

from sharder import __version__
from sharder.checkpoint.save import Saver
from sharder.data.open import open_datasets, write_assets
from sharder.events import EventLog
from sharder.train.fingerprint import combine, numpy_digest
from sharder.train.run_dir import begin, open_attempt
from sharder.train.saved import describe_save
from sharder.train.setup import prepare
from sharder.train.state import by_path, declare_state


def write_run(config, run_dir: Path, steps=(1, 2)) -> Path:
    """A run with checkpoints of random parameters, as if it had been trained; its averages are half of them."""
    attempt, setup = open_attempt(run_dir, "never", config), prepare(config, jax.devices()[:1])
    training, _ = open_datasets(config)
    begin(attempt, config, {"versions": {"sharder": __version__, "jax": jax.__version__}})
    write_assets(run_dir / "assets", training)
    saver, declared = Saver(run_dir, config.checkpoint, EventLog(run_dir, 1)), by_path(declare_state(config, setup.declared))
    for step in steps:
        rng = np.random.default_rng(step)
        state = {p: np.zeros(x.shape, x.dtype) for p, x in declared.items()} | {"step": np.int32(step)}
        state |= {p: 0.3 * rng.standard_normal(x.shape).astype(x.dtype) for p, x in state.items() if p.startswith("params/")}
        state |= {p: state[p.replace("ema", "params", 1)] / 2 for p in state if p.startswith("ema/")}
        found = np.stack([numpy_digest(p, x) for p, x in state.items()])
        manifest = describe_save(setup, training, list(state), combine(found, list(state)), found)
        saver.save(step, {p: jax.device_put(x, setup.replicated()) for p, x in state.items()}, manifest)
    saver.close()
    return run_dir

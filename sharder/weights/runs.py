"""Weights of a run to and from the files of other libraries."""

from pathlib import Path

import jax
import numpy as np

from sharder import __version__, checkpoint, cluster
from sharder.checkpoint.restore import restore_numpy
from sharder.checkpoint.save import Saver
from sharder.config import LlamaConfig, RunConfig, UserError
from sharder.data.open import open_datasets
from sharder.events import EventLog
from sharder.facts import called
from sharder.models.build import declare, unflatten
from sharder.models.llama_weights import read_params, write_params
from sharder.train.fingerprint import combine, digests
from sharder.train.optimizer import to_float32
from sharder.train.run_dir import begin, open_attempt
from sharder.train.saved import describe_save
from sharder.train.setup import prepare
from sharder.train.state import TrainState, by_path, create_state

KINDS = {LlamaConfig: (read_params, write_params)}
"""How the weights of each model are read and written."""


def _kind(config: RunConfig):
    if type(config.model) not in KINDS:
        known = ", ".join(cls.__name__ for cls in KINDS)
        raise UserError(f"weights of {type(config.model).__name__} have no format of another library; those of {known} have.")
    return KINDS[type(config.model)]


def import_weights(config: RunConfig, folder: Path, run_dir: Path) -> str:
    """Begins a run whose step 0 has the weights of a folder; `sharder train` with the same options continues it.

    Raises UserError where the run exists, or the weights do not fit.
    """
    read, _ = _kind(config)
    cluster.initialize(config.cluster)
    if jax.process_count() > 1:
        raise UserError("import weights in one process; the run that it begins may then be resumed by any number.")
    attempt = open_attempt(run_dir, "never", config)
    setup = prepare(config)
    arrays = read(folder, config.model, setup.declared.params)
    training, _ = open_datasets(config)
    fresh = create_state(config, setup.declared, setup.state_shardings)
    params = jax.tree.map(jax.device_put, unflatten(arrays), setup.state_shardings.params)
    ema = None if fresh.ema is None else jax.device_put(to_float32(params), setup.state_shardings.ema)
    leaves = by_path(TrainState(fresh.step, params, fresh.opt_state, ema))
    found = np.asarray(jax.jit(digests, out_shardings=setup.replicated())(leaves))
    fingerprint = combine(found, list(leaves))
    facts = {"versions": {"sharder": __version__, "jax": jax.__version__}, "weights": str(folder)}
    begin(attempt, config, facts)
    saver = Saver(run_dir, config.checkpoint, EventLog(run_dir, 1))
    saver.save(0, leaves, describe_save(setup, training, list(leaves), fingerprint, found))
    saver.close()
    return f"{called(run_dir)}: step 0 has the weights of {folder}, {setup.declared.num_params:,} parameters, fingerprint {fingerprint}"


def export_weights(config: RunConfig, run_dir: Path, step: int | None, folder: Path) -> str:
    """Writes the weights of a checkpoint as another library reads them. Raises UserError where the folder holds a model."""
    _, write = _kind(config)
    step = checkpoint.choose_step(run_dir, step)
    wanted = declare(config.model).params
    saved = restore_numpy(run_dir, step)
    write(folder, config.model, {path: saved[f"params/{path}"] for path in wanted})
    return f"{folder}: weights of step {step} of {called(run_dir)}"

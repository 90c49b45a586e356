"""The loss of a saved checkpoint on held-out data, or on what it was trained on, and of a policy the error of its actions."""

from pathlib import Path
from typing import Literal

from sharder import checkpoint, cluster
from sharder.config import Pi0Config, RunConfig, UserError
from sharder.data.open import open_datasets
from sharder.facts import called, read_config
from sharder.preflight import with_reduction
from sharder.train.evaluation import evaluate, make_eval_step, make_sampling_step
from sharder.train.metrics import validation_fields
from sharder.train.own_files import with_kept_tokenizer
from sharder.train.saved import check_data, restore_params
from sharder.train.setup import prepare


def evaluate_run(
    config: RunConfig, run_dir: Path, step: int | None, split: Literal["validation", "training"] = "validation"
) -> str:
    """One line with the loss of a split, and perplexity or the error of sampled actions. Raises UserError where there is none."""
    step = checkpoint.choose_step(run_dir, step)
    check_split(config, run_dir)
    cluster.initialize(config.cluster)
    # Evaluations add up in one order of their own, whatever the run's mode.
    setup = prepare(with_reduction(config, "fast"))
    training, validation = open_datasets(with_kept_tokenizer(run_dir, config))
    if validation is None and split == "validation":
        raise UserError(
            f"{called(run_dir)} holds out no data: --data.validation-fraction is {config.data.validation_fraction};"
            " --split training evaluates what it was trained on."
        )
    check_data(run_dir, step, training)
    params, data = restore_params(setup, run_dir, step), training if split == "training" else validation
    loss, num_examples = evaluate(make_eval_step(setup), params, data, setup)
    fields = validation_fields(loss, setup.declared.tokens_per_example)
    more = f", perplexity {fields['validation_perplexity']:.4f}" if "validation_perplexity" in fields else ""
    if isinstance(config.model, Pi0Config):
        error, _ = evaluate(make_sampling_step(setup), params, data, setup)
        more = f", mean absolute error of sampled actions {error:.4f} (normalised)"
    return f"step {step}: {split} loss {loss:.6f}{more} over {num_examples} examples; data SHA-256 {data.fingerprint[:16]}..."


def check_split(config: RunConfig, run_dir: Path) -> None:
    """Raises UserError where another part would be held out than the run's: the model was trained on some of it."""
    was = read_config(run_dir).data
    for name in ("validation_fraction", "validation_split"):
        before, now = getattr(was, name), getattr(config.data, name)
        if before != now:
            option = f"--data.{name.replace('_', '-')}"
            raise UserError(
                f"{option} is {now!r}, but {called(run_dir)} was trained with {before!r}: leave it out, to evaluate what was held out."
            )

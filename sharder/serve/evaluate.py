"""The validation loss of a saved checkpoint."""

from pathlib import Path

from sharder import checkpoint, cluster
from sharder.config import RunConfig, UserError
from sharder.data.open import open_datasets
from sharder.facts import called, read_config
from sharder.preflight import with_reduction
from sharder.train.evaluation import evaluate, make_eval_step
from sharder.train.metrics import validation_fields
from sharder.train.own_files import with_kept_tokenizer
from sharder.train.saved import check_data, restore_params
from sharder.train.setup import prepare


def evaluate_run(config: RunConfig, run_dir: Path, step: int | None) -> str:
    """One line with the loss and perplexity of the held-out split. Raises UserError where there is none."""
    step = checkpoint.choose_step(run_dir, step)
    check_split(config, run_dir)
    cluster.initialize(config.cluster)
    # Evaluations add up in one order of their own, whatever the run's mode.
    setup = prepare(with_reduction(config, "fast"))
    training, validation = open_datasets(with_kept_tokenizer(run_dir, config))
    if validation is None:
        raise UserError(
            f"{called(run_dir)} holds out no data: --data.validation-fraction is {config.data.validation_fraction}."
        )
    check_data(run_dir, step, training)
    params = restore_params(setup, run_dir, step)
    loss, num_examples = evaluate(make_eval_step(setup), params, validation, setup)
    fields = validation_fields(loss, setup.declared.tokens_per_example)
    perplexity = f", perplexity {fields['validation_perplexity']:.4f}" if "validation_perplexity" in fields else ""
    return f"step {step}: validation loss {loss:.6f}{perplexity} over {num_examples} examples; data SHA-256 {validation.fingerprint[:16]}..."


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

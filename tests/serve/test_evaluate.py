"""What `sharder eval` prints."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from flax import nnx
from small import small
from small_pi0 import small_pi0

from sharder import checkpoint
from sharder.config import UserError
from sharder.data.open import open_datasets
from sharder.models.build import declare
from sharder.models.pi0 import draw_noise_and_time, keys_of_content
from sharder.serve.evaluate import evaluate_run
from sharder.stop import StopRequest
from sharder.train.loop import train
from sharder.train.saved import restore_params
from sharder.train.setup import prepare


def change(config, **sections):
    return dataclasses.replace(config, **{s: dataclasses.replace(getattr(config, s), **f) for s, f in sections.items()})


CONFIG = change(small(), data={"num_examples": 640}, train={"steps": 1})


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run") / "run"
    train(CONFIG, run_dir, "auto", StopRequest())
    return run_dir


@pytest.mark.parametrize("batches, examples", [(None, 64), (2, 32), (9, 64)])
def test_the_examples_that_were_read_are_counted(run_dir, batches, examples):
    assert f"over {examples} examples" in evaluate_run(change(CONFIG, train={"validation_batches": batches}), run_dir, None)


def test_another_part_of_the_data_is_refused_by_option(run_dir):
    with pytest.raises(UserError, match="--data.validation-fraction is 0.2, but .* was trained with 0.1"):
        evaluate_run(change(CONFIG, data={"validation_fraction": 0.2}), run_dir, None)


@pytest.mark.slow
def test_of_a_policy_the_error_of_its_actions_is_printed_for_either_split(tmp_path):
    """Against actions that are sampled one by one; what is filled up does not count."""
    config = change(
        small_pi0(), data={"num_examples": 20, "validation_fraction": 0.2}, train={"steps": 1}, parallel={"reduction": "fast"}
    )
    train(config, tmp_path / "run", "auto", StopRequest())
    params = jax.device_get(restore_params(prepare(config), tmp_path / "run", checkpoint.choose_step(tmp_path / "run", None)))
    sample = jax.jit(lambda batch, noise: nnx.merge(declare(config.model).graphdef, params).sample(batch, noise))
    for split, dataset in zip(("training", "validation"), open_datasets(config)):
        errors = []
        for index in range(len(dataset)):
            example = dataset.read(np.array([index]))
            noise, _ = draw_noise_and_time(keys_of_content(example["actions"]), (4, 4))
            sampled = sample({k: x for k, x in example.items() if "action" not in k}, noise)
            real = ~example["action_is_pad"][0, :, None] & example["action_dim_mask"]
            errors.append(np.abs(np.float64(sampled) - example["actions"])[0][real])
        line = evaluate_run(config, tmp_path / "run", None, split)
        found = float(re.search(r"mean absolute error of sampled actions ([\d.]+)", line)[1])
        assert line.startswith(f"step 1: {split} loss") and f"over {len(dataset)} examples" in line
        assert found == pytest.approx(np.concatenate(errors).mean(), abs=2e-4)


def test_a_run_that_holds_nothing_out_is_told_of_the_other_split(tmp_path):
    config = change(CONFIG, data={"validation_fraction": 0.0})
    train(config, tmp_path / "run", "auto", StopRequest())
    with pytest.raises(UserError, match="--split training evaluates what it was trained on"):
        evaluate_run(config, tmp_path / "run", None)

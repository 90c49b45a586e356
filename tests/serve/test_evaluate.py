"""What `sharder eval` prints."""

import dataclasses

import pytest
from small import small

from sharder.config import UserError
from sharder.serve.evaluate import evaluate_run
from sharder.stop import StopRequest
from sharder.train.loop import train


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

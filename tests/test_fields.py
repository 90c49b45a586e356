"""Types of fields, as a recipe file or a config.json may get them wrong."""

from pathlib import Path

import pytest

from sharder.config import DataConfig, MlpConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig, UserError


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TrainConfig(steps="3"), "--train.steps is '3', but must be an integer"),
        (lambda: TrainConfig(steps=3.0), "--train.steps is 3.0, but must be an integer"),
        (lambda: TrainConfig(seed=True), "--train.seed is True, but must be an integer"),
        (lambda: OptimizerConfig(learning_rate="fast"), "--optimizer.learning-rate is 'fast', but must be a number"),
        (lambda: DataConfig(path=3), "--data.path is 3, but must be a text"),
        (lambda: DataConfig(source=None), "--data.source is None, but must be one of auto"),
        (lambda: ParallelConfig(replicate="embed"), "--parallel.replicate is 'embed', but must be a tuple"),
        (lambda: ParallelConfig(replicate=[1]), "--parallel.replicate is 1, but must be a text"),
        (lambda: RunConfig(model=MlpConfig(), train={"steps": 3}), "section train .* must be a TrainConfig"),
        (lambda: RunConfig(model=None), "section model .* must be a TransformerConfig or .* or Pi0Config"),
    ],
)
def test_another_type_is_refused_by_option(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400])
@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "eps", "clip_norm"])
def test_a_number_that_is_not_finite_is_refused(name, value):
    with pytest.raises(UserError, match="must be finite"):
        OptimizerConfig(**{name: value})


def test_what_means_the_same_is_converted():
    parallel, data = ParallelConfig(replicate=["a", "b"]), DataConfig(path=Path("x") / "y")
    assert (parallel.replicate, data.path, repr(OptimizerConfig(learning_rate=1).learning_rate)) == (("a", "b"), "x/y", "1.0")

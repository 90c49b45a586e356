"""A recipe one of whose examples is no number: the input of example 37 is NaN, and that of 92 too large to be squared."""

import numpy as np

from sharder.config import CheckpointConfig, DataConfig, MlpConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from sharder.data.synthetic import SyntheticRegression

NAN, HUGE = 37, 92
read = SyntheticRegression.read


def poisoned_read(self, ids):
    batch = read(self, ids)
    batch["inputs"][np.asarray(ids) == NAN] = np.nan
    batch["inputs"][np.asarray(ids) == HUGE] = 1e30
    return batch


def poisoned() -> RunConfig:
    """Twelve steps of 16 of 192 examples: each is met once."""
    SyntheticRegression.read = poisoned_read
    return RunConfig(
        model=MlpConfig(input_dim=8, hidden_dim=16, num_layers=2, output_dim=8),
        data=DataConfig(source="synthetic", num_examples=192, validation_fraction=0.0),
        parallel=ParallelConfig(reduction="exact"),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=5, decay_steps=100),
        train=TrainConfig(steps=12, global_batch_size=16, validate_every=0),
        checkpoint=CheckpointConfig(every=0),
    )

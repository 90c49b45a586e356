"""From a run's configuration to its datasets."""

from pathlib import Path

import numpy as np

from sharder.config import MlpConfig, Pi0Config, RunConfig, UserError
from sharder.data.dataset import Batch, Dataset
from sharder.data.mixture import Mixture, MixtureOrder
from sharder.data.order import Order
from sharder.data.synthetic import SyntheticRegression, SyntheticTokens
from sharder.data.synthetic_robot import SyntheticRobot


def open_datasets(config: RunConfig) -> tuple[Dataset, Dataset | None]:
    """Training and held-out examples; the latter is None where nothing is held out.

    Raises UserError where the source does not fit the model, or the data cannot be read.
    """
    data, model = config.data, config.model
    if isinstance(model, MlpConfig):
        if data.source not in ("auto", "synthetic"):
            raise UserError(f"--data.source is {data.source}, but the MLP reads only synthetic examples.")
        make = lambda n, salt: SyntheticRegression(n, model.input_dim, model.output_dim, salt)  # noqa: E731
    elif isinstance(model, Pi0Config):
        if data.source == "text":
            raise UserError("--data.source is text, but pi0 reads images, states and actions.")
        if data.path or data.mixture:  # a path says more than a recipe's `synthetic`
            from sharder.data.open_robot import open_robot

            return open_robot(config)
        if data.source in ("lerobot", "rlds"):
            raise UserError(f"--data.source is {data.source}, but --data.path, which names the folder, is missing.")
        make = lambda n, salt: SyntheticRobot(n, model, salt)  # noqa: E731
    elif data.source in ("lerobot", "rlds"):
        raise UserError(f"--data.source is {data.source}, which only robot policies (pi0_tiny, pi0, ...) read.")
    elif data.source == "synthetic":
        make = lambda n, salt: SyntheticTokens(n, data.seq_len, model.vocab_size, salt)  # noqa: E731
    else:
        from sharder.data.text import open_text

        return open_text(data, model.vocab_size)
    held_out = int(data.num_examples * data.validation_fraction)
    return make(data.num_examples, 0), make(held_out, 1) if held_out else None


def example_shapes(config: RunConfig) -> Batch:
    """One example as `read` returns it, zeros, without opening the data."""
    data, model = config.data, config.model
    if isinstance(model, MlpConfig):
        return {"inputs": np.zeros((1, model.input_dim), np.float32), "targets": np.zeros((1, model.output_dim), np.float32)}
    if isinstance(model, Pi0Config):
        return SyntheticRobot(1, model, 0).read(np.zeros(1, np.int64))
    tokens = np.zeros((1, data.seq_len), np.int32)
    if data.source == "synthetic" or data.tokenizer is None:
        return {"inputs": tokens, "targets": tokens}
    weights = np.zeros((1, data.seq_len), np.float32)
    return {"inputs": tokens, "targets": tokens, "segments": tokens, "positions": tokens, "weights": weights}


def open_order(config: RunConfig, training: Dataset) -> Order | MixtureOrder:
    """Which examples each step reads. Raises UserError where there are fewer than a batch."""
    arguments = (config.train.global_batch_size, config.train.seed, config.data.shuffle_rounds)
    return training.order(*arguments) if isinstance(training, Mixture) else Order(len(training), *arguments)


def write_assets(folder: Path, training: Dataset) -> None:
    """What has to go along with a model to be used: of a robot policy, statistics and names. Nothing of other models."""
    from sharder.data.robot_dataset import RobotDataset

    if isinstance(training, RobotDataset | Mixture):
        from sharder.data.assets import write_assets as write

        write(folder, training)


COUNTED_BYTES = 1 << 28
"""Texts up to this size are looked through to count their examples; counting reads them, as training will."""


def count_examples(config: RunConfig) -> int | None:
    """Examples of the training split, or None where counting takes more than a look: tokens, rows of parquet, large texts,
    episodes.

    Raises UserError where the source does not fit the model, or the data cannot be found.
    """
    data = config.data
    if isinstance(config.model, Pi0Config) and (data.path or data.mixture):
        return None
    if isinstance(config.model, MlpConfig | Pi0Config) or data.source not in ("auto", "text"):
        return len(open_datasets(config)[0])
    from sharder.data.corpus import open_corpus

    corpus = open_corpus(data)
    if (
        data.tokenizer is not None
        or corpus.has_parquet
        or sum(getattr(s, "num_bytes", 0) for s in corpus.sources) > COUNTED_BYTES
    ):
        return None
    training, _ = corpus.split(data.validation_split, data.validation_fraction)
    return training.count_windows(training.num_bytes, "bytes", data.seq_len)


def open_examples(config: RunConfig) -> int | None:
    """Examples of the training split, opened for it as training would; not robots' (`sharder data inspect` does that).

    Raises UserError for all that is wrong with them.
    """
    if isinstance(config.model, Pi0Config):
        return count_examples(config)
    return len(open_datasets(config)[0])

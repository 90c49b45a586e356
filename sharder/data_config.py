"""Frozen configurations of where a run's examples and first weights come from (`sharder.config` has the rest of a run)."""

from dataclasses import dataclass, field
from typing import Literal

from sharder.fields import check_fields, require

Source = Literal["auto", "text", "lerobot", "rlds", "synthetic"]
Normalization = Literal["auto", "z_score", "quantile", "none"]
RobotPolicy = Literal["generic", "aloha", "droid", "libero"]
Resize = Literal["none", "actions=pad", "actions=slice", "actions=reinit"]
Split = Literal["auto", "document", "range"]


@dataclass(frozen=True)
class RobotConfig:
    """How recorded episodes become examples for a robot policy."""

    policy: RobotPolicy = "generic"
    """Names, units and relative actions of a robot; generic: everything as recorded, cameras placed by their names."""
    cameras: tuple[str, ...] = ()
    """MODEL=DATASET for each camera, as base_0_rgb=observation.images.top; unset: as the policy says."""
    state: tuple[str, ...] = ()
    """Columns that make up the state, one after the other; unset: as the policy says."""
    action: str | None = None
    """Column of the actions; unset: as the policy says."""
    relative: tuple[int, ...] | None = None
    """Lengths of stretches of actions that are made relative to the state, negative where they are not: 6 -1; unset: as the policy says."""
    adapt_to_pi: bool = True
    """ALOHA: joints and grippers as the released pi0 knows them."""
    normalization: Normalization = "auto"
    """auto: z_score for pi0, quantile for pi0.5."""
    clip: float | None = None
    """Largest absolute value after normalisation."""
    least_range: float = 0.0
    """Range of quantiles that a dimension has at least; keeps one that hardly moves from blowing up."""
    norm_stats: str | None = None
    """norm_stats.json, or a folder with it; unset: computed from the dataset."""
    prompt: str | None = None
    """In place of the recorded tasks."""
    episodes: str | None = None
    """Episodes that are used, as 0:100,205; unset: all."""

    def __post_init__(self):
        check_fields(self, "robot")
        for entry in self.cameras:
            model, _, dataset = entry.partition("=")
            require(bool(model and dataset), "robot.cameras", self.cameras, "MODEL=DATASET for each camera")
        require(0 not in (self.relative or ()), "robot.relative", self.relative, "lengths other than 0")
        require(self.clip is None or self.clip > 0, "robot.clip", self.clip, "above 0")
        require(self.least_range >= 0, "robot.least_range", self.least_range, "at least 0")
        require(
            self.episodes is None or self.episodes.strip(), "robot.episodes", self.episodes, "ranges of episodes, as 0:100,205"
        )


@dataclass(frozen=True)
class MixturePart:
    """One of several datasets that a run reads from."""

    path: str = ""
    weight: float = 1.0
    """Share of the examples, relative to the other parts'."""
    source: Source = "auto"
    robot: RobotConfig = field(default_factory=RobotConfig)

    def __post_init__(self):
        check_fields(self, "data.mixture")
        require(self.weight > 0, "data.mixture.weight", self.weight, "above 0")
        require(self.path != "", "data.mixture.path", self.path, "a folder, or hf://OWNER/NAME")


@dataclass(frozen=True)
class DataConfig:
    """Where examples come from and how they are split."""

    source: Source = "auto"
    """auto: text for language models, synthetic for the MLP, what lies at --data.path for pi0."""
    path: str | None = None
    """Text file, folder, glob or .parquet (unset: the Python documentation topics of the standard library); for pi0 the folder of a
    LeRobot dataset, hf://OWNER/NAME, or a folder of RLDS."""
    mixture: tuple[MixturePart, ...] = ()
    """Several datasets for pi0, in place of path; a recipe lists them."""
    text_column: str = "text"
    """Column read from parquet files."""
    tokenizer: str | None = None
    """tokenizer.json (tokenizers) or .model (sentencepiece); unset: bytes."""
    token_cache: str | None = None
    """Folder for memory-mapped token files; unset: ~/.cache/sharder/tokens."""
    seq_len: int = 256
    """Tokens per example."""
    validation_split: Split = "auto"
    """document: whole documents are held out; range: the end of the corpus; auto: document where there are 20 or more."""
    validation_fraction: float = 0.05
    num_examples: int = 65536
    """Size of a synthetic dataset."""
    shuffle_rounds: int = 12
    """Rounds of the index shuffle; below 8 successive ids correlate."""
    prefetch: int = 2
    """Batches read and copied to the device ahead of the step."""
    workers: int | None = None
    """Processes that decode pictures; 0: in the training process; unset: one less than the cores, 1 to 8."""
    cache_mb: int = 1024
    """Decoded pictures that are kept, over all workers."""

    def __post_init__(self):
        check_fields(self, "data")
        require(self.seq_len >= 1, "data.seq_len", self.seq_len, "at least 1")
        require(0.0 <= self.validation_fraction < 1.0, "data.validation_fraction", self.validation_fraction, "in [0, 1)")
        require(1 <= self.num_examples <= 2**62, "data.num_examples", self.num_examples, "from 1 to 2**62")
        require(
            8 <= self.shuffle_rounds <= 1024 and self.shuffle_rounds % 2 == 0,
            "data.shuffle_rounds", self.shuffle_rounds, "an even number from 8 to 1024",
        )  # fmt: skip
        require(self.prefetch >= 1, "data.prefetch", self.prefetch, "at least 1")
        require(self.workers is None or self.workers >= 0, "data.workers", self.workers, "at least 0")
        require(self.cache_mb >= 0, "data.cache_mb", self.cache_mb, "at least 0")


@dataclass(frozen=True)
class WeightsConfig:
    """Weights that a new run begins with; a resume ignores them."""

    path: str | None = None
    """A run, a checkpoint, imported weights, a checkpoint of openpi or LeRobot, or PaliGemma's .npz; unset: drawn from the seed."""
    resize: Resize = "none"
    """What to do with projections of actions and states of another dimension: fill up with zeros, cut off, or draw afresh."""
    accept: tuple[str, ...] = ()
    """Parameters that the weights may lack or have in another shape, by path: they are drawn afresh."""
    sizes: Literal["weights", "recipe"] = "weights"
    """weights: the model takes its sizes from the weights; recipe: weights of other sizes are refused."""

    def __post_init__(self):
        check_fields(self, "weights")

"""Frozen configuration of a run: plain values and checks that need one section only.

Nothing here computes, mutates, touches a device or imports jax. Checks that need two sections,
the data or the devices belong to `sharder.preflight`.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal, Union, get_args

from sharder.fields import UserError, check_fields, check_sections, require

Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "dots", "block", "offload"]
Policy = Literal["dp", "zero", "fsdp"]
Reduction = Literal["auto", "exact", "fast"]
ExactMemory = Literal["copy", "lean"]
Source = Literal["auto", "text", "lerobot", "rlds", "synthetic"]
Freeze = Literal["none", "vision", "backbone", "vision-and-backbone", "language-but-lora", "all-but-lora"]
Normalization = Literal["auto", "z_score", "quantile", "none"]
RobotPolicy = Literal["generic", "aloha", "droid", "libero"]
Resize = Literal["none", "actions=pad", "actions=slice", "actions=reinit"]
LossMask = Literal["none", "padded"]
Attention = Literal["auto", "reference", "xla", "cudnn", "chunked"]
Split = Literal["auto", "document", "range"]
OptimizerName = Literal["adamw", "adafactor", "muon"]


@dataclass(frozen=True)
class TransformerConfig:
    """Decoder-only language model with learned positions and pre-layer-norm blocks (GPT-2 family)."""

    vocab_size: int = 256
    """Number of token ids that the data may contain."""
    padded_vocab_size: int = 256
    """Rows of the embedding table; rows from vocab_size on are masked in the loss."""
    max_seq_len: int = 256
    """Number of learned positions, and the length of the key-value cache in generation."""
    embed_dim: int = 256
    num_heads: int = 4
    mlp_dim: int = 1024
    num_layers: int = 4
    dropout_rate: float = 0.0
    tie_embeddings: bool = False
    """Use the embedding table as the output projection."""
    param_dtype: Dtype = "float32"
    """Dtype of parameters and gradients; optimizer moments are always float32."""
    compute_dtype: Dtype = "float32"
    """Dtype of matrix products and activations; the loss is always float32."""
    remat: Remat = "none"
    """What the backward pass recomputes: nothing; what lies between matrix products (dots); each block from its input (block);
    the same with the inputs kept in the host's memory (offload, where the backend can)."""

    def __post_init__(self):
        check_fields(self, "model")
        for name in ("vocab_size", "padded_vocab_size", "max_seq_len", "embed_dim", "num_heads", "mlp_dim", "num_layers"):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        require(
            self.padded_vocab_size >= self.vocab_size, "model.padded_vocab_size", self.padded_vocab_size,
            f"at least --model.vocab-size, which is {self.vocab_size}",
        )  # fmt: skip
        require(
            self.embed_dim % self.num_heads == 0, "model.num_heads", self.num_heads,
            f"a divisor of --model.embed-dim, which is {self.embed_dim}",
        )  # fmt: skip
        require(0.0 <= self.dropout_rate < 1.0, "model.dropout_rate", self.dropout_rate, "in [0, 1)")


@dataclass(frozen=True)
class MlpConfig:
    """Stack of dense layers with GELU and a scalar-free regression head (the weak-scaling workload)."""

    input_dim: int = 256
    hidden_dim: int = 1024
    num_layers: int = 4
    """Hidden layers of hidden_dim x hidden_dim, scanned."""
    output_dim: int = 16
    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "float32"
    remat: Remat = "none"

    def __post_init__(self):
        check_fields(self, "model")
        for name in ("input_dim", "hidden_dim", "num_layers", "output_dim"):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")


@dataclass(frozen=True)
class LlamaConfig:
    """Decoder-only language model with rotary positions, grouped queries, RMS norms and a gated feed-forward (Llama family)."""

    vocab_size: int = 256
    padded_vocab_size: int = 256
    """Rows of the embedding table; rows from vocab_size on are masked in the loss."""
    max_seq_len: int = 256
    """Longest sequence, and the length of the key-value cache in generation."""
    embed_dim: int = 128
    num_heads: int = 8
    num_kv_heads: int = 2
    """Key-value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int = 16
    mlp_dim: int = 384
    num_layers: int = 4
    rope_theta: float = 500_000.0
    """Base of the rotary wavelengths."""
    rope_factor: float | None = None
    """Stretch long wavelengths by this factor, as Llama 3.1 does; unset: none are."""
    rope_low_freq_factor: float = 1.0
    """Wavelengths beyond rope_original_seq_len / this are stretched whole."""
    rope_high_freq_factor: float = 4.0
    """Wavelengths below rope_original_seq_len / this stay."""
    rope_original_seq_len: int = 8192
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "float32"
    remat: Remat = "none"

    def __post_init__(self):
        check_fields(self, "model")
        counts = (
            "vocab_size", "padded_vocab_size", "max_seq_len", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim",
            "num_layers", "rope_original_seq_len",
        )  # fmt: skip
        for name in counts:
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        require(
            self.padded_vocab_size >= self.vocab_size, "model.padded_vocab_size", self.padded_vocab_size,
            f"at least --model.vocab-size, which is {self.vocab_size}",
        )  # fmt: skip
        require(
            self.num_heads % self.num_kv_heads == 0, "model.num_kv_heads", self.num_kv_heads,
            f"a divisor of --model.num-heads, which is {self.num_heads}",
        )  # fmt: skip
        require(self.head_dim % 2 == 0, "model.head_dim", self.head_dim, "even: rotary positions turn pairs")
        require(self.rope_theta > 1, "model.rope_theta", self.rope_theta, "above 1")
        require(self.rope_factor is None or self.rope_factor >= 1, "model.rope_factor", self.rope_factor, "at least 1, or None")
        require(self.rope_low_freq_factor > 0, "model.rope_low_freq_factor", self.rope_low_freq_factor, "above 0")
        require(
            self.rope_high_freq_factor > self.rope_low_freq_factor, "model.rope_high_freq_factor", self.rope_high_freq_factor,
            f"above --model.rope-low-freq-factor, which is {self.rope_low_freq_factor}",
        )  # fmt: skip
        require(self.norm_eps > 0, "model.norm_eps", self.norm_eps, "above 0")


@dataclass(frozen=True)
class SiglipConfig:
    """Image encoder; the defaults are SigLIP So400m (arXiv:2303.15343)."""

    embed_dim: int = 1152
    num_layers: int = 27
    mlp_dim: int = 4304
    num_heads: int = 16
    patch_size: int = 14
    """Pixels along each side of a patch."""

    def __post_init__(self):
        check_fields(self, "model.vision")
        for name in ("embed_dim", "num_layers", "mlp_dim", "num_heads", "patch_size"):
            require(getattr(self, name) >= 1, f"model.vision.{name}", getattr(self, name), "at least 1")
        require(
            self.embed_dim % self.num_heads == 0, "model.vision.num_heads", self.num_heads,
            f"a divisor of --model.vision.embed-dim, which is {self.embed_dim}",
        )  # fmt: skip


@dataclass(frozen=True)
class ExpertConfig:
    """One of the sets of weights that share Gemma's attention."""

    embed_dim: int = 2048
    mlp_dim: int = 16384
    lora_rank: int = 0
    """Rank of the low-rank additions to attention and feed-forward; 0: none."""
    lora_alpha: float = 16.0
    """The additions are scaled by alpha / rank."""

    def __post_init__(self):
        check_fields(self, "model.{backbone,action_expert}")
        for name, least in (("embed_dim", 2), ("mlp_dim", 1), ("lora_rank", 0)):
            require(getattr(self, name) >= least, f"model.{{backbone,action_expert}}.{name}", getattr(self, name), f"at least {least}")
        require(self.embed_dim % 2 == 0, "model.{backbone,action_expert}.embed_dim", self.embed_dim, "even")


@dataclass(frozen=True)
class Pi0Config:
    """pi0 (arXiv:2410.24164) and pi0.5 (arXiv:2504.16054): images, a prompt and a state to a chunk of actions."""

    variant: Literal["pi0", "pi05"] = "pi0"
    """pi05: no state token, and the time enters through adaptive norms."""
    vision: SiglipConfig = field(default_factory=SiglipConfig)
    backbone: ExpertConfig = field(default_factory=ExpertConfig)
    """Reads images and prompt."""
    action_expert: ExpertConfig = field(default_factory=lambda: ExpertConfig(1024, 4096, lora_alpha=32.0))
    """Reads state and actions."""
    num_layers: int = 18
    num_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 256
    vocab_size: int = 257152
    max_prompt_len: int = 48
    """Tokens of a prompt, filled up."""
    action_dim: int = 32
    """Of states and actions, filled up."""
    action_horizon: int = 50
    """Steps of a chunk of actions."""
    cameras: tuple[str, ...] = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    """In the order in which the model sees them."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width in pixels."""
    loss_mask: LossMask = "none"
    """padded: action dimensions and steps that were only filled up do not count; none: they do, as in the original."""
    augment: bool = False
    """Change the training pictures at random: crop, rotation, brightness, contrast, saturation."""
    attention: Attention = "auto"
    freeze: Freeze = "none"
    """Parameters that are not trained: they are kept in bfloat16, and have no optimizer state."""
    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "bfloat16"
    """Of images, prompt and attention; projections of state, actions and time are always float32."""
    remat: Remat = "block"

    def __post_init__(self):
        check_fields(self, "model")
        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_prompt_len", "action_dim", "action_horizon"):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        require(self.variant in ("pi0", "pi05"), "model.variant", self.variant, "pi0 or pi05")
        require(
            self.num_heads % self.num_kv_heads == 0, "model.num_kv_heads", self.num_kv_heads,
            f"a divisor of --model.num-heads, which is {self.num_heads}",
        )  # fmt: skip
        require(self.head_dim % 2 == 0, "model.head_dim", self.head_dim, "even, for the rotary embedding")
        require(len(set(self.cameras)) == len(self.cameras) >= 1, "model.cameras", self.cameras, "one or more distinct names")
        patch = self.vision.patch_size
        require(
            len(self.image_size) == 2 and all(size >= patch and size % patch == 0 for size in self.image_size), "model.image_size",
            self.image_size, f"height and width, multiples of --model.vision.patch-size, which is {patch}",
        )  # fmt: skip
        require(
            "lora" not in self.freeze or self.backbone.lora_rank or self.action_expert.lora_rank, "model.freeze", self.freeze,
            "another preset where no expert has a lora_rank",
        )  # fmt: skip


ModelConfig = Union[TransformerConfig, LlamaConfig, MlpConfig, Pi0Config]
LANGUAGE_MODELS = (TransformerConfig, LlamaConfig)


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
        require(self.episodes is None or self.episodes.strip(), "robot.episodes", self.episodes, "ranges of episodes, as 0:100,205")


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
    """A run, a checkpoint, imported weights, a checkpoint of openpi, or PaliGemma's .npz; unset: drawn from the seed."""
    resize: Resize = "none"
    """What to do with projections of actions and states of another dimension: fill up with zeros, cut off, or draw afresh."""
    sizes: Literal["weights", "recipe"] = "weights"
    """weights: the model takes its sizes from the weights; recipe: weights of other sizes are refused."""

    def __post_init__(self):
        check_fields(self, "weights")


@dataclass(frozen=True)
class ParallelConfig:
    """How the devices share the work; the meaning of each policy stands in docs/sharding.md."""

    policy: Policy = "zero"
    data: int | None = None
    """Replicas that hold copies; unset: devices / (fsdp x tensor)."""
    fsdp: int | None = None
    """Replicas that divide the state among themselves; unset: all replicas."""
    tensor: int = 1
    """Devices that compute one replica together."""
    reduction: Reduction = "auto"
    """exact: the same bits on any number of devices and processes; fast: the compiler's own order of additions; auto: exact
    where that is tested and fits."""
    exact_memory: ExactMemory = "copy"
    """What exact mode holds during a step: a whole copy of the parameters and a whole gradient, or one block's (fsdp only)."""
    allow_nondeterministic: tuple[str, ...] = ()
    """Kernels that exact mode may use on GPU although their bits change from run to run, by name."""
    virtual_workers: int = 8
    """Slices of every global batch in exact mode: a power of two and a multiple of the replicas; fixed for a run."""
    replicate: tuple[str, ...] = ()
    """Parameters that may stay whole although the policy divides them, by path."""

    def __post_init__(self):
        check_fields(self, "parallel")
        workers = self.virtual_workers
        require(workers >= 1 and workers & (workers - 1) == 0, "parallel.virtual_workers", workers, "a power of two")
        for name in ("data", "fsdp", "tensor"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"parallel.{name}", value, "at least 1")


@dataclass(frozen=True)
class OptimizerConfig:
    """An update rule with linear warm-up and cosine decay."""

    name: OptimizerName = "adamw"
    """adafactor: second moments of matrices by row and column, no first moment; muon: orthogonalised momentum for the
    matrices of the blocks, adamw for the rest. Learning rates are on the scale of adamw's for all."""
    learning_rate: float = 1e-3
    """Peak, reached after warmup_steps."""
    warmup_steps: int = 20
    decay_steps: int = 1000
    """Length of the schedule from step 0; constant in a recipe, independent of train.steps."""
    final_lr_fraction: float = 0.1
    """Learning rate from decay_steps on, as a fraction of the peak."""
    b1: float = 0.9
    """Of adamw, as are b2 and eps."""
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    """Of muon."""
    factored_min_dim: int = 128
    """Of adafactor: matrices with fewer rows or columns keep every second moment."""
    weight_decay: float = 0.1
    """Decoupled; biases, norms and positions are left out."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None: no clipping."""

    def __post_init__(self):
        check_fields(self, "optimizer")
        require(0.0 <= self.momentum < 1.0, "optimizer.momentum", self.momentum, "in [0, 1)")
        require(self.factored_min_dim >= 1, "optimizer.factored_min_dim", self.factored_min_dim, "at least 1")
        require(self.learning_rate > 0, "optimizer.learning_rate", self.learning_rate, "above 0")
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "at least 0")
        require(
            self.warmup_steps < self.decay_steps < 2**31, "optimizer.decay_steps", self.decay_steps,
            f"above --optimizer.warmup-steps, which is {self.warmup_steps}, and below 2**31",
        )  # fmt: skip
        require(0.0 <= self.final_lr_fraction <= 1.0, "optimizer.final_lr_fraction", self.final_lr_fraction, "in [0, 1]")
        require(0.0 <= self.b1 < 1.0, "optimizer.b1", self.b1, "in [0, 1)")
        require(0.0 <= self.b2 < 1.0, "optimizer.b2", self.b2, "in [0, 1)")
        require(self.eps > 0, "optimizer.eps", self.eps, "above 0")
        require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "at least 0")
        require(self.clip_norm is None or self.clip_norm > 0, "optimizer.clip_norm", self.clip_norm, "above 0, or None")


@dataclass(frozen=True)
class TrainConfig:
    """Length of the run, batch and seed."""

    steps: int = 300
    global_batch_size: int = 32
    """Examples per step over all replicas."""
    microbatch_size: int | None = None
    """Examples per replica and accumulation slot; unset: one slot."""
    seed: int = 0
    """Decides initial parameters, data order and dropout."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the parameters."""
    log_every: int = 1
    validate_every: int = 100
    """Steps between evaluations of the held-out split; 0: only at the end."""
    validation_batches: int | None = None
    """Batches per evaluation; unset: the whole split."""

    def __post_init__(self):
        check_fields(self, "train")
        require(1 <= self.steps < 2**31, "train.steps", self.steps, "from 1 to 2**31 - 1")
        require(self.global_batch_size >= 1, "train.global_batch_size", self.global_batch_size, "at least 1")
        require(
            self.microbatch_size is None or self.microbatch_size >= 1, "train.microbatch_size", self.microbatch_size, "at least 1"
        )
        require(0 <= self.seed < 2**32, "train.seed", self.seed, "in [0, 2**32)")
        require(self.ema_decay is None or 0.0 < self.ema_decay < 1.0, "train.ema_decay", self.ema_decay, "in (0, 1)")
        require(self.log_every >= 1, "train.log_every", self.log_every, "at least 1")
        require(self.validate_every >= 0, "train.validate_every", self.validate_every, "at least 0")
        require(
            self.validation_batches is None or self.validation_batches >= 1,
            "train.validation_batches", self.validation_batches, "at least 1",
        )  # fmt: skip


@dataclass(frozen=True)
class CheckpointConfig:
    """When full state is saved and which saves are kept."""

    every: int = 100
    """Steps between saves; 0: only at the end and when stopped."""
    keep_last: int = 2
    keep_every: int | None = None
    """Also keep every checkpoint whose step is a multiple of this."""

    def __post_init__(self):
        check_fields(self, "checkpoint")
        require(self.every >= 0, "checkpoint.every", self.every, "at least 0")
        require(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "at least 1")
        require(self.keep_every is None or self.keep_every >= 1, "checkpoint.keep_every", self.keep_every, "at least 1")


@dataclass(frozen=True)
class ClusterConfig:
    """Devices and processes of this machine."""

    cpu_devices: int | None = None
    """Simulate this many devices per process on the CPU."""
    bringup_timeout_s: int = 60
    """How long processes wait for one another at start."""
    compile_cache: str | None = None
    """Folder of compiled programs; unset: ~/.cache/sharder/compiled; "off": none."""

    def __post_init__(self):
        check_fields(self, "cluster")
        # Each simulated device is a thread pool: thousands of them stop the machine.
        require(self.cpu_devices is None or 1 <= self.cpu_devices <= 1024, "cluster.cpu_devices", self.cpu_devices, "from 1 to 1024")
        require(self.bringup_timeout_s >= 1, "cluster.bringup_timeout_s", self.bringup_timeout_s, "at least 1")


@dataclass(frozen=True)
class LogConfig:
    """Optional writers beside metrics.jsonl; none can stop a run."""

    tensorboard: bool = False
    wandb_project: str | None = None

    def __post_init__(self):
        check_fields(self, "log")


@dataclass(frozen=True)
class RunConfig:
    """Everything that a recipe decides."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    robot: RobotConfig = field(default_factory=RobotConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self):
        check_sections(self)


MODEL_CONFIGS = {cls.__name__: cls for cls in (TransformerConfig, LlamaConfig, MlpConfig, Pi0Config)}


def to_dict(config: RunConfig) -> dict:
    """The config as JSON-ready values; the model's class stands under model.kind."""
    return json.loads(json.dumps({**dataclasses.asdict(config), "model": model_to_dict(config.model)}))


def model_to_dict(model: ModelConfig) -> dict:
    """The model's config as JSON-ready values; its class stands under kind."""
    return json.loads(json.dumps({"kind": type(model).__name__, **dataclasses.asdict(model)}))


def model_from_dict(section: dict) -> ModelConfig:
    """Inverse of `model_to_dict`. Raises UserError for a kind that is not known."""
    kind = section.get("kind")
    if kind not in MODEL_CONFIGS:
        raise UserError(f"config.json has a model of kind {kind!r}; this version knows {', '.join(MODEL_CONFIGS)}.")
    return _section(MODEL_CONFIGS[kind], {k: v for k, v in section.items() if k != "kind"})


def _section(cls: type, values: dict):
    """A dataclass from JSON values; sections inside it are dataclasses too."""
    types = {f.name: f.type for f in dataclasses.fields(cls)}

    def value(name: str, x: object) -> object:
        if isinstance(x, dict) and dataclasses.is_dataclass(types.get(name)):
            return _section(types[name], x)
        if isinstance(x, list):  # a tuple, of values or of sections
            return tuple(_section(get_args(types[name])[0], v) if isinstance(v, dict) else v for v in x)
        return x

    return cls(**{name: value(name, x) for name, x in values.items()})


def from_dict(tree: dict) -> RunConfig:
    """Inverse of `to_dict`. Raises UserError for unknown keys (a config of another version)."""
    sections = {f.name: f for f in dataclasses.fields(RunConfig)}
    unknown = set(tree) - set(sections)
    if unknown:
        raise UserError(f"config.json has unknown sections {sorted(unknown)}: it was written by another version of sharder.")
    if "model" not in tree:
        raise UserError("config.json has no section model: it was written by another version of sharder.")
    values = {}
    for name, section in tree.items():
        if not isinstance(section, dict):
            raise UserError(f"section {name} is {section!r}, but must be an object: the file is damaged.")
        try:
            values[name] = model_from_dict(section) if name == "model" else _section(sections[name].type, section)
        except TypeError as error:
            raise UserError(f"config.json, section {name}: {error}. It was written by another version of sharder.") from None
    return RunConfig(**values)


def config_hash(config: RunConfig) -> str:
    """16 hex digits of the SHA-256 of the canonical JSON form."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:16]

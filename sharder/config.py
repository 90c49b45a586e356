"""Frozen configuration of a run: plain values and checks that need one section only.

Nothing here computes, mutates, touches a device or imports jax. Checks that need two sections,
the data or the devices belong to `sharder.preflight`.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal, get_args

from sharder.data_config import DataConfig, MixturePart, RobotConfig, WeightsConfig
from sharder.fields import UserError, check_fields, check_sections, require
from sharder.model_config import (
    LANGUAGE_MODELS,
    Dtype,
    ExpertConfig,
    LlamaConfig,
    MlpConfig,
    ModelConfig,
    Pi0Config,
    Remat,
    SiglipConfig,
    TransformerConfig,
)  # fmt: skip

__all__ = [
    "LANGUAGE_MODELS", "CheckpointConfig", "ClusterConfig", "DataConfig", "Dtype", "ExpertConfig", "LlamaConfig", "LogConfig", "MixturePart",
    "MlpConfig", "ModelConfig", "OptimizerConfig", "ParallelConfig", "Pi0Config", "Remat", "RobotConfig", "RunConfig", "SiglipConfig",
    "TrainConfig", "TransformerConfig", "UserError", "WeightsConfig", "config_hash", "from_dict", "model_from_dict", "model_to_dict",
    "require", "to_dict",
]  # fmt: skip

Policy = Literal["dp", "zero", "fsdp"]
Reduction = Literal["auto", "exact", "fast"]
ExactMemory = Literal["copy", "lean"]
BestMetric = Literal["validation_loss", "loss"]
OptimizerName = Literal["adamw", "adafactor", "muon"]
Moments = Literal["float32", "bfloat16", "int8"]


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
    where that is tested and fits. There exact takes 0.96, 0.96, 0.88 and 1.02 x the time of a fast step with as many slots, on
    1, 2, 4 and 8 devices (bench/exact.py; tiny_lm, CPU), and 1.01, 0.75 and 0.81 x on 1, 2 and 4 with gpt, where
    fast mode suffers from a setting that exact mode needs (docs/exact.md)."""
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


MOMENT_BYTES: dict[Moments, int] = {"float32": 8, "bfloat16": 4, "int8": 2}
"""Of both moments of an element; what blocks add is below 0.3."""
LARGEST_DECAY: dict[Moments, tuple[float, float]] = {"float32": (1.0, 1.0), "bfloat16": (0.996, 0.99975), "int8": (0.97, 0.97)}
"""b1 and b2 with which moments kept so still fall where gradients vanish (sharder.train.moments)."""


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
    initial_lr_fraction: float = 0.0
    """Learning rate of the first step, as a fraction of the peak; with 0 it moves nothing."""
    final_lr_fraction: float = 0.1
    """Learning rate from decay_steps on, as a fraction of the peak."""
    b1: float = 0.9
    """Of adamw, as are b2 and eps."""
    b2: float = 0.95
    eps: float = 1e-8
    moments: Moments = "float32"
    """How adamw keeps its moments between steps: 8 bytes for each trained parameter, 4 or 2 (docs/memory.md)."""
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
        for name in ("initial_lr_fraction", "final_lr_fraction"):
            require(0.0 <= getattr(self, name) <= 1.0, f"optimizer.{name}", getattr(self, name), "in [0, 1]")
        require(0.0 <= self.b1 < 1.0, "optimizer.b1", self.b1, "in [0, 1)")
        require(0.0 <= self.b2 < 1.0, "optimizer.b2", self.b2, "in [0, 1)")
        require(
            self.moments == "float32" or self.name == "adamw", "optimizer.moments", self.moments,
            f"float32 with --optimizer.name {self.name}: only adamw's are kept in fewer bits",
        )  # fmt: skip
        for name, most in zip(("b1", "b2"), LARGEST_DECAY[self.moments]):
            require(
                getattr(self, name) <= most, f"optimizer.{name}", getattr(self, name),
                f"at most {most} with --optimizer.moments {self.moments}, or a moment could not fall between two steps of its code: keep"
                " it in more bits",
            )  # fmt: skip
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
    max_minutes: float | None = None
    """Save and stop, to be resumed, this long after the start of the process; for queues with a time limit."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Where the loss or the norm of the gradients is not a finite number: stop at the state before the step, or drop its batch."""

    def __post_init__(self):
        check_fields(self, "train")
        require(1 <= self.steps < 2**31, "train.steps", self.steps, "from 1 to 2**31 - 1")
        require(self.global_batch_size >= 1, "train.global_batch_size", self.global_batch_size, "at least 1")
        require(
            self.microbatch_size is None or self.microbatch_size >= 1,
            "train.microbatch_size",
            self.microbatch_size,
            "at least 1",
        )
        require(0 <= self.seed < 2**32, "train.seed", self.seed, "in [0, 2**32)")
        require(self.ema_decay is None or 0.0 < self.ema_decay < 1.0, "train.ema_decay", self.ema_decay, "in (0, 1)")
        require(self.log_every >= 1, "train.log_every", self.log_every, "at least 1")
        require(self.validate_every >= 0, "train.validate_every", self.validate_every, "at least 0")
        require(
            self.validation_batches is None or self.validation_batches >= 1,
            "train.validation_batches", self.validation_batches, "at least 1",
        )  # fmt: skip
        require(self.max_minutes is None or self.max_minutes > 0, "train.max_minutes", self.max_minutes, "above 0")


@dataclass(frozen=True)
class CheckpointConfig:
    """When full state is saved and which saves are kept."""

    every: int = 100
    """Steps between saves; 0: only at the end and when stopped."""
    keep_last: int = 2
    keep_every: int | None = None
    """Also keep every checkpoint whose step is a multiple of this."""
    best: BestMetric | None = None
    """Also keep the checkpoint with the lowest value of this."""
    mirror: str | None = None
    """Address (gs://, s3://, ...) that every checkpoint is copied to, and that a run whose folder is gone goes on from."""
    snapshot_every: int | None = None
    """Steps between copies in the host's memory, which a restart on the same host goes on from; unset: as often as costs at most
    1 % of the time; 0: never."""

    def __post_init__(self):
        check_fields(self, "checkpoint")
        require(self.every >= 0, "checkpoint.every", self.every, "at least 0")
        require(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "at least 1")
        require(
            self.snapshot_every is None or self.snapshot_every >= 0,
            "checkpoint.snapshot_every",
            self.snapshot_every,
            "at least 0, or unset",
        )
        require(self.keep_every is None or self.keep_every >= 1, "checkpoint.keep_every", self.keep_every, "at least 1")


@dataclass(frozen=True)
class ClusterConfig:
    """Devices and processes of this machine."""

    cpu_devices: int | None = None
    """Simulate this many devices per process on the CPU."""
    coordinator_address: str | None = None
    """host:port where process 0 listens; unset, as the two below: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID, or
    what SLURM, Open MPI, Kubernetes or a TPU says."""
    num_processes: int | None = None
    process_id: int | None = None
    """0 .. num_processes - 1."""
    bringup_timeout_s: int = 60
    """How long processes wait for one another at start."""
    grace_s: float = 120.0
    """From a request to stop to the end of the process, with or without a save; give what the machine gives after SIGTERM."""
    compile_cache: str | None = None
    """Folder of compiled programs; unset: ~/.cache/sharder/compiled; "off": none."""

    def __post_init__(self):
        check_fields(self, "cluster")
        # Each simulated device is a thread pool: thousands of them stop the machine.
        require(
            self.cpu_devices is None or 1 <= self.cpu_devices <= 1024, "cluster.cpu_devices", self.cpu_devices, "from 1 to 1024"
        )
        require(
            self.num_processes is None or self.num_processes >= 1, "cluster.num_processes", self.num_processes, "at least 1"
        )
        require(self.process_id is None or self.process_id >= 0, "cluster.process_id", self.process_id, "at least 0")
        require(self.bringup_timeout_s >= 1, "cluster.bringup_timeout_s", self.bringup_timeout_s, "at least 1")
        require(self.grace_s > 0, "cluster.grace_s", self.grace_s, "above 0")


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

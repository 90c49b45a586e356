"""One record per logged step, and the places it is written to."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from sharder.config import LogConfig, RunConfig, to_dict
from sharder.events import LineFile
from sharder.instrument.flops import utilisation
from sharder.train.fingerprint import combine, hex_digest


@dataclass(frozen=True)
class StepFacts:
    """What is constant over a run and needed for every record."""

    global_batch_size: int
    tokens_per_step: int | None
    """None where an example is not a sequence of tokens."""
    steps_per_epoch: int
    flops: dict[str, float]
    """Of a step by convention: mfu 6ND, mfu_exact the model's own products, hfu with those computed again."""
    num_devices: int
    peak_flops: float | None
    state_paths: list[str]
    gradient_paths: list[str]
    example_ids: Callable[[int], np.ndarray]
    """Ids of the examples of the step that made so many completed steps."""
    skips_nonfinite: bool
    attempt: int
    reached: int = 0
    """Furthest step that an earlier attempt has logged."""


def make_record(facts: StepFacts, step: int, metrics: dict[str, np.ndarray], step_time_s: float, data_wait_s: float) -> dict:
    """The line of metrics.jsonl for the step that made `step` completed steps."""
    loss, norm = np.float32(metrics["loss"]), np.float32(metrics["grad_norm"])
    tokens = facts.tokens_per_step
    units = ("examples_per_s", facts.global_batch_size) if tokens is None else ("tokens_per_s", tokens)
    return {
        "step": step,
        "attempt": facts.attempt,
        "epoch": (step - 1) // facts.steps_per_epoch,
        "loss": float(loss),
        "loss_hex": float(loss).hex(),
        "grad_norm": float(norm),
        "grad_norm_hex": float(norm).hex(),
        "learning_rate": float(metrics["learning_rate"]),
        "fingerprint": combine(metrics["digests"], facts.state_paths),
        "batch_fingerprint": hex_digest(metrics["batch_digest"]),
        "num_examples": step * facts.global_batch_size,
        "step_time_s": round(step_time_s, 6),
        "data_wait_s": round(data_wait_s, 6),
        units[0]: round(units[1] / step_time_s, 1),
        **{k: utilisation(flops, step_time_s, facts.peak_flops, facts.num_devices) for k, flops in facts.flops.items()},
    }


def validation_fields(loss: float, per_token: bool) -> dict:
    """Mean validation loss; per token in nats, and then its exponential too."""
    perplexity = {"validation_perplexity": math.exp(min(loss, 700.0))} if per_token else {}
    return {"validation_loss": loss, **perplexity}


class Writer(Protocol):
    def write(self, record: dict) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """RUN_DIR/metrics.jsonl, line by line; NaN and infinities stay readable as JSON null (loss_hex has them)."""

    def __init__(self, path: Path):
        self._lines = LineFile(path)

    def write(self, record: dict) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._lines.write(json.dumps(finite))

    def close(self) -> None:
        self._lines.close()


class TensorBoard:
    """Scalars for TensorBoard under RUN_DIR/tensorboard (package tensorboardX)."""

    def __init__(self, run_dir: Path):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, record: dict) -> None:
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Scalars for Weights & Biases (package wandb)."""

    def __init__(self, project: str, config: RunConfig):
        import wandb

        self._run = wandb.init(project=project, config=to_dict(config))

    def write(self, record: dict) -> None:
        self._run.log({k: v for k, v in record.items() if isinstance(v, (int, float))}, step=record["step"])

    def close(self) -> None:
        self._run.finish()


class Forgiving:
    """A writer that is given up with one warning when it fails; it can never stop a run."""

    def __init__(self, name: str, make):
        self._name, self._writer = name, None
        self._writer = self._try(make)

    def _try(self, action):
        try:
            return action()
        except BaseException as error:  # noqa: BLE001  also SystemExit, which loggers are known to raise
            if isinstance(error, KeyboardInterrupt):
                raise
            print(f"the {self._name} writer failed and is off from here on: {error}", file=sys.stderr, flush=True)
            self._writer = None

    def write(self, record: dict) -> None:
        if self._writer is not None:
            self._try(lambda: self._writer.write(record))

    def close(self) -> None:
        if self._writer is not None:
            self._try(self._writer.close)


def optional_writers(log: LogConfig, config: RunConfig, run_dir: Path) -> list[Writer]:
    writers: list[Writer] = []
    if log.tensorboard:
        writers.append(Forgiving("TensorBoard", lambda: TensorBoard(run_dir)))
    if log.wandb_project:
        writers.append(Forgiving("wandb", lambda: Wandb(log.wandb_project, config)))
    return writers

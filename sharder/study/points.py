"""One measured point of a study: a command of its own process, which prints JSON; and what several of them agree on."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sharder.config import UserError


@dataclass(frozen=True)
class Spread:
    """A figure that was measured several times."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g} to {self.high:.4g})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def has_accelerator() -> bool:
    """Whether a driver of NVIDIA's is there; found without loading jax, which would keep the devices."""
    return Path("/dev/nvidiactl").exists() and os.environ.get("JAX_PLATFORMS", "") not in ("cpu",)


def run_json(arguments: Sequence[str], module: str = "sharder", extra: Mapping[str, str] | None = None) -> dict:
    """What `python -m MODULE ARGUMENTS` prints as JSON. Raises UserError with its own words where it fails."""
    environment = dict(os.environ) | ({} if has_accelerator() else {"JAX_PLATFORMS": "cpu"}) | dict(extra or {})
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        before, found, message = done.stderr.partition("error: ")
        said = message if found else "\n".join(before.splitlines()[-5:])
        raise UserError(f"sharder {' '.join(arguments)} ended with {done.returncode}: {said.strip()}")
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise UserError(f"sharder {' '.join(arguments)} printed no JSON, but: {done.stdout[-300:]}") from None


def write_json(path: Path, found: dict) -> None:
    """Raises UserError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Choose another --out.") from None

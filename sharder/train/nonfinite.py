"""What is told of a step whose loss or gradients were no finite numbers. The step itself kept the state as it was."""

import math
from dataclasses import dataclass

import numpy as np

from sharder.models.build import Declared

SHOWN = 16
"""Ids that a message lists; the event has all."""


@dataclass(frozen=True)
class Nonfinite:
    """A step that was not finite."""

    step: int
    """What would have been the number of completed steps."""
    loss: float
    grad_norm: float
    leaf: str | None
    """The first parameter, by path, of whose gradient an element or its square is not finite; None: the loss alone is not."""

    def describe(self, ids: list[int], skips: bool) -> str:
        """The report; `ids`: those of the examples of the step."""
        more = f" and {len(ids) - SHOWN} more, listed in events.jsonl" if len(ids) > SHOWN else ""
        leaf = f"the gradient of {self.leaf} is the first that is not" if self.leaf else "all gradients are finite"
        done = "its batch is dropped" if skips else "its update is not kept"
        return (
            f"step {self.step} is not finite: loss {self.loss}, gradient norm {self.grad_norm}; {leaf}. {done[0].upper() + done[1:]}."
            f" Its examples: {', '.join(map(str, ids[:SHOWN]))}{more}."
        )


def gradient_paths(declared: Declared) -> list[str]:
    """Of the parameters that are trained, in the order of a step's `finite_leaves`."""
    return sorted(declared.trained.params)


def find_nonfinite(step: int, metrics: dict[str, np.ndarray], paths: list[str]) -> Nonfinite | None:
    """What was not finite in the step that made `step` completed steps, from its metrics; None where all was."""
    if metrics["finite"]:
        return None
    leaf = next((path for path, finite in zip(paths, metrics["finite_leaves"], strict=True) if not finite), None)
    return Nonfinite(step, float(metrics["loss"]), float(metrics["grad_norm"]), leaf)


def as_json(x: float) -> float | str:
    """JSON has no NaN and no infinities."""
    return x if math.isfinite(x) else str(x)

"""Two checkpoints, leaf by leaf: which arrays differ, in how many elements and by how much."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

from sharder import checkpoint
from sharder.checkpoint.restore import restore_numpy
from sharder.config import UserError


@dataclass(frozen=True)
class LeafDifference:
    """One array of two states of the same shapes."""

    path: str
    num_elements: int
    num_differing: int
    first_index: tuple[int, ...]
    """Of the first differing element, row-major."""
    max_ulps: int | None
    """Largest distance in units in the last place; None for arrays that are not floating point."""
    values: tuple[float, float]
    """The first differing element in both."""


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many floating-point numbers lie between the elements of `a` and `b`, int64; -0.0 and 0.0 are the same number."""
    integer = f"int{8 * a.dtype.itemsize}"

    def ordered(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x).view(integer).astype(np.int64)
        # The bits of negative numbers grow downwards from the smallest integer.
        return np.where(bits < 0, np.int64(np.iinfo(integer).min) - bits, bits)

    return np.abs(ordered(a) - ordered(b))


def compare_leaf(path: str, a: np.ndarray, b: np.ndarray) -> LeafDifference | None:
    """None where the bits of both are the same. Raises UserError for other shapes or dtypes."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        raise UserError(f"{path} is {a.dtype}{list(a.shape)} in the one checkpoint, {b.dtype}{list(b.shape)} in the other.")
    bits = [np.ascontiguousarray(x).view(f"uint{8 * x.dtype.itemsize}") if x.dtype != bool else x for x in (a, b)]
    differing = bits[0] != bits[1]
    if not differing.any():
        return None
    first = tuple(int(i) for i in np.unravel_index(np.argmax(differing), a.shape))
    is_float = a.dtype.kind == "f" or a.dtype.name in ("bfloat16",)
    largest = int(ulps(a[differing], b[differing]).max()) if is_float else None
    return LeafDifference(path, a.size, int(differing.sum()), first, largest, (float(a[first]), float(b[first])))


def newest_common_step(run_a: Path, run_b: Path, step: int | None) -> int:
    """The step to compare. Raises UserError where a run lacks it, naming the steps that both have."""
    both = sorted(set(checkpoint.list_steps(run_a)) & set(checkpoint.list_steps(run_b)))
    if not both:
        steps = [checkpoint.list_steps(run) for run in (run_a, run_b)]
        raise UserError(f"no checkpoint of the same step: {run_a} has {steps[0]}, {run_b} has {steps[1]}.")
    if step is not None and step not in both:
        raise UserError(f"--step is {step}, but both runs have checkpoints of {both}.")
    return both[-1] if step is None else step


def compare_leaves(run_a: Path, run_b: Path, step: int) -> list[LeafDifference]:
    """The arrays that differ between the checkpoints of a step, parameters first, each kind by path."""
    a, b = (restore_numpy(run, step) for run in (run_a, run_b))
    if a.keys() != b.keys():
        raise UserError(f"the checkpoints of step {step} have other leaves: {sorted(a.keys() ^ b.keys())[:5]} are in one only.")
    found = [compare_leaf(path, a[path], b[path]) for path in sorted(a, key=lambda p: (not p.startswith("params/"), p))]
    return [difference for difference in found if difference]


def table(differences: list[LeafDifference], step: int) -> Table:
    rows = Table(title=f"leaves that differ in the checkpoints of step {step}", box=box.SIMPLE)
    for heading in ("leaf", "differing", "of", "max ulps", "first at", "values there"):
        rows.add_column(heading, overflow="fold")
    for d in differences:
        largest = "" if d.max_ulps is None else f"{d.max_ulps:,}"
        values = " and ".join(repr(v) for v in d.values)
        rows.add_row(d.path, f"{d.num_differing:,}", f"{d.num_elements:,}", largest, str(d.first_index), values)
    return rows

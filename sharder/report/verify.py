"""Whether two runs went through the same states, from the fingerprints in their metrics. Reads files only."""

from dataclasses import dataclass
from pathlib import Path

from sharder.config import UserError
from sharder.events import read_json_lines


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common."""

    num_compared: int
    first_step: int
    last_step: int
    first_difference: int | None
    """Step of the first differing fingerprint."""
    what_differs: str
    """"" | "loss and state" | "state only"."""
    num_redone: int
    """Steps that a run logged more than once, all of them compared."""
    num_unreadable: int
    """Lines that a kill cut off."""

    @property
    def identical(self) -> bool:
        return self.first_difference is None


def read_steps(run_dir: Path) -> tuple[dict[int, list[dict]], int]:
    """All records of every step, in the order in which they were written, and the number of unreadable lines.

    Raises UserError where there are no metrics, or a record lacks its fingerprint.
    """
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{run_dir} has no metrics.jsonl: it is not a run, or has not finished a step.")
    records, broken = read_json_lines(path)
    steps: dict[int, list[dict]] = {}
    for record in records:
        if not record.get("fingerprint"):
            raise UserError(f"{path}: the record of step {record.get('step')} has no fingerprint, so it cannot be compared.")
        steps.setdefault(record["step"], []).append(record)
    return steps, broken


def compare(run_a: Path, run_b: Path) -> Comparison:
    """Compares every step that both logged; a step that a run did twice must agree in both attempts.

    Raises UserError where the runs have no step in common.
    """
    (steps_a, broken_a), (steps_b, broken_b) = read_steps(run_a), read_steps(run_b)
    common = sorted(steps_a.keys() & steps_b.keys())
    if not common:
        spans = [f"{min(s)} .. {max(s)}" if s else "none" for s in (steps_a, steps_b)]
        raise UserError(f"no logged step in common: {run_a} has {spans[0]}, {run_b} has {spans[1]}.")
    redone = sum(len(s[step]) - 1 for s in (steps_a, steps_b) for step in common)
    for step in common:
        records = steps_a[step] + steps_b[step]
        if len({r["fingerprint"] for r in records}) > 1:
            what = "loss and state" if len({r["loss_hex"] for r in records}) > 1 else "state only"
            return Comparison(len(common), common[0], common[-1], step, what, redone, broken_a + broken_b)
    return Comparison(len(common), common[0], common[-1], None, "", redone, broken_a + broken_b)


def describe(result: Comparison) -> str:
    redone = f", {result.num_redone} of them done more than once" if result.num_redone else ""
    steps = f"{result.num_compared} steps compared ({result.first_step} .. {result.last_step}{redone})"
    verdict = "identical" if result.identical else f"first difference at step {result.first_difference}: {result.what_differs}"
    unreadable = f"\n{result.num_unreadable} unreadable lines were skipped" if result.num_unreadable else ""
    return f"{steps}: {verdict}{unreadable}"

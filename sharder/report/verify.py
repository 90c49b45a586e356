"""Whether two runs went through the same states, from the fingerprints in their metrics. Reads files only."""

from dataclasses import dataclass
from pathlib import Path

from sharder.config import UserError
from sharder.events import parse_json_lines
from sharder.facts import called, config_of, read_facts
from sharder.identity import differences

# What is compared of a step, in the order in which one follows from the other, and how a difference is named.
EVIDENCE = (
    ("batch_fingerprint", "the data: other examples, or other contents"),
    ("loss_hex", "the loss, on the same data"),
    ("grad_norm_hex", "the gradients, with the same loss"),
    ("fingerprint", "the state only: same data, loss and gradient norm"),
)


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common."""

    num_compared: int
    first_step: int
    last_step: int
    first_difference: int | None
    """Step of the first differing record."""
    what_differs: str
    """The first of EVIDENCE that differs there, or ""."""
    notes: tuple[str, ...]
    """Facts outside the settings in which the runs differ: versions, kind of device."""
    num_redone: int
    """Steps among them that a run logged more than once; every record was compared."""
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
        raise UserError(f"{called(run_dir)} has no metrics.jsonl: it is not a run, or has not finished a step.")
    lines = parse_json_lines(path)
    steps: dict[int, list[dict]] = {}
    for number, record in enumerate(lines):
        if record is None:
            check_cut_off(lines, number, path)
            continue
        step = record.get("step")
        if not isinstance(step, int) or not isinstance(record.get("loss_hex"), str):
            raise UserError(f"{path}, line {number + 1}: there is no step or no loss_hex, so it cannot be compared.")
        if not isinstance(record.get("fingerprint"), str) or not record["fingerprint"]:
            raise UserError(f"{path}: the record of step {step} has no fingerprint, so it cannot be compared.")
        steps.setdefault(step, []).append(record)
    return steps, lines.count(None)


def check_cut_off(lines: list[dict | None], number: int, path: Path) -> None:
    """Raises UserError unless the unreadable line is the last of an attempt, where a kill may have cut it off."""
    before = lines[number - 1] if number else None
    after = lines[number + 1] if number + 1 < len(lines) else {"attempt": None}
    if before is None or after is None or before.get("attempt") == after.get("attempt"):
        raise UserError(
            f"{path}, line {number + 1} cannot be read, and it is not the last of an attempt, which a kill may cut off: the file is"
            " damaged. Restore it from a copy."
        )


def check_comparable(run_a: Path, run_b: Path) -> tuple[str, ...]:
    """Facts that may explain a difference of two runs. Raises UserError where their numbers cannot be expected to agree."""
    facts = read_facts(run_a), read_facts(run_b)
    if run_a.samefile(run_b):
        raise UserError(f"{run_a} and {run_b} are the same folder: name two runs.")
    differ = differences(*(config_of(f, run) for f, run in zip(facts, (run_a, run_b))))
    rows = [f"{option} is {a!r} in the one, {b!r} in the other" for option, a, b in differ]
    data, outside = ([_section(f, name) for f in facts] for name in ("data", "versions"))
    if data[0] != data[1]:
        of = [f"{d.get('num_examples')} examples, SHA-256 {str(d.get('fingerprint'))[:16]}..." for d in data]
        rows.append(f"the data are {of[0]} in the one, {of[1]} in the other")
    if rows:
        listed = "".join(f"\n- {row}" for row in rows)
        raise UserError(f"{run_a} and {run_b} cannot be compared, since they were not to compute the same:{listed}")
    outside = [{**versions, "device": _section(f, "devices").get("kind")} for versions, f in zip(outside, facts)]
    return tuple(
        f"{name} {outside[0][name]} and {outside[1].get(name)}"
        for name in outside[0]
        if outside[0][name] != outside[1].get(name)
    )


def _section(facts: dict, name: str) -> dict:
    section = facts.get(name)
    return section if isinstance(section, dict) else {}


def first_differing_evidence(records: list[dict]) -> str | None:
    """How these records of one step differ, or None where they agree; what a record lacks is not compared."""

    def differs(key: str) -> bool:
        values = {r.get(key) for r in records}
        return len(values) > 1 and None not in values

    return next((name for key, name in EVIDENCE if differs(key)), None)


def compare(run_a: Path, run_b: Path) -> Comparison:
    """Compares every step that both logged; a step that a run did twice must agree in both attempts.

    Raises UserError where the runs cannot be compared or have no step in common.
    """
    (steps_a, broken_a), (steps_b, broken_b) = read_steps(run_a), read_steps(run_b)
    notes = check_comparable(run_a, run_b)
    common = sorted(steps_a.keys() & steps_b.keys())
    if not common:
        spans = [f"{min(s)} .. {max(s)}" if s else "none" for s in (steps_a, steps_b)]
        raise UserError(f"no logged step in common: {run_a} has {spans[0]}, {run_b} has {spans[1]}.")
    redone = sum(len(steps_a[step]) > 1 or len(steps_b[step]) > 1 for step in common)
    found = ((step, first_differing_evidence(steps_a[step] + steps_b[step])) for step in common)
    first, what = next(((step, what) for step, what in found if what), (None, ""))
    return Comparison(len(common), common[0], common[-1], first, what, notes, redone, broken_a + broken_b)


def describe(result: Comparison) -> str:
    redone = f", {result.num_redone} of them done more than once" if result.num_redone else ""
    steps = f"{result.num_compared} steps compared ({result.first_step} .. {result.last_step}{redone})"
    verdict = "identical" if result.identical else f"first difference at step {result.first_difference}: {result.what_differs}"
    unreadable = f"\n{result.num_unreadable} unreadable lines were skipped" if result.num_unreadable else ""
    notes = "".join(f"\nnote: the runs have {note}" for note in result.notes)
    return f"{steps}: {verdict}{notes}{unreadable}"

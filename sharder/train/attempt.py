"""One start of a run: where it begins, also in another run's checkpoint, or in an older one of its own."""

from dataclasses import dataclass, replace
from pathlib import Path

from sharder import checkpoint
from sharder.config import RunConfig, UserError
from sharder.facts import called, name_of, read_config, read_facts
from sharder.identity import differences

REWOUND = ".rewound"
"""End of the names of checkpoints that a run has gone back behind."""


@dataclass(frozen=True)
class Attempt:
    """One start of a run."""

    run_dir: Path
    number: int
    """1 for the first start."""
    resume_step: int | None
    """Checkpoint to restore, or None to begin at step 0."""
    reduction: str = "auto"
    """The mode that the run was begun in; of a new run, what was asked for."""
    run_id: str = ""
    """Tells the run from every other, also from one that had the same folder before."""
    source: Path | None = None
    """The run whose checkpoint it is, where that is another: a branch begins."""
    rewinds: bool = False
    """Checkpoints after `resume_step` are to be set aside."""
    reached: int = 0
    """Furthest step that an earlier attempt has logged."""


@dataclass(frozen=True)
class Branch:
    """`--resume-from RUN@STEP`, and whether a run may go back in itself."""

    run_dir: Path
    step: int | None
    """None: the latest."""
    rewind: bool = False


def parse_branch(text: str | None, rewind: bool) -> Branch | None:
    """Raises UserError for what is no RUN@STEP."""
    if text is None:
        if rewind:
            raise UserError("--rewind goes with --resume-from RUN@STEP, which says how far back.")
        return None
    run, at, step = text.rpartition("@")
    if at and not step.isdecimal():
        raise UserError(f"--resume-from is {text!r}, but must be RUN or RUN@STEP, with the step of one of its checkpoints.")
    return Branch(Path(run if at else text), int(step) if at else None, rewind)


def begin_branch(new: Attempt, branch: Branch) -> Attempt:
    """A new run from a checkpoint of another. Raises UserError where there is no such checkpoint."""
    read_facts(branch.run_dir)
    return replace(new, resume_step=checkpoint.choose_step(branch.run_dir, branch.step), source=branch.run_dir.resolve())


def resume_branch(attempt: Attempt, branch: Branch, facts: dict, steps: list[int]) -> Attempt:
    """A run that exists, with `--resume-from`: it goes back in itself, or was a branch from there already.

    Raises UserError where it is neither, or goes back without being told that it may.
    """
    if branch.run_dir.resolve() != attempt.run_dir.resolve():
        origin = facts.get("branched_from") or {}
        if origin.get("run") != name_of(branch.run_dir) or branch.step not in (None, origin.get("step")):
            was = f"was branched from {origin['run']}@{origin['step']}" if origin else "is no branch"
            raise UserError(
                f"{called(attempt.run_dir)} holds a run already, which {was}: choose another --run-dir for a branch from {called(branch.run_dir)}, or"
                " leave --resume-from out to continue it."
            )
        return attempt if steps else replace(attempt, resume_step=origin["step"], source=branch.run_dir.resolve())
    step = checkpoint.choose_step(attempt.run_dir, branch.step)
    later = [s for s in steps if s > step]
    if later and not branch.rewind:
        raise UserError(
            f"{called(attempt.run_dir)} has checkpoints up to step {later[-1]}: to go back to step {step}, add --rewind; the later ones"
            f" ({', '.join(map(str, later))}) are then set aside, not overwritten. Or begin another --run-dir from it."
        )
    return replace(attempt, resume_step=step, rewinds=bool(later), reached=step)


def rewind(attempt: Attempt) -> list[tuple[str, str]]:
    """Sets aside the checkpoints after the step gone back to. Returns (new name, reason) of each."""
    later = [s for s in checkpoint.list_steps(attempt.run_dir) if s > attempt.resume_step]
    why = f"the run went back to step {attempt.resume_step}"
    return [(checkpoint.set_aside(checkpoint.entry(attempt.run_dir, s), REWOUND), why) for s in later]


def lasting_facts(attempt: Attempt) -> dict:
    """What config.json keeps from attempt to attempt."""
    origin = {}
    if attempt.source is not None:
        fingerprint = checkpoint.read_manifest(attempt.source, attempt.resume_step)["fingerprint"]
        origin = {"branched_from": {"run": name_of(attempt.source), "step": attempt.resume_step, "fingerprint": fingerprint}}
    elif (attempt.run_dir / "config.json").exists():
        origin = {k: v for k, v in read_facts(attempt.run_dir).items() if k == "branched_from"}
    return {"run_id": attempt.run_id, **origin}


def describe_branch(attempt: Attempt, config: RunConfig) -> str:
    """Where a branch begins, and what it does otherwise than the run that it leaves."""
    differ = differences(read_config(attempt.source), config)
    listed = "".join(f"\n- {option} was {before!r}, is {after!r}" for option, before, after in differ)
    return f"branched from {called(attempt.source)}@{attempt.resume_step}" + (
        f", with other settings:{listed}" if differ else ""
    )

"""`sharder checkpoints RUN`: what a run has saved, how old and large it is, and whether it still is what was saved."""

import time
from pathlib import Path

import tyro

from sharder import checkpoint
from sharder.checkpoint.folders import fault, folder, note_verified, verified_s
from sharder.checkpoint.restore import restore_numpy
from sharder.facts import read_facts
from sharder.options import parse
from sharder.train.fingerprint import hex_digest, numpy_digest, numpy_fingerprint


def run(arguments: list[str], description: str) -> int:
    """Returns the exit code: 1 where a checkpoint is not what was saved."""

    def command(
        run: tyro.conf.Positional[Path], verify: bool = False, step: int | None = None, fingerprint: int | None = None
    ) -> tuple:
        """
        Args:
            run: Folder of the run.
            verify: Read every checkpoint and compare the fingerprint of each array with what was saved.
            step: With --verify: this one alone.
            fingerprint: Step whose fingerprint is recomputed in numpy from the files.
        """
        return run, verify, step, fingerprint

    run_dir, verify, step, fingerprint = parse(command, args=arguments, prog="sharder checkpoints", description=description)
    read_facts(run_dir)
    if fingerprint is not None:
        return recompute(run_dir, checkpoint.choose_step(run_dir, fingerprint))
    if verify:
        steps = checkpoint.list_steps(run_dir) if step is None else [checkpoint.choose_step(run_dir, step)]
        return max([verify_step(run_dir, step) for step in steps], default=0) | list_others(run_dir)
    for step in checkpoint.list_steps(run_dir):
        print(describe(run_dir, step, time.time()))
    list_others(run_dir)
    return 0


def describe(run_dir: Path, step: int, now_s: float) -> str:
    """One line: step, fingerprint, age, size, verified or not, and how the run was divided."""
    manifest, where = checkpoint.read_manifest(run_dir, step), checkpoint.entry(run_dir, step)
    mesh = " x ".join(f"{k} {v}" for k, v in manifest["mesh"].items())
    seen = verified_s(where)
    return (
        f"step {step:>8}  {manifest['fingerprint']}  {age(now_s - (where / 'manifest.json').stat().st_mtime):>8} old"
        f"  {sum(manifest['files'].values()):>14,} bytes  {'not verified' if seen is None else f'verified {age(now_s - seen)} ago'}"
        f"  policy {manifest['policy']}, {mesh}, {manifest['num_processes']} process(es)"
    )


def age(seconds: float) -> str:
    """The two largest units: 3 d 4 h."""
    days, hours, minutes = int(seconds // 86400), int(seconds // 3600 % 24), int(seconds // 60 % 60)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{max(int(seconds), 0)} s"


def list_others(run_dir: Path) -> int:
    """Prints the folders that are no checkpoints; 1 where one is damaged that was not set aside."""
    others = [folder(run_dir) / name for name in checkpoint.list_others(run_dir)]
    for where in others:
        print(f"{where.name}: not a checkpoint ({fault(where) or 'set aside'})")
    return int(any(where.name.isdecimal() for where in others))


def verify_step(run_dir: Path, step: int) -> int:
    """Says whether a checkpoint is what was saved; 1 where it is not."""
    began, saved = time.perf_counter(), checkpoint.read_manifest(run_dir, step)["leaves"]
    try:
        found = restore_numpy(run_dir, step)
    except checkpoint.Damaged as damage:
        print(f"step {step:>8}  DAMAGED: {damage}")
        return 1
    differ = [p for p in sorted(saved) if p not in found or hex_digest(numpy_digest(p, found[p])) != saved[p]["fingerprint"]]
    if differ:
        print(f"step {step:>8}  DAMAGED: {len(differ)} of {len(saved)} leaves are not what was saved ({', '.join(differ[:5])})")
        return 1
    note_verified(checkpoint.entry(run_dir, step))
    size = sum(x.nbytes for x in found.values())
    print(f"step {step:>8}  verified: {len(saved)} leaves, {size:,} bytes, {time.perf_counter() - began:.1f} s")
    return 0


def recompute(run_dir: Path, step: int) -> int:
    """The fingerprint of the whole state, from the files alone."""
    found, saved = numpy_fingerprint(restore_numpy(run_dir, step)), checkpoint.read_manifest(run_dir, step)["fingerprint"]
    print(f"step {step}: {found} from the files, {saved} when saved: {'equal' if found == saved else 'DIFFERENT'}")
    return 0 if found == saved else 1

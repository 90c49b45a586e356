"""`sharder launch --engine slurm`: a batch script with one supervisor for each node. By default it is only printed.

SLURM starts, ends and requeues; Sharder adds what it needs to know: a signal before the time limit becomes a save, exit code 75
means that there is more to do, and then the job puts itself back into the queue. jax finds its processes by SLURM's variables.
"""

import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from sharder.config import UserError
from sharder.stop import PREEMPTED


@dataclass(frozen=True)
class Job:
    """What is asked of SLURM."""

    nodes: int
    arguments: tuple[str, ...]
    """Of `sharder`, after `--`."""
    run_dir: Path
    time_limit: str | None = None
    """As sbatch takes it: minutes, HH:MM:SS, D-HH."""
    grace_s: int = 120
    """How long before the time limit the signal comes."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, each as on its command line."""


def script(job: Job) -> str:
    """The batch script."""
    headings = [
        f'--job-name="sharder-{job.run_dir.name}"', f"--nodes={job.nodes}", "--ntasks-per-node=1", "--requeue", "--open-mode=append",
        f'--output="{job.run_dir.absolute()}.slurm-%j.log"', f"--signal=TERM@{job.grace_s}",
        *([f"--time={job.time_limit}"] if job.time_limit else []), *job.options,
    ]  # fmt: skip
    lines = ["#!/bin/sh", *(f"#SBATCH {heading}" for heading in headings)]
    # What a shell on each node reads, quoted once more for the shell of the script.
    inner = shlex.quote('JAX_PROCESS_ID="$SLURM_NODEID" exec ' + shlex.join(["sharder", *job.arguments]))
    return (
        "\n".join(lines)
        + f"""

# Every node has one process; the first node's is process 0. A port of its own for every start of this job.
export JAX_COORDINATOR_ADDRESS="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + (SLURM_JOB_ID + ${{SLURM_RESTART_COUNT:-0}}) % 20000))"
export JAX_NUM_PROCESSES="$SLURM_NNODES"
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY

# The shell outlives a signal to the whole job, so that it can say what comes next.
trap : TERM
# A failed process ends all, so that none waits for it. SIGTERM, before the time limit and at a preemption, reaches every process:
# they agree on a step, save there, and end with {PREEMPTED}.
srun --kill-on-bad-exit=1 --wait=30 sh -c {inner}
code=$?
case $code in
  0|2) exit $code ;;                                  # done; or something that a person has to mend
  *) [ "${{SLURM_RESTART_COUNT:-0}}" -lt 100 ] && scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $code
"""
    )


def launch(job: Job, submit: bool) -> int:
    """Prints the script, or hands it to sbatch. Raises UserError where there is no SLURM."""
    text = script(job)
    if not submit:
        print(text, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch on this machine: log in to one that submits to SLURM, or leave out --submit to see the script."
        )
    return subprocess.run(["sbatch"], input=text, text=True).returncode

"""`sharder launch`: its options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sharder.checkpoint.staging import staging_folder
from sharder.config import UserError
from sharder.facts import is_address
from sharder.launch import jobset, slurm
from sharder.launch.watch import Limits
from sharder.options import parse

USAGE = "sharder launch --processes N [--devices-per-process K] -- train RECIPE ..."


@dataclass(frozen=True)
class Elsewhere:
    """Engines that start a process on each of several hosts."""

    submit: bool = False
    """Of slurm and jobset: submit; else print what would be submitted."""
    time_limit: str | None = None
    """Of slurm, as sbatch takes it; the run is saved before and put into the queue again."""
    grace_s: int = 120
    """Time for the save before a time limit or an eviction."""
    image: str = "sharder:latest"
    """Of jobset: the container."""
    gpus: int = 0
    """Of jobset: for each host."""
    ray_address: str = "auto"
    """Of ray: its cluster."""


def launch(arguments: list[str]) -> int:
    """Start several processes of a command on this machine, and again what ends, until the run is done."""
    from sharder.launch.supervisor import Options
    from sharder.launch.supervisor import launch as run

    at = arguments.index("--") if "--" in arguments else len(arguments)
    own, inner = arguments[:at], arguments[at + 1 :]

    def command(
        processes: int,
        devices_per_process: int | None = None,
        min_processes: int | None = None,
        max_restarts: int = 10,
        startup_limit_s: float = 600.0,
        step_limit_s: float | None = None,
        spares: bool = True,
        engine: Literal["local", "ray", "slurm", "jobset"] = "local",
        elsewhere: Annotated[Elsewhere, tyro.conf.arg(name="")] = Elsewhere(),
    ) -> tuple[Options, int | None, str, Elsewhere]:
        """
        Args:
            processes: Number of processes.
            devices_per_process: Simulated CPU devices of each.
            min_processes: Go on with fewer, but at least these, where one fails again and again or there is no room; unset: all.
            max_restarts: Attempts after the first within an hour; 0: one attempt. A command without --run-dir has one.
            startup_limit_s: How long a process may take for bring-up, compilation, restore, an evaluation or a save.
            step_limit_s: How long a step may take; unset: 20 x the median step, at least 30 s. Not for the first of an attempt.
            spares: Keep an interpreter ready for each process that has loaded jax already, for a fast restart.
            engine: Who starts the processes: local: this command, here; ray, slurm, jobset: one on each of so many hosts (docs/deploy.md).
        """
        limits = Limits(startup_limit_s, step_limit_s)
        return Options(processes, min_processes, max_restarts, limits, spares), devices_per_process, engine, elsewhere

    options, devices, engine, elsewhere = parse(
        command, args=own, prog="sharder launch", description=f"{launch.__doc__} {USAGE}"
    )
    if not inner:
        raise UserError(f"there is nothing to launch. Usage: {USAGE}")
    if devices is not None:
        if any(a.split("=")[0].replace("_", "-") == "--cluster.cpu-devices" for a in inner):
            raise UserError("--devices-per-process and --cluster.cpu-devices say two things: give one of them.")
        inner = [*inner, "--cluster.cpu-devices", str(devices)]
    if engine != "local":
        return launch_elsewhere(engine, inner, options, elsewhere)
    return run(inner, options, run_dir_of(inner))


def launch_elsewhere(engine: str, inner: list[str], supervised, options: Elsewhere) -> int:
    """Raises UserError for a command that could not be resumed."""
    text, hosts = run_dir_text(inner), supervised.processes
    if not text:
        raise UserError(
            f"--engine {engine} starts what ends again: give the command a --run-dir, on a disk that all hosts share or an"
            f" address."
        )
    if engine == "ray" and is_address(text):
        raise UserError(
            f"--engine ray reads what the processes note in the run's folder: give --run-dir a folder that all hosts share, and"
            f" --checkpoint.mirror {text} for a copy."
        )
    # What is printed before the run is known goes beside its folder; an address has none.
    run_dir = Path(text.rstrip("/").rsplit("/", 1)[-1] if is_address(text) else text)
    if engine == "ray":
        from sharder.launch import ray_engine

        return ray_engine.launch(inner, supervised, run_dir, options.ray_address)
    if engine == "slurm":
        return slurm.launch(slurm.Job(hosts, tuple(inner), run_dir, options.time_limit, options.grace_s), options.submit)
    accelerators = (("nvidia.com/gpu", options.gpus),) if options.gpus else ()
    job = jobset.Job(
        hosts,
        tuple(inner),
        run_dir,
        options.image,
        max_restarts=supervised.max_restarts,
        grace_s=options.grace_s,
        accelerators=accelerators,
    )
    return jobset.launch(job, options.submit)


def run_dir_of(arguments: list[str]) -> Path | None:
    """The run folder of a launched command, where it has one; of an address its staging folder here."""
    text = run_dir_text(arguments)
    return (staging_folder(text) if is_address(text) else Path(text)) if text else None


def run_dir_text(arguments: list[str]) -> str:
    """--run-dir of a launched command; empty where it has none."""
    for at, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name.replace("_", "-") == "--run-dir":
            return value or (arguments[at + 1] if at + 1 < len(arguments) else "")
    return ""

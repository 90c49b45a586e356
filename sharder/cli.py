"""The command line: parses, calls, prints. Every command imports what it needs itself, so that help is fast.

Exit codes: 0 done, 1 failed or differs, 2 the user's to mend, 75 stopped and resumable, 130 interrupted with Ctrl-C,
141 nobody reads the output any more.
"""

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sharder.config import ClusterConfig, ParallelConfig, RunConfig, UserError, to_dict
from sharder.lifeline import hold
from sharder.options import parse
from sharder.recipes import split_name

WithConfig = Annotated[tyro.conf.AvoidSubcommands[RunConfig], tyro.conf.arg(name="")]


def recipes(arguments: list[str]) -> int:
    """List the recipes."""
    from sharder.recipes import RECIPES, find_recipe

    parse(lambda: None, args=arguments, prog="sharder recipes", description=recipes.__doc__)
    for name in RECIPES:
        print(f"{name:12} {(find_recipe(name).__doc__ or '').strip()}")
    print("path/to/file.py:function  any function that returns a RunConfig")
    return 0


def train(arguments: list[str]) -> int:
    """Train a recipe; the same command resumes it."""
    from sharder import heartbeat
    from sharder.place import expects_others
    from sharder.recipes import load_recipe
    from sharder.stop import StopRequest

    name, rest = split_name(arguments, "RECIPE", "sharder train RECIPE --run-dir DIR [options]")
    heartbeat.begin()
    # Before anything that a recipe imports starts threads: those inherit which signals are blocked.
    stop = StopRequest().listen()
    if expects_others(ClusterConfig(), os.environ):
        stop.wait_for_others()
    default = load_recipe(name)

    def command(
        run_dir: str | None = None,
        resume: Literal["auto", "never", "must"] = "auto",
        resume_from: Annotated[str | None, tyro.conf.arg(name="resume-from")] = None,
        rewind: bool = False,
        print_config: Annotated[bool, tyro.conf.arg(name="print-config")] = False,
        config: WithConfig = default,
    ) -> tuple:
        """
        Args:
            run_dir: Folder of the run, or its address in a store (gs://bucket/run); one that exists is resumed.
            resume: auto: resume a run that exists, else start one; never: refuse one that exists; must: refuse to start one.
            resume_from: RUN@STEP: begin a new run with the whole state of a checkpoint of another (RUN alone: its latest).
            rewind: With --resume-from of the run itself: go back; its later checkpoints are set aside.
            print_config: Print the resolved configuration as JSON and stop.
        """
        return run_dir, resume, (resume_from, rewind), print_config, config

    run_dir, resume, start, print_config, config = parse(
        command, args=rest, prog=f"sharder train {name}", description=train.__doc__
    )
    if print_config:
        print(json.dumps(to_dict(config), indent=1))
        return 0
    if run_dir is None:
        raise UserError("--run-dir is missing: name the folder that the run is kept in.")
    if expects_others(config.cluster, os.environ):
        stop.wait_for_others()
    from sharder.backends import load_jax

    load_jax()
    from sharder.checkpoint.reading import bring_branch
    from sharder.checkpoint.staging import settle
    from sharder.train.attempt import parse_branch
    from sharder.train.loop import train as run

    resume_from, rewind = start
    branch = parse_branch(bring_branch(resume_from, run_dir), rewind)
    folder, config = settle(run_dir, config)
    return run(config, folder, resume, stop, branch)


def launch(arguments: list[str]) -> int:
    """Start several processes of a command on this machine, and again what ends, until the run is done."""
    from sharder.launch.command import launch as run

    return run(arguments)


def verify(arguments: list[str]) -> int:
    """Compare the fingerprints of two runs step by step: exit 0 identical, 1 different, 2 not comparable."""

    def command(
        run_a: tyro.conf.Positional[Path], run_b: tyro.conf.Positional[Path],
        leaves: bool = False, step: int | None = None, json: bool = False,  # noqa: A002
    ) -> tuple:  # fmt: skip
        """
        Args:
            leaves: Compare two checkpoints instead: which arrays differ, and by how many units in the last place.
            step: With --leaves: step of the checkpoints; unset: the newest that both have.
            json: Print the result as JSON.
        """
        return run_a, run_b, leaves, step, json

    run_a, run_b, leaves, step, as_json = parse(command, args=arguments, prog="sharder verify", description=verify.__doc__)
    if step is not None and not leaves:
        raise UserError("--step goes with --leaves: without it every step that both runs logged is compared.")
    if leaves:
        return _verify_leaves(run_a, run_b, step, as_json)
    from sharder.report.verify import compare, describe

    result = compare(run_a, run_b)
    print(json.dumps({**dataclasses.asdict(result), "identical": result.identical}) if as_json else describe(result))
    return 0 if result.identical else 1


def _verify_leaves(run_a: Path, run_b: Path, step: int | None, as_json: bool) -> int:
    from sharder.report.verify import check_comparable
    from sharder.serve.leaves import compare_leaves, newest_common_step, table

    check_comparable(run_a, run_b)
    step = newest_common_step(run_a, run_b, step)
    differences = compare_leaves(run_a, run_b, step)
    if as_json:
        print(json.dumps({"step": step, "identical": not differences, "leaves": [dataclasses.asdict(d) for d in differences]}))
    elif differences:
        from rich.console import Console

        Console().print(table(differences, step))
        print(f"first: {differences[0].path}")
    else:
        print(f"step {step}: every leaf is identical")
    return 1 if differences else 0


def checkpoints(arguments: list[str]) -> int:
    """List the checkpoints of a run, or verify them."""
    from sharder.serve.checkpoints import run

    return run(arguments, checkpoints.__doc__)


def _run_config(arguments: list[str], usage: str) -> tuple[Path, RunConfig, list[str]]:
    """A run's folder and configuration, which its options may override."""
    from sharder.facts import read_config

    name, rest = split_name(arguments, "RUN", usage)
    return Path(name), read_config(Path(name)), rest


def evaluate(arguments: list[str]) -> int:
    """Print the loss of a checkpoint on held-out data, or with --sim metaworld how often its policy succeeds in a simulator."""
    if any(a.split("=")[0] == "--sim" for a in arguments):
        from sharder.sim import commands

        return commands.evaluate(arguments)
    run, default, rest = _run_config(arguments, "sharder eval RUN [--step N]")

    def command(
        step: int | None = None, split: Literal["validation", "training"] = "validation", config: WithConfig = default
    ) -> tuple:
        """
        Args:
            step: Checkpoint; unset: the latest.
            split: What was held out, or what it was trained on (--train.validation-batches: how much).
        """
        return step, split, config

    step, split, config = parse(command, args=rest, prog="sharder eval RUN", description=evaluate.__doc__)
    from sharder.serve.evaluate import evaluate_run

    print(evaluate_run(config, run, step, split))
    return 0


def generate(arguments: list[str]) -> int:
    """Continue a text with a trained language model."""
    from sharder.serve.sampling import Sampling

    run, config, rest = _run_config(arguments, "sharder generate RUN --prompt TEXT")

    def command(
        prompt: str,
        max_new_tokens: int = 64,
        step: int | None = None,
        sampling: Annotated[Sampling, tyro.conf.arg(name="")] = Sampling(),
        # One device, however the run was trained.
        parallel: ParallelConfig = ParallelConfig(policy="dp"),
        cluster: ClusterConfig = config.cluster,
    ) -> tuple:
        """
        Args:
            prompt: Text to continue.
            max_new_tokens: Tokens to add.
            step: Checkpoint; unset: the latest.
            parallel: How devices share the work; unset degrees are 1.
        """
        return prompt, max_new_tokens, step, sampling, dataclasses.replace(config, parallel=parallel, cluster=cluster)

    prompt, new, step, sampling, config = parse(command, args=rest, prog="sharder generate RUN", description=generate.__doc__)
    from sharder.serve.generate import generate_text

    print(generate_text(config, run, step, prompt, new, sampling))
    return 0


def data(arguments: list[str]) -> int:
    """Inspect robot datasets, compute their statistics, record new ones."""
    if arguments[:1] == ["record"]:
        from sharder.sim.commands import record

        return record(arguments[1:])
    from sharder.data.commands import data as run

    return run(arguments)


def demo(arguments: list[str]) -> int:
    """Train while processes are killed, lost and brought back, and compare with a run that nothing befalls."""

    def command(dir: Path = Path("runs/demo"), script: bool = False) -> tuple[Path, bool]:  # noqa: A002
        """
        Args:
            dir: Folder for the runs; an old demo in it is replaced.
            script: What happens stands in a script; no key does anything.
        """
        return dir, script

    folder, script = parse(command, args=arguments, prog="sharder demo", description=demo.__doc__)
    from sharder.launch.demo import run_demo

    return run_demo(folder, script)


def elsewhere(module: str, doc: str) -> Callable[[list[str]], int]:
    """A command that a module of its own parses and does, with `run(arguments)`."""

    def command(arguments: list[str]) -> int:
        return importlib.import_module(module).run(arguments)

    command.__doc__ = doc
    return command


COMMANDS = {
    "recipes": recipes,
    "train": train,
    "check": elsewhere(
        "sharder.train.check_command", "Show the plan of a run and every reason why it could not start; allocates nothing."
    ),
    "launch": launch,
    "chaos": elsewhere(
        "sharder.launch.chaos", "Train while processes, disk and memory fail, and compare with the run that nothing befell."
    ),
    "verify": verify,
    "checkpoints": checkpoints,
    "eval": evaluate,
    "generate": generate,
    "serve": elsewhere("sharder.serve.command", "Answer robots over a websocket with a trained policy (openpi's protocol)."),
    "data": data,
    "weights": elsewhere(
        "sharder.weights.command", "Import, export or check weights of other libraries and trainers; --help lists how."
    ),
    "profile": elsewhere(
        "sharder.train.profile_command", "Measure where the time of a step goes, by part and by kind of work."
    ),
    "scale": elsewhere("sharder.study.scaling", "Measure a step on more and more devices, strong or weak."),
    "study": elsewhere(
        "sharder.study.command", "Measure attention over the length of the sequence, or flags of XLA on the same work."
    ),
    "report": elsewhere("sharder.report.command", "Draw what runs recorded as one HTML file."),
    "watch": elsewhere("sharder.report.watch", "Follow a run in the terminal while it goes on."),
    "demo": demo,
}


def find_command(name: str) -> Callable[[list[str]], int]:
    """Raises UserError for a name that is none."""
    if name not in COMMANDS:
        raise UserError(f"there is no command {name!r}; use one of {', '.join(COMMANDS)}.")
    return COMMANDS[name]


def usage() -> str:
    rows = "\n".join(f"  {name:12} {(command.__doc__ or '').strip()}" for name, command in COMMANDS.items())
    return f"usage: sharder COMMAND ... [--traceback]\n\n{rows}\n\nsharder COMMAND --help says more."


def main(argv: list[str] | None = None) -> None:
    """Entry point; ends the process with the command's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    hold(dict(os.environ))
    show_all = "--traceback" in arguments
    if show_all:
        arguments.remove("--traceback")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        sys.exit(0 if arguments else 2)
    name, *rest = arguments
    if name in ("--version", "version"):
        from sharder import __version__

        print(__version__)
        sys.exit(0)
    from sharder.ending import end_with

    end_with(lambda: find_command(name)(_near(name, rest)), show_all)


def _near(name: str, arguments: list[str]) -> list[str]:
    """With folders in place of the addresses of runs that a command reads."""
    if not any("://" in argument for argument in arguments):
        return arguments
    from sharder.checkpoint.reading import bring_near

    return bring_near(name, arguments)

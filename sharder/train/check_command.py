"""`sharder check RECIPE`: its options."""

import json
import os
from pathlib import Path
from typing import Annotated

import tyro

from sharder import cluster
from sharder.backends import load_jax
from sharder.config import RunConfig, UserError
from sharder.finding import Finding, Refused
from sharder.options import parse
from sharder.recipes import load_recipe, split_name


def run(arguments: list[str]) -> int:
    """Show the plan of a run and every reason why it could not start; allocates nothing."""
    # Not the parsed option: what cannot be parsed is a finding, too.
    return _json_whatever_happens(arguments) if "--json" in arguments else _run(arguments)


def _json_whatever_happens(arguments: list[str]) -> int:
    """Where options are refused, that is the finding: nothing but JSON goes to standard output."""
    try:
        return _run(arguments)
    except UserError as error:
        findings = error.findings if isinstance(error, Refused) else [Finding("options", str(error))]
        print(json.dumps({"findings": [f.to_json() for f in findings], "plan": None, "accounting": None}, indent=1))
        return 2


def _run(arguments: list[str]) -> int:
    name, rest = split_name(arguments, "RECIPE", "sharder check RECIPE [options]")
    default = load_recipe(name)

    def command(
        topology: str | None = None,
        find: bool = False,
        compile: bool = False,  # noqa: A002
        report: Path | None = None,
        json: bool = False,  # noqa: A002
        show: bool = False,
        param: str | None = None,
        out: Path | None = None,
        config: Annotated[tyro.conf.AvoidSubcommands[RunConfig], tyro.conf.arg(name="")] = default,
    ) -> tuple:
        """
        Args:
            topology: A machine that need not be there: h100:32x8 (hosts x GPUs), v5e:16x16 (a TPU slice).
            find: Search policies and degrees for the fewest devices that fit, and the three fastest of this topology.
            compile: Compile the step for the devices of this machine, and show its memory and collectives.
            report: Also write what was found to this JSON file.
            json: Print findings, plan and accounting as JSON, and nothing else.
            show: Show which device holds what of a parameter and of the batch, and bytes per device by strategy.
            param: With --show: path of the parameter; unset: the largest.
            out: With --show: also write a figure (.svg, .png, .pdf).
        """
        return (topology, find, compile, report), (json, show, param, out), config

    return _check(*parse(command, rest, f"sharder check {name}", run.__doc__))


def _check(compiled: tuple, seen: tuple, config: RunConfig) -> int:
    topology, find, compiles, report = compiled
    as_json, show, param, out = seen
    if find and topology is None:
        raise UserError("--find searches the parts of a machine: name it with --topology.")
    if not show and (param or out):
        raise UserError("--param and --out go with --show.")
    if (as_json or show) and (find or compiles or report or (as_json and show)):
        raise UserError("--json and --show look at shapes alone: give one of them, without --find, --compile and --report.")
    if topology is not None and (config.cluster.cpu_devices or config.cluster.num_processes):
        raise UserError("--topology names all devices and hosts: leave out --cluster.cpu-devices and --cluster.num-processes.")
    for path in filter(None, (report, out)):
        check_writable(path)
    load_jax()
    if topology is None:
        cluster.initialize(config.cluster, exact=config.parallel.reduction == "exact")
    from sharder.train import planning

    if as_json:
        return planning.check_json(config, topology)
    if show:
        return planning.check_show(config, topology, param, out)
    if topology is not None:
        return planning.check_topology(config, topology, find, report)
    return planning.check_here(config, compiles, report)


def check_writable(path: Path) -> None:
    """Raises UserError where no file can be written there: before the work, not after it."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file.")
    parent = next(p for p in path.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{path} cannot be written: {parent} is {'not writable' if parent.is_dir() else 'no folder'}.")

"""`sharder check RECIPE`: its options."""

from pathlib import Path
from typing import Annotated

import tyro

from sharder import cluster
from sharder.config import RunConfig, UserError
from sharder.recipes import load_recipe, split_name


def run(arguments: list[str]) -> int:
    """Show the plan of a run and every reason why it could not start; allocates nothing."""
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

    compiled, seen, config = tyro.cli(command, args=rest, prog=f"sharder check {name}", description=run.__doc__)
    topology, find, compiles, report = compiled
    if find and topology is None:
        raise UserError("--find searches the parts of a machine: name it with --topology.")
    if any(seen):
        return _check_shapes(config, topology, seen, alone=not (find or compiles or report))
    if topology is not None:
        from sharder.train.planning import check_topology

        return check_topology(config, topology, find, report)
    cluster.initialize(config.cluster, exact=config.parallel.reduction == "exact")
    from sharder.train.planning import check_here

    return check_here(config, compiles, report)


def _check_shapes(config: RunConfig, topology: str | None, seen: tuple, alone: bool) -> int:
    """`check` with --json or --show: from shapes alone."""
    as_json, show, param, out = seen
    if not show and (param or out):
        raise UserError("--param and --out go with --show.")
    if not alone or (as_json and show):
        raise UserError("--json and --show look at shapes alone: give one of them, without --find, --compile and --report.")
    if topology is None:
        cluster.initialize(config.cluster, exact=config.parallel.reduction == "exact")
    from sharder.train.planning import check_json, check_show

    return check_show(config, topology, param, out) if show else check_json(config, topology)

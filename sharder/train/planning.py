"""`sharder check`: the real training step, described, or compiled for devices that are or are not there, and handed to the
instruments. Allocates nothing."""

import json
import sys
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from sharder.accounting import account
from sharder.backends import quiet_stderr
from sharder.config import RunConfig
from sharder.finding import Refused
from sharder.instrument import machine, show, topology
from sharder.instrument.hardware import find_accelerator
from sharder.instrument.machine import Prediction, Step
from sharder.instrument.memory import measured_bytes
from sharder.sharding import figure, grid
from sharder.sharding.divisible import Machine
from sharder.sharding.show import explain
from sharder.train.abstract import compile_exact, lower_abstract
from sharder.train.description import describe_step
from sharder.train.inspection import Inspection, inspect, inspect_here
from sharder.train.setup import prepare, set_up


def inspect_for(config: RunConfig, topology_name: str | None) -> Inspection:
    """On the devices of this run, or on a machine by name, of which memory is known, and neither disk nor data."""
    if topology_name is None:
        return inspect_here(config, Path.cwd())
    target = topology.parse_topology(topology_name)
    jax.config.update("jax_platforms", "cpu")
    there = Machine(target.num_devices, target.devices_per_host)
    return inspect(config, there, "gpu", target.accelerator.memory_bytes, predict=True)


def check_json(config: RunConfig, topology_name: str | None) -> int:
    """Prints findings, plan and accounting as JSON, and nothing else. Returns 0, or 2 where there are findings."""
    inspection = inspect_for(config, topology_name)
    print(json.dumps(inspection.to_json(), indent=1))
    return 2 if inspection.findings else 0


def check_show(config: RunConfig, topology_name: str | None, param: str | None, out: Path | None) -> int:
    """Prints who holds what of a parameter and of the batch, and bytes by strategy; with `out` as a figure too. Returns 0.

    Raises UserError with all findings, after the picture where the plan has one.
    """
    inspection = inspect_for(config, topology_name)
    accounting = inspection.accounting()
    if inspection.sound and accounting is not None:
        arguments = inspection.plan, config.parallel, accounting.slot_size, param
        if out is not None:
            figure.check_format(out)
        _console().print(grid.show(*arguments))
        if out is not None:
            figure.draw(*arguments, out)
    if inspection.findings:
        raise Refused(inspection.findings)
    return 0


def check_here(config: RunConfig, compiles: bool, report: Path | None = None) -> int:
    """Plan, batch and memory on the devices of this run; with `compiles` the compiled step beside them. Returns 0.

    Raises UserError with all findings, after the plan where it has one.
    """
    console, devices = _console(), jax.devices()
    inspection = inspect_here(config, Path.cwd())
    if inspection.findings and inspection.sound:
        print_whole_numbers(console, explain(inspection.plan))
    if any(finding.rule == "mesh" for finding in inspection.findings):
        wanted = inspection.plan.mesh.num_devices
        print(f"to plan for {wanted} devices that are not here: --topology h100:1x{wanted}, or --cluster.cpu-devices {wanted}")
    setup = set_up(inspection, devices)
    step = describe_step(setup.config, len(devices), jax.local_device_count(), devices[0].platform)
    accelerator = find_accelerator(devices[0].device_kind)
    prediction = machine.predict_step(step, accelerator, jax.local_device_count())
    print_whole_numbers(console, explain(setup.plan))
    print(account(setup.config, setup.plan.mesh.num_replicas))
    if setup.why_fast:
        print(f"fast mode, not exact: {setup.why_fast}")
    compiled = None
    if compiles:
        hosts = [d.process_index for d in setup.mesh.devices.flat]
        if step.num_microbatches:
            compiled = machine.read_exact(prediction, compile_exact(setup), hosts, accelerator)
        else:
            compiled = machine.read_compiled(prediction, lower_abstract(setup).compile(), hosts, accelerator)
    limit, measured = accelerator and accelerator.memory_bytes, measured_bytes(devices[0])
    console.print(show.memory_table(prediction.memory, compiled and compiled.total_bytes, measured, limit))
    if compiled is not None:
        show.print_compiled(console, compiled)
    if accelerator is not None:
        print(show.time_text(prediction, compiled, accelerator))
    write(report, prediction, compiled)
    return 0


def write(report: Path | None, prediction: Prediction, compiled: machine.Compiled | None) -> None:
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(show.to_json(prediction, compiled), indent=1))


def check_topology(config: RunConfig, name: str, find: bool, report: Path | None = None) -> int:
    """The same for a machine by name, which need not be there. Returns 0, or 2 where the step does not fit."""
    target = topology.parse_topology(name)
    jax.config.update("jax_platforms", "cpu")
    with quiet_stderr():
        jax.devices()  # loads the plugins, which complain that there is no driver
    console, per_host = _console(), target.devices_per_host
    if find:
        return search(config, target)
    step, lowered, missing = describe_step(config, target.num_devices, per_host), None, topology.missing_compiler(target)
    if missing is None:
        with quiet_stderr():
            devices = topology.open_devices(target)
            setup = prepare(step.config, devices)
            lowered = None if step.num_microbatches else lower_abstract(setup)
    prediction = machine.predict_step(step, target.accelerator, per_host)
    print(f"{target}: {target.num_devices} devices, policy {step.plan.policy}, mesh {mesh_text(step)}")
    print(account(step.config, step.plan.mesh.num_replicas))
    if missing is not None:
        print(f"predicted from shapes alone; to compile the step too, install {missing}")
    compiled = None
    if lowered is not None:
        with quiet_stderr(), topology.memory_errors():
            program = lowered.compile(topology.compile_options(target))
        compiled = machine.read_compiled(
            prediction, program, topology.hosts(target, list(setup.mesh.devices.flat)), target.accelerator
        )
    limit = target.accelerator.memory_bytes
    console.print(show.memory_table(prediction.memory, compiled and compiled.total_bytes, None, limit))
    if compiled is not None:
        show.print_compiled(console, compiled)
    print(show.time_text(prediction, compiled, target.accelerator))
    write(report, prediction, compiled)
    return say_fit(config, target, prediction, compiled.total_bytes if compiled else prediction.memory.total)


def _console() -> Console:
    """As wide as the terminal; 160 columns in a file."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def print_whole_numbers(console: Console, table: Table) -> None:
    """Prints the table with columns at least as wide as their numbers; on a narrow console other text is folded instead."""
    if console.measure(table, options=console.options.update(max_width=10_000)).maximum > console.width:
        for column in table.columns:
            numbers = [len(cell) for cell in column.cells if cell.replace(",", "").isdecimal()]
            column.width, column.overflow = max(numbers, default=None), "fold"
        others = [column for column in table.columns if column.width is None]
        left = console.width - 1 - sum((column.width or 0) + 3 for column in table.columns)  # padding and box
        for column in others:
            column.width = max(left // len(others), 6)
        console.width = max(console.width, 1 + sum(column.width + 3 for column in table.columns))
    console.print(table)


def mesh_text(step: Step) -> str:
    mesh = step.plan.mesh
    return f"data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}"


def say_fit(config: RunConfig, target: topology.Topology, prediction: Prediction, total_bytes: int) -> int:
    limit, name = target.accelerator.memory_bytes, target.accelerator.name
    print(show.fit_text(total_bytes, limit, name))
    # Predictions are within 10 % of what compiles: what is only predicted is held to as much.
    wanted = int(limit * min(1.0, prediction.memory.total / total_bytes))
    if total_bytes <= limit:
        if not prediction.step.num_microbatches:
            most = machine.most_examples_that_fit(prediction.step, wanted)
            print(
                f"microbatches of up to {most} examples would fit, by prediction; a replica computes {prediction.step.microbatch_size} at once"
            )
        return 0
    found = machine.remedies(config, describe_step, prediction.step, target.num_devices, target.devices_per_host, wanted)
    print(
        "\n".join(["What would fit, by prediction:", *found])
        if found
        else "No policy, tensor degree, remat policy or microbatch would fit."
    )
    return 2


def search(config: RunConfig, target: topology.Topology) -> int:
    """Prints the fewest devices that fit and the three fastest configurations of the whole machine; 2 where nothing fits."""
    per_host, accelerator = target.devices_per_host, target.accelerator
    num_hosts = target.num_devices // per_host
    fewest = machine.fewest_devices(config, describe_step, num_hosts, per_host, accelerator)
    if fewest is None:
        print(f"nothing fits on {target}: no policy, tensor degree, remat policy or microbatch does, by prediction.")
        return 2
    print(f"fewest devices that fit, by prediction: {show.found_text(fewest)}")
    fastest = machine.fastest(config, describe_step, num_hosts, per_host, accelerator)
    if not fastest:
        print(f"nothing divides over all of {target}: the same command without --find says why, and what would.")
        return 0
    known = fastest[0].prediction.time is not None
    order = "times with all communication hidden, and with none, by which they are ranked" if known else "least memory first"
    print(f"{'fastest' if known else 'best'} on {target}, by prediction ({order}):")
    for found in fastest:
        print(f"  {show.found_text(found)}")
    return 0

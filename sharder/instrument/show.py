"""What the instruments found, as tables for people and as JSON for programs."""

from dataclasses import fields

from rich import box
from rich.console import Console
from rich.table import Table

from sharder.instrument.bound import mib
from sharder.instrument.collectives import Traffic
from sharder.instrument.hardware import Accelerator
from sharder.instrument.machine import Compiled, Found, Prediction
from sharder.instrument.memory import Memory

NAMES = {
    "params": "parameters", "opt_state": "optimizer", "ema": "moving average", "batch": "batch", "gradients": "gradients",
    "activations": "activations", "temporary": "temporary", "communication": "communication",
}  # fmt: skip


def memory_table(memory: Memory, compiled_bytes: int | None, measured_bytes: int | None, limit_bytes: int | None) -> Table:
    """Bytes per device by what they are for, beside the compiled and the measured total, and the device's own."""
    table = Table(title="memory per device, MiB", box=box.SIMPLE)
    for heading in ("", "predicted", "compiled", "measured", "predicted / compiled"):
        table.add_column(heading, justify="left" if not heading else "right")
    for f in fields(Memory):
        if getattr(memory, f.name):
            table.add_row(NAMES[f.name], _mib(getattr(memory, f.name)), "", "", "")
    ratio = f"{memory.total / compiled_bytes:.3f}" if compiled_bytes else "-"
    table.add_section()
    table.add_row("total", _mib(memory.total), _mib(compiled_bytes), _mib(measured_bytes), ratio)
    if limit_bytes:
        table.add_row("device", _mib(limit_bytes), "", "", "")
    return table


def _mib(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.1f}"


def traffic_table(traffic: Traffic, smallest_bytes: int = 1 << 16) -> Table:
    """One row per collective that moves more than `smallest_bytes`, the most first."""
    table = Table(title="collectives of a step, per device", box=box.SIMPLE)
    for heading in ("kind", "axes", "dtype", "arrays", "times", "MiB each", "MiB per step", "across hosts", "scope"):
        table.add_column(heading, overflow="fold", justify="left" if heading in ("kind", "axes", "dtype", "scope") else "right")
    rest = [c for c in traffic.collectives if c.payload_bytes <= smallest_bytes]
    for c in traffic.collectives:
        if c.payload_bytes > smallest_bytes:
            kind = c.kind + (" (a gather)" if c.by_addition else "")
            cells = (kind, "+".join(c.axes), " ".join(c.dtypes), str(c.num_arrays), str(c.executions))
            table.add_row(*cells, _mib(c.bytes_each), _mib(c.payload_bytes), _mib(c.across_bytes), c.scope)
    table.caption = (
        f"gathered {mib(traffic.gathered_bytes)}, reduced {mib(traffic.reduced_bytes)}; a device receives"
        f" {mib(traffic.received_bytes)}, of which {mib(traffic.across_bytes)} from other hosts; {len(rest)} more of together"
        f" {mib(sum(c.payload_bytes for c in rest))}"
    )
    return table


def bounds_table(compiled: Compiled) -> Table:
    """What the layout needs at least beside what the program moves."""
    table = Table(title="against the least that the layout needs, MiB received per step and device", box=box.SIMPLE)
    for heading in ("purpose", "least", "program", "ratio", "across hosts: least", "program"):
        table.add_column(heading, justify="left" if heading == "purpose" else "right")
    for p in compiled.purposes:
        if p.bound_bytes or p.received_bytes:
            ratio = f"{p.received_bytes / p.bound_bytes:.3f}" if p.bound_bytes else "-"
            table.add_row(
                p.name, *map(_mib, (p.bound_bytes, p.received_bytes)), ratio, *map(_mib, (p.across_bound_bytes, p.across_bytes))
            )
    return table


def time_text(prediction: Prediction, compiled: Compiled | None, accelerator: Accelerator) -> str:
    """Work of a step, and its time at best."""
    work, time = prediction.work, (compiled or prediction).time
    dtype = prediction.step.config.model.compute_dtype
    done = f"{work.flops / 1e12:.3f} TFLOP and {work.memory_bytes / 2**30:.2f} GiB of memory traffic per step and device"
    if time is None:
        return f"{done}; no public rate of {accelerator.name} for {dtype}, so no step time is predicted"
    least = "" if compiled else " of the least traffic"
    return (
        f"{done}; step time at best {time.hidden_s * 1e3:.2f} ms with all communication{least} hidden, {time.exposed_s * 1e3:.2f} ms"
        f" with none: {time.compute_s * 1e3:.2f} ms computing, {time.inside_s * 1e3:.2f} on links inside, {time.across_s * 1e3:.2f} across hosts"
    )


def fit_text(total_bytes: int, limit_bytes: int, name: str) -> str:
    """Whether it fits, and by how much it does not."""
    if total_bytes <= limit_bytes:
        return f"fits: {mib(total_bytes)} of the {mib(limit_bytes)} of {name}"
    return f"does NOT fit: {mib(total_bytes)}, {mib(total_bytes - limit_bytes)} more than the {mib(limit_bytes)} of {name}"


def found_text(found: Found) -> str:
    time, memory = found.prediction.time, found.prediction.memory.total
    speed = "unknown step time" if time is None else f"{time.hidden_s * 1e3:.2f} to {time.exposed_s * 1e3:.2f} ms"
    hosts = f" on {found.num_hosts} hosts" if found.num_hosts > 1 else ""
    return f"{found.num_devices} devices{hosts}: {found.options}: {speed}, {mib(memory)}"


def print_compiled(console: Console, compiled: Compiled) -> None:
    console.print(traffic_table(compiled.traffic))
    console.print(bounds_table(compiled))
    for line in compiled.warnings:
        console.print(f"warning: {line}", highlight=False, markup=False)
    if compiled.traffic.unknown_loops:
        console.print(f"loops of unknown length, counted once: {', '.join(compiled.traffic.unknown_loops)}", highlight=False)


def to_json(prediction: Prediction, compiled: Compiled | None) -> dict:
    """Memory, collectives, bounds, FLOPs and times of a step, per device."""
    memory, time = prediction.memory, (compiled or prediction).time
    found = {
        "memory": {f.name: getattr(memory, f.name) for f in fields(Memory)} | {"total": memory.total},
        "flops": prediction.work.flops,
        "step_time_s": None if time is None else {"hidden": time.hidden_s, "exposed": time.exposed_s},
    }
    if compiled is not None:
        found["memory"]["compiled"] = compiled.total_bytes
        found["traffic"] = {
            "gathered_bytes": compiled.traffic.gathered_bytes,
            "reduced_bytes": compiled.traffic.reduced_bytes,
            "received_bytes": compiled.traffic.received_bytes,
            "across_bytes": compiled.traffic.across_bytes,
            "collectives": [
                {f.name: getattr(c, f.name) for f in fields(c)} | {"payload_bytes": c.payload_bytes}
                for c in compiled.traffic.collectives
            ],
        }
        found["bounds"] = {
            p.name: {
                "least": p.bound_bytes, "program": p.received_bytes, "across_least": p.across_bound_bytes, "across_program": p.across_bytes
            }
            for p in compiled.purposes
        }  # fmt: skip
        found["warnings"] = compiled.warnings
    return found

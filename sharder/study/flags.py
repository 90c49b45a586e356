"""`sharder study flags`: named sets of XLA's flags on the same work, each in fresh processes, taken in turn.

Only flags that the installed XLA knows are tried, and only those of the platform: what it does not know would end the process.
"""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from sharder.config import UserError
from sharder.study.points import has_accelerator, run_json, spread, write_json

SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpu": {
        "default": (),
        "latency hiding": ("--xla_gpu_enable_latency_hiding_scheduler=true",),
        "pipelined collectives": (
            "--xla_gpu_enable_latency_hiding_scheduler=true", "--xla_gpu_enable_pipelined_all_gather=true",
            "--xla_gpu_enable_pipelined_reduce_scatter=true", "--xla_gpu_enable_pipelined_all_reduce=true",
        ),
        "combine thresholds": (
            "--xla_gpu_all_gather_combine_threshold_bytes=134217728", "--xla_gpu_reduce_scatter_combine_threshold_bytes=134217728",
            "--xla_gpu_all_reduce_combine_threshold_bytes=134217728",
        ),
        "triton matrix products": ("--xla_gpu_triton_gemm_any=true",),
    },
    "cpu": {
        "default": (),
        "concurrent scheduler": ("--xla_cpu_enable_concurrency_optimized_scheduler=true",),
        "fast minimum and maximum": ("--xla_cpu_enable_fast_min_max=true",),
        "narrow vectors": ("--xla_cpu_prefer_vector_width=256",),
    },
}  # fmt: skip
"""By platform and name. What they do: openxla.org/xla, "XLA flags guidance"."""


def knows(flags: tuple[str, ...]) -> bool:
    """Whether the installed XLA starts with these flags."""
    code = "import jax; jax.devices()"
    environment = dict(os.environ) | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 0


def study_flags(recipe: str, repeats: int, steps: int, out: Path | None, options: list[str]) -> dict:
    """Step times of every set and its gain over the default; the sets that were left out, too. Raises UserError for bad counts."""
    if repeats < 1:
        raise UserError(f"--repeats is {repeats}, but must be at least 1.")
    platform = "gpu" if has_accelerator() else "cpu"
    known = {name: flags for name, flags in SETS[platform].items() if not flags or knows(flags)}
    times: dict[str, list[float]] = {name: [] for name in known}
    arguments = ["profile", recipe, "--steps", str(steps), "--json", *options]
    if platform == "cpu" and not any(o.startswith("--cluster.cpu-devices") for o in options):
        arguments += ["--cluster.cpu-devices", "1"]
    for _ in range(repeats):
        for name, flags in known.items():
            inherited = os.environ.get("XLA_FLAGS", "")
            last = run_json(arguments, extra={"XLA_FLAGS": " ".join([inherited, *flags]).strip()})
            times[name].append(last["step_time_s"])
    # Of the same round, so that what slows the whole machine for a while slows both.
    gains = {name: [base / t - 1 for base, t in zip(times["default"], values)] for name, values in times.items()}
    found = {
        "recipe": recipe, "platform": platform, "devices": last["devices"], "versions": last["versions"], "repeats": repeats, "steps": steps,
        "sets": {n: {"flags": known[n], "step_time_s": asdict(spread(times[n])), "gain": asdict(spread(gains[n]))} for n in known},
        "unknown_to_this_xla": {name: flags for name, flags in SETS[platform].items() if name not in known},
    }  # fmt: skip
    if out is not None:
        write_json(out / "flags.json", found)
    return found


def show(found: dict, console: Console) -> None:
    table = Table(
        title=f"flags of XLA, {found['recipe']} on {found['devices']['count']} x {found['devices']['kind']}, {found['repeats']} x fresh processes",
        box=box.SIMPLE,
    )
    for heading, justify in (("set", "left"), ("step, ms", "right"), ("gain", "right"), ("flags", "left")):
        table.add_column(heading, justify=justify, overflow="fold")
    for name, s in found["sets"].items():
        t, g = s["step_time_s"], s["gain"]
        gain = "-" if not s["flags"] else f"{g['median']:+.1%} ({g['low']:+.1%} to {g['high']:+.1%})"
        table.add_row(
            name, f"{t['median'] * 1e3:.1f} ({t['low'] * 1e3:.1f} to {t['high'] * 1e3:.1f})", gain, " ".join(s["flags"])
        )
    console.print(table)
    for name, flags in found["unknown_to_this_xla"].items():
        console.print(f"{name} was left out: this XLA does not know {' '.join(flags)}", highlight=False)

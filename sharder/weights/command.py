"""`sharder weights ...`: what the command line calls."""

import dataclasses
import json as jsonlib
import sys
from pathlib import Path
from typing import Literal

import tyro

from sharder.config import ClusterConfig, UserError
from sharder.options import parse


def check(arguments: list[str]) -> int:
    """Compare our model with recorded outputs of the original: exit 0 within the tolerances, else 1."""

    def command(golden: tyro.conf.Positional[Path], json: bool = False, compute_dtype: str | None = None) -> tuple:
        """
        Args:
            golden: NAME.npz with NAME.json beside it.
            json: Print every quantity as JSON.
            compute_dtype: float32 or bfloat16; unset: that of the recording.
        """
        return golden, json, compute_dtype

    path, as_json, dtype = parse(command, args=arguments, prog="sharder weights check", description=check.__doc__)
    if dtype not in (None, "float32", "bfloat16"):
        raise UserError(f"--compute-dtype is {dtype!r}, but must be float32 or bfloat16.")
    from sharder.weights.golden import compare, describe, read, unknown

    case = read(path, dtype)
    rows, left = compare(case), unknown(case)
    if left:
        print(f"not compared, since unknown here: {', '.join(left)}", file=sys.stderr)
    ok = all(row.ok for row in rows)
    print(
        jsonlib.dumps({"ok": ok, "quantities": {row.name: dataclasses.asdict(row) for row in rows}})
        if as_json
        else describe(rows)
    )
    return 0 if ok else 1


def import_(arguments: list[str]) -> int:
    """Read a checkpoint of openpi (with or without LoRA) or LeRobot, pi0 or pi0.5, and write it as weights of ours."""

    def command(
        path: tyro.conf.Positional[Path], out: Path, param_dtype: str | None = None, cpu_devices: int | None = None
    ) -> tuple:
        """
        Args:
            path: Folder of a checkpoint, or of its params; LeRobot's has model.safetensors.
            out: New folder.
            param_dtype: float32 or bfloat16; unset: that of the file.
            cpu_devices: Simulate this many devices, over which the weights are divided.
        """
        return path, out, param_dtype, cpu_devices

    path, out, dtype, devices = parse(command, args=arguments, prog="sharder weights import", description=import_.__doc__)
    from sharder import cluster

    cluster.initialize(ClusterConfig(cpu_devices=devices))
    from sharder.weights.convert import import_weights

    print(import_weights(path, out, dtype))
    return 0


def export(arguments: list[str]) -> int:
    """Write a run, a checkpoint or imported weights as openpi or LeRobot restores them."""

    def command(
        path: tyro.conf.Positional[Path],
        out: Path,
        format: Literal["openpi", "lerobot"] = "openpi",
        merge_lora: bool = True,
        value: bool = True,
        average: bool = False,
        asset_id: str | None = None,
        cpu_devices: int | None = None,
    ) -> tuple:
        """
        Args:
            path: A run (its latest checkpoint), one of its checkpoints, or imported weights.
            out: New folder.
            format: openpi: its tree, in params; lerobot: model.safetensors.
            merge_lora: Add low-rank additions to the weights, so that the tree is that of the plain model.
            value: End every path with `value`, as openpi's trainer does; of openpi's tree only.
            asset_id: Folder below OUT/assets for norm_stats.json, as openpi's config calls it; unset: as it lies.
            average: Write the moving average of the parameters, as openpi's trainer does where it keeps one.
            cpu_devices: Simulate this many devices, over which the weights are divided.
        """
        return path, out, format, merge_lora, value, average, asset_id, cpu_devices

    path, out, format_, merge, value, average, asset_id, devices = parse(
        command, args=arguments, prog="sharder weights export", description=export.__doc__
    )
    from sharder import cluster

    cluster.initialize(ClusterConfig(cpu_devices=devices))
    from sharder.weights.convert import export_weights

    print(export_weights(path, out, format=format_, merge_lora=merge, value=value, average=average, asset_id=asset_id))
    return 0


COMMANDS = {"import": import_, "export": export, "check": check}


def run(arguments: list[str]) -> int:
    """Raises UserError where there is no such command."""
    rows = "\n".join(
        f"  sharder weights {name:8} {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()
    )
    rows += "\nLlama: sharder weights import FOLDER RECIPE --run-dir DIR, sharder weights export RUN FOLDER"
    if not arguments:
        raise UserError(f"import, export or check is missing:\n{rows}")
    if arguments[0] in ("-h", "--help"):
        print(rows)
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        raise UserError(f"there is no command weights {name!r}:\n{rows}")
    # Weights of pi0 go to a folder of weights, Llama's to a run.
    if name != "check" and not any(a.split("=")[0] in ("--out", "-h", "--help") for a in rest):
        from sharder.weights import llama

        return {"import": llama.import_, "export": llama.export}[name](rest)
    return COMMANDS[name](rest)

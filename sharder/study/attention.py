"""`sharder study attention`: time and scratch memory of every backend over the length of the sequence, forward and backward.

Every point is a process of its own: `python -m sharder.study.attention_point`. The exponent is that of the line through the
logarithms of the longer half of the lengths: 2 where all pairs are computed, 1 for memory that only grows with the tokens.
"""

import json
import math
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from sharder.config import UserError
from sharder.report import plots
from sharder.study.points import run_json, spread, write_json

BACKENDS = ("reference", "xla", "chunked", "cudnn")


def fitted_exponent(lengths: list[int], values: list[float]) -> float | None:
    """Slope of log(value) over log(length), of the longer half; None below two points."""
    half = [(math.log(t), math.log(v)) for t, v in zip(lengths, values) if v > 0]
    half = half[-max(2, len(half) // 2 + 1) :]
    if len(half) < 2:
        return None
    mean_x, mean_y = (sum(p[i] for p in half) / len(half) for i in (0, 1))
    return sum((x - mean_x) * (y - mean_y) for x, y in half) / sum((x - mean_x) ** 2 for x, _ in half)


def study_attention(
    backends: list[str], lengths: list[int], heads: tuple[int, int, int], batch: int, repeats: int, out: Path | None
) -> dict:
    """`heads`: query heads, key-value heads, head dimension. Raises UserError for bad numbers, and where no backend serves."""
    unknown = [b for b in backends if b not in BACKENDS]
    if unknown or not backends:
        raise UserError(f"--backends has {', '.join(unknown) or 'nothing'}, but must be of {', '.join(BACKENDS)}.")
    if min(*lengths, *heads, batch, repeats) < 1:
        raise UserError("lengths, heads, --batch and --repeats must be at least 1.")
    series: dict[str, list[dict]] = {}
    refused: dict[str, str] = {}
    for backend in backends:
        for length in lengths:
            asked = {"backend": backend, "length": length, "heads": heads, "batch": batch, "repeats": repeats}
            point = run_json([json.dumps(asked)], module="sharder.study.attention_point")
            if "refused" in point:
                refused[backend] = point["refused"]
                break
            machine = point["machine"]
            series.setdefault(backend, []).append(
                {"length": length, "forward_s": asdict(spread(point["forward_s"])), "backward_s": asdict(spread(point["backward_s"])),
                 "forward_scratch_bytes": point["forward_scratch_bytes"], "backward_scratch_bytes": point["backward_scratch_bytes"]}
            )  # fmt: skip
    if not series:
        raise UserError("no backend serves: " + "; ".join(f"{backend}: {why}" for backend, why in refused.items()))
    exponents = {
        backend: {
            "forward_s": fitted_exponent(lengths, [p["forward_s"]["median"] for p in points]),
            "backward_s": fitted_exponent(lengths, [p["backward_s"]["median"] for p in points]),
            "backward_scratch_bytes": fitted_exponent(lengths, [p["backward_scratch_bytes"] for p in points]),
        }
        for backend, points in series.items()
    }
    found = {
        "heads": heads,
        "batch": batch,
        "repeats": repeats,
        "machine": machine,
        "points": series,
        "exponents": exponents,
        "left_out": refused,
    }
    if out is not None:
        write_json(out / "attention.json", found)
        for name, svg in figures(found).items():
            (out / f"{name}.svg").write_text(svg)
    return found


def figures(found: dict) -> dict[str, str]:
    of = lambda value: {b: ([p["length"] for p in points], [value(p) for p in points]) for b, points in found["points"].items()}  # noqa: E731
    seconds, mib = of(lambda p: p["backward_s"]["median"]), of(lambda p: max(p["backward_scratch_bytes"], 1) / 2**20)
    return {
        "attention_time": plots.lines(
            "attention time", seconds, "forward and backward, s", log=True, xlabel="positions", mark=True
        ),
        "attention_memory": plots.lines("attention memory", mib, "scratch, MiB", log=True, xlabel="positions", mark=True),
    }


def show(found: dict, console: Console) -> None:
    machine = found["machine"]
    table = Table(
        title=f"attention, batch {found['batch']}, heads {found['heads']}, {machine['dtype']} on {machine['kind']}",
        box=box.SIMPLE,
    )
    for heading in ("backend", "positions", "forward, ms", "with backward, ms", "scratch, MiB", "of backward"):
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for backend, points in found["points"].items():
        for p in points:
            f, b = p["forward_s"], p["backward_s"]
            table.add_row(backend, str(p["length"]), f"{f['median'] * 1e3:.2f}", f"{b['median'] * 1e3:.2f} ({b['low'] * 1e3:.2f} to {b['high'] * 1e3:.2f})",
                          f"{p['forward_scratch_bytes'] / 2**20:.1f}", f"{p['backward_scratch_bytes'] / 2**20:.1f}")  # fmt: skip
    console.print(table)
    for backend, e in found["exponents"].items():
        text = {k: "-" if v is None else f"{v:.2f}" for k, v in e.items()}
        console.print(
            f"{backend}: time grows as length^{text['backward_s']} forward and backward, scratch as length^{text['backward_scratch_bytes']}",
            highlight=False,
        )
    for backend, reason in found["left_out"].items():
        console.print(f"{backend} was left out: {reason}", highlight=False)

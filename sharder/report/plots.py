"""Figures of a report as SVG text, drawn from recorded numbers only."""

import io
import re
from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from sharder.report.timeline import Timeline

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""By label: x and y."""

COLORS = ("#2c6fbb", "#d1682f", "#3f8f4f", "#8a5aa8", "#b03a48", "#7a6a4f", "#c069a0", "#5b6770")
SPANS = {"starting": "#e0b04b", "stepping": "#3f8f4f", "down": "#b03a48"}
SIZE = (5.2, 2.7)
"""Inches: narrow, so that its letters can still be read on a phone."""
STYLE = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#e4e4e4", "axes.axisbelow": True, "figure.facecolor": "none", "axes.facecolor": "none",
    "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip


def _svg(figure: Figure, name: str) -> str:
    """Text that can stand inside a page: scales with it, and shares no identifier with another figure."""
    out = io.StringIO()
    with rc_context(STYLE | {"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None}, bbox_inches="tight")
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", text, count=1)
    text = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", text, count=1)
    prefix = re.sub(r"\W", "_", name)
    text = re.sub(r'id="([^"]+)"', rf'id="{prefix}_\1"', text)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}_", text).replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)


def _axes(size: tuple[float, float] = SIZE):
    figure = Figure(figsize=size)
    return figure, figure.subplots()


def lines(name: str, series: Series, ylabel: str, log: bool = False, xlabel: str = "step", mark: bool = False) -> str:
    """Curves over steps."""
    with rc_context(STYLE):
        figure, axes = _axes()
        for color, (label, (x, y)) in zip(COLORS * 4, series.items()):
            axes.plot(x, y, color=color, label=label, linewidth=1.3, marker="o" if mark or len(x) < 3 else None, markersize=3)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        if log:
            axes.set_yscale("log")
        if len(series) > 1:
            axes.legend()
    return _svg(figure, name)


def bars(name: str, values: Mapping[str, float], xlabel: str) -> str:
    """Horizontal bars with their values, the first on top; shares in percent."""
    with rc_context(STYLE):
        figure, axes = _axes((SIZE[0], 0.6 + 0.22 * len(values)))
        places = range(len(values))
        axes.barh(places, [100 * v for v in values.values()], color=COLORS[0])
        for place, value in zip(places, values.values()):
            axes.text(100 * value, place, f" {value:.1%}", va="center", fontsize=8)
        axes.set_yticks(places, values)
        axes.invert_yaxis()
        axes.set(xlabel=xlabel, xlim=(0, max(1.0, 115 * max(values.values(), default=0.0))))
        axes.grid(axis="y", visible=False)
    return _svg(figure, name)


def stacked(name: str, rows: Mapping[str, Mapping[str, float]], xlabel: str) -> str:
    """One horizontal bar for each row, divided into the same parts."""
    with rc_context(STYLE):
        figure, axes = _axes((SIZE[0], 1.2 + 0.3 * len(rows)))
        parts = [p for p in next(iter(rows.values())) if any(row[p] for row in rows.values())]
        left = [0.0] * len(rows)
        for color, part in zip(COLORS * 4, parts):
            widths = [row[part] for row in rows.values()]
            axes.barh(range(len(rows)), widths, left=left, color=color, label=part)
            left = [a + b for a, b in zip(left, widths)]
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set(xlabel=xlabel)
        axes.grid(axis="y", visible=False)
        axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return _svg(figure, name)


def timeline(name: str, found: Timeline) -> str:
    """Attempts one below the other; faults are crosses, stops are bars."""
    with rc_context(STYLE):
        attempts = sorted({s.attempt for s in found.spans})
        figure, axes = _axes((SIZE[0] * 1.6, 1.1 + 0.35 * len(attempts)))
        for kind, color in SPANS.items():
            spans = [s for s in found.spans if s.kind == kind]
            heights = [attempts.index(s.attempt) for s in spans]
            axes.barh(
                heights,
                [s.end_s - s.start_s for s in spans],
                left=[s.start_s for s in spans],
                color=color,
                label=kind,
                height=0.6,
            )
        for is_fault, marker, label in ((True, "X", "fault"), (False, "|", "stop")):
            times = [m.time_s for m in found.marks if m.is_fault == is_fault]
            if times:
                axes.plot(
                    times,
                    [_attempt_at(found, attempts, t) for t in times],
                    marker,
                    color="black",
                    markersize=9,
                    label=label,
                    linestyle="none",
                )
        axes.set_yticks(range(len(attempts)), [f"attempt {a}" for a in attempts])
        axes.invert_yaxis()
        axes.set(xlabel="seconds since the run began")
        axes.grid(axis="y", visible=False)
        axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return _svg(figure, name)


def _attempt_at(found: Timeline, attempts: list[int], time_s: float) -> int:
    """Row of the attempt that runs at a moment, or did last."""
    before = [s.attempt for s in found.spans if s.start_s <= time_s]
    return attempts.index(before[-1]) if before else 0


def roofline(name: str, parts: Mapping[str, dict], peak_flops: float, bytes_per_s: float) -> str:
    """Achieved FLOP/s of every part over its intensity, below the two ceilings."""
    with rc_context(STYLE):
        figure, axes = _axes((SIZE[0], 3.4))
        shown = {n: p for n, p in parts.items() if p["intensity"] > 0 and p.get("achieved_flops")}
        intensities = [p["intensity"] for p in shown.values()] + [peak_flops / bytes_per_s]
        low, high = min(intensities) / 3, max(intensities) * 3
        ridge = peak_flops / bytes_per_s
        axes.plot([low, ridge, high], [low * bytes_per_s, peak_flops, peak_flops], color="#5b6770", linewidth=1.5)
        for color, (part, p) in zip(COLORS * 4, shown.items()):
            axes.plot([p["intensity"]], [p["achieved_flops"]], "o", color=color, label=part)
        axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="FLOP/s of a device")
        axes.legend()
    return _svg(figure, name)

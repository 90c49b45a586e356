"""The same picture as `sharder.sharding.grid` as a file: grid of devices, parts of a parameter and of the batch, bytes by strategy."""

from pathlib import Path

from sharder.config import ParallelConfig, UserError
from sharder.sharding.grid import Shard, batch_parts, find_leaf, leaf_parts, strategy_bytes
from sharder.sharding.mesh import MeshShape
from sharder.sharding.plan import Plan

FORMATS = (".svg", ".png", ".pdf")


def check_format(path: Path) -> None:
    """Raises UserError for a name that no figure can be written under."""
    if path.suffix not in FORMATS:
        raise UserError(f"--out is {path}, but must end with one of {', '.join(FORMATS)}.")


def draw(plan: Plan, parallel: ParallelConfig, slot_size: int, param: str | None, path: Path) -> None:
    """Writes the figure. Raises UserError for an unknown parameter or format, and where matplotlib is missing."""
    check_format(path)
    try:
        import matplotlib
    except ImportError:
        raise UserError("--out needs matplotlib: pip install matplotlib.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    leaf, mesh = find_leaf(plan, param), plan.mesh
    grids = {f"{leaf.path} {leaf.decl.shape}\n{layout}": held for layout, held in leaf_parts(plan, leaf).items()}
    grids[f"batch: {slot_size} examples of a slot\n"] = batch_parts(slot_size, mesh)
    height = 1.2 + 0.5 * max(mesh.num_replicas, 5)
    figure, axes = pyplot.subplots(1, len(grids) + 1, figsize=(4.5 * len(grids) + 7, height), layout="constrained")
    for ax, (title, held) in zip(axes, grids.items()):
        _draw_grid(ax, mesh, held, title)
    _draw_bars(axes[-1], strategy_bytes(plan, parallel))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _draw_grid(ax, mesh: MeshShape, held: list[Shard], title: str) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    for number, shard in enumerate(held):
        colour = colormaps["tab20"](number % 20)
        for device in shard.devices:
            row, column = divmod(device, mesh.tensor)
            ax.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="black", alpha=0.6))
            ax.text(column + 0.5, row + 0.5, f"{device}  {shard}", ha="center", va="center", fontsize=7)
    ax.set(title=title, xlim=(0, mesh.tensor), ylim=(mesh.num_replicas, 0), xlabel="tensor", ylabel="data, fsdp")
    ax.set_xticks([i + 0.5 for i in range(mesh.tensor)], range(mesh.tensor))
    ax.set_yticks(
        [i + 0.5 for i in range(mesh.num_replicas)], [f"{i // mesh.fsdp}, {i % mesh.fsdp}" for i in range(mesh.num_replicas)]
    )


def _draw_bars(ax, amounts: dict[str, int]) -> None:
    bars = ax.barh(list(amounts), list(amounts.values()))
    ax.bar_label(bars, [f"{amount:,}" for amount in amounts.values()], padding=3, fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.25)
    ax.set(title="parameters by strategy", xlabel="bytes on a device")

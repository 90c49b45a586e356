"""Whether reading and copying to the device overlap with the step: a loader slowed down to 80 % of a step hides behind it.

Prints one JSON line for each figure. Blocks of steps with the usual and with a slow dataset take turns in one process;
at the end comes a control, which reads the slow dataset between the steps.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import numpy as np
from lines import OPTIONS, QUICK, Pieces, gather_facts, print_figure, resolve, run_part, serve_part

SLOWNESS = 0.8
"""Reading time as a fraction of the step's."""
WARM_UP = 3
"""Steps of a block that are not counted: its prefetch queue starts empty."""


@dataclass(frozen=True)
class Slow:
    """A dataset whose reads take at least `read_s`, as if they waited for a disk."""

    dataset: object
    read_s: float

    def read(self, ids: np.ndarray) -> dict:
        until = time.perf_counter() + self.read_s
        batch = self.dataset.read(ids)
        time.sleep(max(0.0, until - time.perf_counter()))
        return batch


class Inline:
    """A loader that reads when the devices have nothing to do: the control, without any overlap."""

    def __init__(self, pieces: Pieces, dataset):
        self.pieces, self.dataset, self.wait_s = pieces, dataset, 0.0

    def __next__(self) -> dict:
        import jax

        from sharder.data.loader import read_step

        jax.block_until_ready(self.pieces.state)
        started, layout = time.perf_counter(), self.pieces.layout
        batch = layout.to_devices(read_step(self.dataset, self.pieces.order, layout, self.pieces.step))
        self.wait_s = time.perf_counter() - started
        return batch

    def close(self) -> None:
        pass


def overlap(config: dict, num_rounds: int, num_steps: int) -> dict:
    """Records of every way to load, a list for each round: {"usual": [[record, ...], ...], "slow": ..., "control": ...}."""
    from sharder.data.loader import open_loader

    pieces, taken = Pieces(config), defaultdict(list)

    def prefetched(dataset):
        return open_loader(dataset, pieces.order, pieces.layout, pieces.step, config["data"]["prefetch"])

    def block(way: str, loader) -> None:
        taken[way].append(pieces.take_steps(loader, WARM_UP + num_steps)[WARM_UP:])
        loader.close()

    for _ in range(num_rounds):
        block("usual", prefetched(pieces.dataset))
        slow = Slow(pieces.dataset, SLOWNESS * median(taken["usual"][-1:], "step_time_s"))
        block("slow", prefetched(slow))
    block("control", Inline(pieces, slow))
    return taken


def median(rounds: list[list[dict]], key: str) -> float:
    """Over all steps of these rounds."""
    return statistics.median(record[key] for records in rounds for record in records)


def growth(before: list[list[dict]], after: list[list[dict]]) -> float:
    """Percent by which the median step of a round grew; the median over the rounds, so that a drift cancels out."""
    pairs = zip(before, after, strict=True)
    return statistics.median(100 * (median([b], "step_time_s") / median([a], "step_time_s") - 1) for a, b in pairs)


PARTS = {"overlap": overlap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model and few steps, to see that everything works")
    given = parser.parse_args()
    num_rounds, num_steps = (2, 4) if given.quick else (5, 10)
    with tempfile.TemporaryDirectory(prefix="bench-loader-") as folder:
        options = OPTIONS + (QUICK if given.quick else ())
        config = resolve((*options, "--cluster.compile-cache", folder))
        show = partial(print_figure, "loader", facts=gather_facts(config))
        taken = run_part(__file__, "overlap", config=config, num_rounds=num_rounds, num_steps=num_steps)
    usual, slow, control = taken["usual"], taken["slow"], taken["control"]
    how = f"median of {num_rounds} rounds of {num_steps} steps after {WARM_UP}, usual and slow in turns"
    slowed = f"each read slowed down to {SLOWNESS:.0%} of the round's median usual step"
    hidden = f"growth from the usual loader to the slow one, median over the rounds: {slowed}; aim below 5"
    shown = f"control: as growth, but a slow read begins when the step before is done; near {SLOWNESS:.0%} if it is quiet"
    show("step_s", median(usual, "step_time_s"), "s", f"tiny_lm, 1 CPU device, the loader as it is; {how}")
    show("step_slow_loader_s", median(slow, "step_time_s"), "s", f"{slowed}; {how}")
    show("growth", growth(usual, slow), "%", hidden)
    show("data_wait_s", median(usual, "data_wait_s"), "s", f"wait of a step for its batch, the loader as it is; {how}")
    show("data_wait_slow_loader_s", median(slow, "data_wait_s"), "s", f"wait of a step for its batch, {slowed}; {how}")
    show("growth_without_overlap", growth(usual[-1:], control), "%", shown)


if __name__ == "__main__":
    serve_part(PARTS)
    main()

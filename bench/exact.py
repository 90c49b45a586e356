"""Exact against fast mode at equal mesh and equal accumulation: step time, bytes moved, scratch memory.

`python bench/exact.py [--recipe tiny_lm] [--devices 1,2,4,8] [--policy zero] [--rounds 9] [--quick]` prints JSON lines; each
number of devices is a process of its own. Fast mode accumulates over as many slots as exact mode runs workers on a replica, so
that both do the same work; both compute the fingerprint. Steps are timed in pairs, and the ratio is the median of the pairs'
ratios with its 95 % interval (order statistics).
"""

import argparse
import math
import os
import statistics
import time

from lines import OPTIONS, QUICK, Pieces, gather_facts, print_figure, resolve, run_part, serve_part

# gpt is small enough for two cores with short sequences, and few of them.
RECIPES = {
    "tiny_lm": (),
    "gpt": ("--data.seq-len", "64", "--train.global-batch-size", "8", "--model.padded-vocab-size", "50432"),
}


def in_mode(config: dict, reduction: str, devices: int) -> dict:
    """The configuration in one of the modes, over as many slots as the other."""
    batch, workers = config["train"]["global_batch_size"], config["parallel"]["virtual_workers"]
    return {
        **config,
        "cluster": {**config["cluster"], "cpu_devices": devices},
        "parallel": {**config["parallel"], "reduction": reduction},
        "train": {**config["train"], "microbatch_size": None if reduction == "exact" else batch // workers},
    }


def compare_modes(config: dict, devices: int, rounds: int) -> dict:
    """Seconds per step of both modes, and of exact mode without its reduction, taken in turn; the first round is not counted."""
    pieces = {mode: Pieces(in_mode(config, mode, devices)) for mode in ("fast", "exact")}
    batches = {mode: p.setup.train_batch.to_devices(p.read(0)) for mode, p in pieces.items()}
    slots = pieces["exact"].stepper.train_step.slots
    reduce, kept = slots._reduce, None

    def timed(mode: str) -> float:
        import jax

        p, started = pieces[mode], time.perf_counter()
        p.state, metrics = p.stepper.train_step(*p.stepper.arguments(p.state, batches[mode], False))
        jax.block_until_ready((p.state, metrics))
        return time.perf_counter() - started

    times: dict[str, list[float]] = {"fast": [], "exact": [], "unreduced": []}
    for number in range(rounds + 1):
        for mode in ("fast", "exact"):
            times[mode] += [timed(mode)][: number and 1]
        if devices > 1:
            # The sums of another step: the workers run, and nothing waits for their gradients to be added up.
            kept = kept or _sums_of_a_slot(pieces["exact"], batches["exact"])
            slots._reduce = lambda stacked: _copied(kept)
            times["unreduced"] += [timed("exact")][: number and 1]
            slots._reduce = reduce
    return times | {"moved": _moved_bytes(pieces["exact"]), "scratch": {m: _scratch_bytes(p) for m, p in pieces.items()}}


def _sums_of_a_slot(pieces: Pieces, batch: list) -> dict:
    step = pieces.stepper.train_step
    return step.slots(step.slots.begin(pieces.state, pieces.stepper.seed), batch[0], 0)[0]


def _copied(tree):
    import jax

    # The accumulator donates what it adds up.
    return jax.tree.map(lambda x: jax.device_put(x, may_alias=False), tree)


def _moved_bytes(pieces: Pieces) -> dict:
    """Bytes that a device sends in the ordered sums of a step, and those of a ring reduce-scatter of as many gradients."""
    from sharder.instrument.collectives import read_traffic

    step, shape = pieces.stepper.train_step, pieces.setup.plan.mesh
    n, num_slots = shape.num_replicas, pieces.layout.num_slots
    if n == 1:
        return {"exact": 0, "bound": 0}
    mesh = {"data": shape.data, "fsdp": shape.fsdp, "tensor": shape.tensor}
    text = step.programs["reduce"].as_text()
    gradient = 4 * pieces.setup.declared.num_params
    return {
        "exact": num_slots * read_traffic(text, mesh, [0] * shape.num_devices).received_bytes,
        "bound": num_slots * gradient * (n - 1) / n,
    }


def _scratch_bytes(pieces: Pieces) -> int:
    """What a step holds on a device at once beside the state: of exact mode by the formula of its programs."""
    step = pieces.stepper.train_step
    if not hasattr(step, "programs"):
        return step.memory_analysis().temp_size_in_bytes
    of = {name: program.memory_analysis() for name, program in step.programs.items()}
    size = lambda name, what: getattr(of[name], f"{what}_size_in_bytes") if name in of else 0  # noqa: E731
    accumulators = math.log2(pieces.layout.num_slots) + 1
    worker = size("worker", "temp") + 2 * size("worker", "output")
    return int(size("gather", "output") + worker + size("reduce", "temp") + accumulators * size("reduce", "output"))


def median_interval(values: list[float]) -> tuple[float, float]:
    """The order statistics between which the median lies with a probability of at least 95 %; all values where they are few."""
    n, ordered = len(values), sorted(values)
    # P(fewer than k of n values lie below the median), a fair coin each.
    below = lambda k: sum(math.comb(n, i) for i in range(k)) / 2**n  # noqa: E731
    k = max((k for k in range(1, n // 2 + 1) if below(k) <= 0.025), default=1)
    return ordered[k - 1], ordered[n - k]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=RECIPES, default="tiny_lm")
    parser.add_argument("--devices", default="1,2,4,8")
    parser.add_argument("--policy", default="zero")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    parallel = ("--parallel.policy", options.policy)
    config = resolve((*OPTIONS, *parallel, *RECIPES[options.recipe], *(QUICK if options.quick else ())), options.recipe)
    facts = gather_facts(config)
    for devices in map(int, options.devices.split(",")):
        found = run_part(__file__, "modes", config=config, devices=devices, rounds=options.rounds)
        ratios = [e / f for e, f in zip(found["exact"], found["fast"])]
        low, high = median_interval(ratios)
        figures = {f"step_time_{mode}": (statistics.median(found[mode]), "s") for mode in ("fast", "exact")}
        figures |= {
            f"ratio{name}": (v, "exact / fast") for name, v in (("", statistics.median(ratios)), ("_low", low), ("_high", high))
        }
        figures["scratch_ratio"] = found["scratch"]["exact"] / found["scratch"]["fast"], "exact / fast"
        if devices > 1:
            exposed = [e - u for e, u in zip(found["exact"], found["unreduced"])]
            figures["exposed_reduction"] = statistics.median(exposed), "s"
            figures["moved_ratio"] = found["moved"]["exact"] / found["moved"]["bound"], "exact / ring reduce-scatter"
        how = f"{options.policy}, {devices} simulated devices on {os.cpu_count()} cores, {options.rounds} pairs in one process"
        for figure, (value, unit) in figures.items():
            print_figure("exact", f"{options.recipe}_{figure}_{devices}", value, unit, how, facts)


if __name__ == "__main__":
    serve_part({"modes": compare_modes})
    main()

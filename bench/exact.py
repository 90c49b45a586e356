"""Exact against fast mode: step time at equal mesh and equal accumulation, in pairs in one process.

`python bench/exact.py [--devices 1,2,4,8] [--policy zero] [--rounds 9] [--quick]` prints JSON lines; each number of devices is a
process of its own. Fast mode accumulates over as many slots as exact mode runs workers on a replica, so that both do the
same work; both compute the fingerprint.
"""

import argparse
import os
import statistics
import time

from lines import OPTIONS, QUICK, Pieces, gather_facts, print_figure, resolve, run_part, serve_part


def in_mode(config: dict, reduction: str, devices: int) -> dict:
    """The configuration in one of the modes, over as many slots as the other."""
    batch, workers = config["train"]["global_batch_size"], config["parallel"]["virtual_workers"]
    return {
        **config,
        "cluster": {**config["cluster"], "cpu_devices": devices},
        "parallel": {**config["parallel"], "reduction": reduction},
        "train": {**config["train"], "microbatch_size": None if reduction == "exact" else batch // workers},
    }


def paired_steps(config: dict, devices: int, rounds: int) -> dict:
    """Seconds per step of both modes, taken in turn; the first pair is not counted."""
    import jax

    times: dict[str, list[float]] = {"fast": [], "exact": []}
    pieces = {mode: Pieces(in_mode(config, mode, devices)) for mode in times}
    batches = {mode: p.setup.train_batch.to_devices(p.read(0)) for mode, p in pieces.items()}
    for number in range(rounds + 1):
        for mode, p in pieces.items():
            started = time.perf_counter()
            p.state, metrics = p.stepper.train_step(*p.stepper.arguments(p.state, batches[mode], False))
            jax.block_until_ready((p.state, metrics))
            if number:
                times[mode].append(time.perf_counter() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="1,2,4,8")
    parser.add_argument("--policy", default="zero")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    config = resolve((*OPTIONS, "--parallel.policy", options.policy, *(QUICK if options.quick else ())))
    facts = gather_facts(config)
    for devices in map(int, options.devices.split(",")):
        times = run_part(__file__, "pairs", config=config, devices=devices, rounds=options.rounds)
        ratios = sorted(e / f for e, f in zip(times["exact"], times["fast"]))
        how = f"{options.policy}, {devices} simulated devices on {os.cpu_count()} cores, {options.rounds} pairs in one process"
        found = {f"step_time_{mode}": (statistics.median(times[mode]), "s") for mode in times}
        found["ratio"] = statistics.median(ratios), "exact / fast"
        found["ratio_first_quartile"] = ratios[len(ratios) // 4], "exact / fast"
        found["ratio_third_quartile"] = ratios[-1 - len(ratios) // 4], "exact / fast"
        for figure, (value, unit) in found.items():
            print_figure("exact", f"{figure}_{devices}", value, unit, how, facts)


if __name__ == "__main__":
    serve_part({"pairs": paired_steps})
    main()

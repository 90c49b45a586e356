"""Exact against fast mode: step time at equal mesh and equal accumulation, paired in one process.

`python bench/exact.py [--devices 1,2,4,8] [--rounds 9] [--quick]` prints JSON lines; each number of devices is a process of
its own. Fast mode accumulates over as many slots as exact mode has workers on a replica, so that both do the same work.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time

from lines import print_figure


def set_up(config, reduction, num_slots):
    """The compiled step of a mode with its state and one batch, ready to be called again and again."""
    import numpy as np

    from sharder.data.loader import read_step
    from sharder.data.open import open_datasets
    from sharder.data.order import Order
    from sharder.train.exact import ExactStep
    from sharder.train.setup import prepare
    from sharder.train.state import create_state
    from sharder.train.step import compile_step
    from sharder.train.stepping import Stepper

    per_slot = config.train.global_batch_size // num_slots
    replicas = int(os.environ["BENCH_DEVICES"])
    micro = None if reduction == "exact" else per_slot // replicas
    config = dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, reduction=reduction),
        train=dataclasses.replace(config.train, microbatch_size=micro),
    )
    setup = prepare(config)
    training, _ = open_datasets(config)
    order = Order(len(training), config.train.global_batch_size, 0)
    layout = setup.workers or setup.batch
    state = create_state(config, setup.declared, setup.state_shardings)
    stepper = Stepper(setup, None, [], None)
    arguments = stepper.arguments(state, layout.abstract(training.read(np.arange(1))), False)
    step = ExactStep(setup, setup.workers, arguments) if setup.workers else compile_step(setup, arguments)
    batch = layout.to_devices(read_step(training, order, layout, 0))
    return stepper, step, state, batch


def measure(recipe, policy, rounds):
    """Paired step times of both modes in this process."""
    import jax

    from sharder.config import ClusterConfig
    from sharder.recipes import load_recipe
    from sharder import cluster

    devices = int(os.environ["BENCH_DEVICES"])
    cluster.initialize(ClusterConfig(cpu_devices=devices))
    config = load_recipe(recipe)
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, policy=policy))
    num_slots = config.parallel.virtual_workers // devices
    modes = {mode: list(set_up(config, mode, num_slots)) for mode in ("fast", "exact")}
    times = {mode: [] for mode in modes}
    for number in range(rounds + 1):
        for mode, (stepper, step, state, batch) in modes.items():
            started = time.perf_counter()
            state, metrics = step(*stepper.arguments(state, batch, False))
            jax.block_until_ready((state, metrics))
            modes[mode][2] = state
            if number:
                times[mode].append(time.perf_counter() - started)
    ratios = sorted(e / f for e, f in zip(times["exact"], times["fast"]))
    how = f"{recipe}, {policy}, {devices} simulated devices on {os.cpu_count()} cores, {num_slots} slots, {rounds} pairs"
    for mode in modes:
        print_figure("exact", f"step_time_{mode}_{recipe}_{devices}", statistics.median(times[mode]), "s", how)
    print_figure("exact", f"ratio_{recipe}_{devices}", statistics.median(ratios), "exact / fast", how)
    print_figure("exact", f"ratio_low_{recipe}_{devices}", ratios[len(ratios) // 4], "first quartile", how)
    print_figure("exact", f"ratio_high_{recipe}_{devices}", ratios[-1 - len(ratios) // 4], "third quartile", how)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="1,2,4,8")
    parser.add_argument("--recipes", default="tiny_lm")
    parser.add_argument("--policy", default="zero")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return measure(options.recipes, options.policy, options.rounds)
    for recipe in options.recipes.split(","):
        for devices in options.devices.split(","):
            command = [sys.executable, __file__, "--worker", "--recipes", recipe, "--policy", options.policy, "--rounds", str(options.rounds)]
            done = subprocess.run(command, env=os.environ | {"BENCH_DEVICES": devices}, stdout=subprocess.PIPE, text=True, check=True)
            for line in done.stdout.splitlines():
                json.loads(line)
                print(line, flush=True)


if __name__ == "__main__":
    main()

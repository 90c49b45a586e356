"""What the policies cost on simulated devices: step time and scratch memory of each, and compile time against depth.

`python bench/sharding.py [--devices 8] [--rounds 9] [--quick]` prints JSON lines. Steps of all policies are taken in turn in
one process; each depth is compiled in a process of its own, without a cache.
"""

import argparse
import os
import statistics
import time

from lines import OPTIONS, QUICK, Pieces, gather_facts, print_figure, resolve, run_part, serve_part

POLICIES = ("dp", "zero", "fsdp")


def placed(config: dict, policy: str, tensor: int, devices: int) -> dict:
    parallel = {**config["parallel"], "policy": policy, "tensor": tensor}
    return {**config, "cluster": {**config["cluster"], "cpu_devices": devices}, "parallel": parallel}


def steps_in_turn(config: dict, devices: int, rounds: int, tensors: list[int]) -> dict:
    """For each policy and degree the seconds of its steps, the first not counted, and its scratch bytes per device."""
    import jax

    pieces = {f"{p}_tensor_{t}": Pieces(placed(config, p, t, devices)) for p in POLICIES for t in tensors}
    batches = {name: p.setup.train_batch.to_devices(p.read(0)) for name, p in pieces.items()}
    seconds: dict[str, list[float]] = {name: [] for name in pieces}
    for number in range(rounds + 1):
        for name, p in pieces.items():
            started = time.perf_counter()
            p.state, metrics = p.stepper.train_step(*p.stepper.arguments(p.state, batches[name], False))
            jax.block_until_ready((p.state, metrics))
            if number:
                seconds[name].append(time.perf_counter() - started)
    scratch = {name: p.stepper.train_step.memory_analysis().temp_size_in_bytes for name, p in pieces.items()}
    return {"seconds": seconds, "scratch_bytes": scratch}


def compile_at(config: dict, devices: int, num_layers: int) -> dict:
    """Seconds to trace, lower and compile a step of fsdp at a depth."""
    config = placed(config, "fsdp", 1, devices)
    pieces = Pieces({**config, "model": {**config["model"], "num_layers": num_layers}})
    started = time.perf_counter()
    pieces.compile()
    return {"seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    config = resolve(
        (*OPTIONS, "--parallel.reduction", "fast", "--cluster.compile-cache", "off", *(QUICK if options.quick else ()))
    )
    facts = gather_facts(config)
    tensors, depths = ([1], (2, 4)) if options.quick else ([1, 2, 4], (2, 8, 32))
    rounds = 2 if options.quick else options.rounds
    found = run_part(__file__, "steps", config=config, devices=options.devices, rounds=rounds, tensors=tensors)
    where = f"{options.devices} simulated devices on {os.cpu_count()} cores"
    for name, seconds in found["seconds"].items():
        how = f"{where}, median of {len(seconds)} in turns with the others"
        print_figure("sharding", f"step_s_{name}", statistics.median(seconds), "s", how, facts)
        how = f"{where}, memory_analysis of the compiled step, per device"
        print_figure("sharding", f"scratch_bytes_{name}", found["scratch_bytes"][name], "bytes", how, facts)
    for depth in depths:
        times = [
            run_part(__file__, "compile", config=config, devices=options.devices, num_layers=depth)["seconds"] for _ in range(3)
        ]
        how = f"{where}, fsdp, trace, lower and compile, best of {len(times)} processes"
        print_figure("sharding", f"compile_s_{depth}_layers", min(times), "s", how, facts)


if __name__ == "__main__":
    serve_part({"steps": steps_in_turn, "compile": compile_at})
    main()

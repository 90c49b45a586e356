"""What a checkpoint and a RAM snapshot cost: the stall of a step, and seconds per GB of saving, restoring and verifying.

`python bench/checkpoint.py [--quick]` prints JSON lines. One CPU device: a stall is a copy within the host's memory, so it stands
beside what plain copying takes. Saves go to --folder, a disk; its cache is not emptied before a restore.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from lines import OPTIONS, QUICK, Pieces, gather_facts, print_figure, resolve, run_part, serve_part

LARGER = (
    "--model.embed-dim", "512", "--model.mlp-dim", "2048", "--model.num-layers", "8", "--model.num-heads", "8",
    "--train.global-batch-size", "8", "--parallel.reduction", "fast",
)  # fmt: skip
"""About 0.3 GB of state, so that fixed costs do not count."""
WARM_UP = 2


def costs(config: dict, folder: str, rounds: int) -> dict:
    """Seconds of steps alone and beside a save, of stalls, saves, restores and verifications, and bytes of the state."""
    import jax
    import numpy as np

    from sharder.checkpoint.restore import restore_numpy
    from sharder.checkpoint.save import Saver
    from sharder.data.loader import open_loader
    from sharder.events import EventLog, read_json_lines
    from sharder.train.attempt import Attempt
    from sharder.train.fingerprint import digests, numpy_fingerprint
    from sharder.train.saved import describe_save, restore_state
    from sharder.train.snapshot import Snapshots
    from sharder.train.state import by_path

    pieces, run_dir = Pieces(config), Path(folder)
    run_dir.mkdir()
    settings, events = pieces.setup.config.checkpoint, EventLog(run_dir, 1)
    loader = open_loader(pieces.dataset, pieces.order, pieces.layout, 0, config["data"]["prefetch"])
    saver = Saver(run_dir, settings, events)
    snapshots = Snapshots(Attempt(run_dir, 1, None, run_id=f"bench-{time.time_ns()}"), settings, events, print)
    pieces.take_steps(loader, WARM_UP)
    snapshots.prepare(by_path(pieces.state))
    seconds = {name: [] for name in ("step", "beside", "restore", "verify", "numpy", "memcpy")}
    source = np.ones(sum(x.nbytes for x in by_path(pieces.state).values()), np.uint8)
    target = np.ones_like(source)
    for _ in range(rounds):
        seconds["step"] += [r["step_time_s"] for r in pieces.take_steps(loader, 3)]
        snapshots.take(pieces.step, by_path(pieces.state), pieces.stepper.leaf_digests, seconds["step"][-1])
        began = time.perf_counter()
        np.copyto(target, source)
        seconds["memcpy"].append(time.perf_counter() - began)
        record, facts = pieces.stepper.record, pieces.stepper.facts
        manifest = describe_save(
            pieces.setup, pieces.dataset, facts.state_paths, record["fingerprint"], pieces.stepper.leaf_digests
        )
        saver.save(pieces.step, by_path(pieces.state), manifest)
        seconds["beside"] += [r["step_time_s"] for r in pieces.take_steps(loader, 1)]
        saver.wait()
        began, step = time.perf_counter(), pieces.step - 1
        state = jax.block_until_ready(restore_state(pieces.setup, run_dir, step))
        seconds["restore"].append(time.perf_counter() - began)
        began = time.perf_counter()
        jax.block_until_ready(jax.jit(digests)(by_path(state)))
        seconds["verify"].append(time.perf_counter() - began)
    began = time.perf_counter()
    numpy_fingerprint(restore_numpy(run_dir, step))
    seconds["numpy"].append(time.perf_counter() - began)
    saver.close()
    loader.close()
    snapshots.remove()
    found = read_json_lines(run_dir / "events.jsonl")[0]

    def of(kind: str, name: str) -> list[float]:
        return [e[name] for e in found if e["kind"] == kind]

    stalls = {"save_stall": of("save", "stall_s"), "snapshot_stall": of("snapshot", "stall_s"), "save": of("saved", "save_s")}
    # The first of each also imports, compiles or takes memory.
    return {"bytes": source.nbytes, "every": of("snapshot", "every")[-1]} | {
        name: statistics.median(values[1:] or values) for name, values in (seconds | stalls).items()
    }


PARTS = {"costs": costs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds, to see that everything works")
    parser.add_argument("--folder", help="where to save; unset: the folder for temporary files")
    given = parser.parse_args()
    rounds = 2 if given.quick else 5
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=given.folder) as name:
        config = resolve(
            (*OPTIONS, *(QUICK if given.quick else LARGER), "--cluster.compile-cache", str(Path(name) / "compiled"))
        )
        show = partial(print_figure, "checkpoint", facts=gather_facts(config))
        found = run_part(__file__, "costs", config=config, folder=str(Path(name) / "run"), rounds=rounds)
    size_gb, how = (
        found["bytes"] / 1e9,
        f"median of {rounds - 1} after one that does not count; {found['bytes']:,} bytes of state",
    )
    show("state_bytes", found["bytes"], "bytes", "parameters and optimizer state, as a checkpoint holds them")
    show("step_s", found["step"], "s", f"a step with nothing beside it; {how}")
    show("memcpy_s", found["memcpy"], "s", f"numpy copies as many bytes: what a stall on the CPU cannot be less than; {how}")
    show("save_stall_s", found["save_stall"], "s", f"a step waits so long for an asynchronous save; {how}")
    show("save_stall_share", 100 * found["save_stall"] / found["step"], "%", "save_stall_s / step_s")
    show("step_beside_a_save_s", found["beside"], "s", f"the step after it, while the save is written by the same cores; {how}")
    show("snapshot_stall_s", found["snapshot_stall"], "s", f"a step waits so long for a RAM snapshot; {how}")
    show("snapshot_stall_share", 100 * found["snapshot_stall"] / found["step"], "%", "snapshot_stall_s / step_s")
    show("snapshot_every", found["every"], "steps", "chosen so that snapshots take at most 1 % of the time")
    show("save_s_per_gb", found["save"] / size_gb, "s/GB", f"from the copy to a whole checkpoint; {how}")
    show("restore_s_per_gb", found["restore"] / size_gb, "s/GB", f"read from the page cache, placed and verified; {how}")
    show("verify_s_per_gb", found["verify"] / size_gb, "s/GB", f"fingerprints of all leaves on the device; {how}")
    show(
        "verify_numpy_s_per_gb",
        found["numpy"] / size_gb,
        "s/GB",
        "`sharder checkpoints --verify`: read and verified in numpy, once",
    )


if __name__ == "__main__":
    serve_part(PARTS)
    main()

"""pi0 on one accelerator, in under nine minutes and without a download: ceilings, the full AdamW step in every variant that
matters, exact against fast mode, and where the time goes.

`python bench/gpu.py [--out bench/results/gpu.json] [--budget-s 500] [--recipe pi0]` prints a table at the end. Every point is a
process of its own, so that one that does not fit ends only itself; points that the budget has no time for are named, the most
telling come first. On CPU it runs unchanged with `--recipe pi0_tiny`, which is its test. Weights are random, pictures synthetic.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

BASELINE = {"mfu": 0.321, "mfu_without_optimizer": 0.383, "fused_attention_gain": 0.093}
"""What the seed reports of one H100 at batch 4: 6ND, full AdamW; no optimizer with fused attention; its gain end to end."""
FLAG_SETS = {
    "latency hiding": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "triton matrix products": "--xla_gpu_triton_gemm_any=true",
    "no autotuning of fusions": "--xla_gpu_autotune_level=0",
}
BATCHES = (8, 16, 32, 64)


# Parts, each in a process of its own.


def config_of(
    recipe: str,
    batch: int,
    attention: str,
    remat: str,
    reduction: str = "fast",
    workers: int = 1,
    slots: int = 1,
    head_dim: int | None = None,
):
    """The recipe with bfloat16 parameters, no moving average, synthetic pictures, and what a point varies."""
    from dataclasses import replace

    from sharder.config import DataConfig
    from sharder.recipes import load_recipe

    config = load_recipe(recipe)
    model = replace(config.model, attention=attention, remat=remat, augment=False)
    if model.compute_dtype == "bfloat16":
        model = replace(model, param_dtype="bfloat16")
    if head_dim is not None:
        model = replace(model, num_heads=model.num_heads * model.head_dim // head_dim, head_dim=head_dim)
    return replace(
        config, model=model, data=DataConfig(source="synthetic", num_examples=max(64, 2 * batch), validation_fraction=0.0),
        parallel=replace(config.parallel, policy="dp", reduction=reduction, virtual_workers=workers),
        train=replace(config.train, global_batch_size=batch, microbatch_size=None if reduction == "exact" or slots == 1 else batch // slots, ema_decay=None),
    )  # fmt: skip


def facts() -> dict:
    """The device, versions, and its ceilings: as measured, beside the datasheet's."""
    import jax

    from sharder.instrument.hardware import find_accelerator
    from sharder.instrument.peak import measure_copy_rate, measure_matrix_rate

    device = jax.devices()[0]
    listed = find_accelerator(device.device_kind)
    stats = device.memory_stats() or {}
    rates = {dtype: measure_matrix_rate(dtype, 0.5) for dtype in ("bfloat16", "float32")}
    return {
        "kind": device.device_kind, "platform": device.platform, "count": jax.device_count(), "memory_bytes": stats.get("bytes_limit"),
        "jax": jax.__version__, "compiler": device.client.platform_version, "matrix_flops": rates, "copy_bytes_per_s": measure_copy_rate(0.5),
        "datasheet_flops": listed and listed.peak_flops, "datasheet_bytes_per_s": listed and listed.memory_bytes_per_s,
    }  # fmt: skip


def opened(**point):
    from sharder import cluster
    from sharder.train.profiling import open_runner

    config = config_of(**point)
    cluster.initialize(config.cluster, exact=config.parallel.reduction == "exact")
    started = time.perf_counter()
    return open_runner(config), time.perf_counter() - started


def figures(runner, times: list[float], opened_s: float) -> dict:
    import jax

    from sharder.instrument.flops import count_step, step_flops_6nd, tokens_of_example, utilisation
    from sharder.instrument.memory import measured_bytes
    from sharder.instrument.peak import matrix_ceiling

    runner.loader.close()  # a thread that still reads would bring the process down at its end
    config, seconds = runner.setup.config, statistics.median(times)
    flops, peak = count_step(config), matrix_ceiling(config.model.compute_dtype)
    tokens = config.train.global_batch_size * tokens_of_example(config.model, config.data.seq_len)
    use = lambda work: utilisation(work, seconds, peak.value, 1)  # noqa: E731
    return {
        "step_time_s": seconds, "steps_s": times, "examples_per_s": config.train.global_batch_size / seconds,
        "mfu": use(step_flops_6nd(runner.setup.declared.num_params, tokens)), "mfu_exact": use(flops.model), "hfu": use(flops.hardware),
        "peak_flops": peak.value, "peak_source": peak.source, "peak_bytes": measured_bytes(jax.devices()[0]), "opened_s": opened_s,
    }  # fmt: skip


def step(steps: int = 8, **point) -> dict:
    """The whole training step."""
    runner, opened_s = opened(**point)
    return figures(runner, runner.time_steps(steps).steps_s, opened_s)


def gradients(steps: int = 8, **point) -> dict:
    """Loss and gradients alone: no optimizer, no fingerprint."""
    import jax

    from sharder.ops.layout import SINGLE
    from sharder.train.step import accumulate

    runner, opened_s = opened(**point)
    batch, state, setup = next(runner.loader), runner.state, runner.setup
    only = jax.jit(
        lambda params, batch, seed, at: accumulate(setup.declared.graphdef, SINGLE, lambda g: g, params, batch, seed, at, 0)[:2]
    )
    times = []
    for number in range(steps + 2):
        started = time.perf_counter()
        jax.block_until_ready(only(state.params, batch, runner.stepper.seed, state.step))
        times += [time.perf_counter() - started] if number >= 2 else []
    return figures(runner, times, opened_s)


def attribution(steps: int = 5, **point) -> dict:
    """Shares by part and kind, as sharder profile finds them."""
    import tempfile

    from sharder.instrument.profile_report import to_json
    from sharder.train import profiling

    config = config_of(**point)
    from sharder import cluster

    cluster.initialize(config.cluster)
    with tempfile.TemporaryDirectory() as folder:
        found = to_json(profiling.measure(config, point["recipe"], Path(folder), steps, None))
    kept = (
        "step_time_s",
        "coverage",
        "shares",
        "kinds",
        "verdict",
        "mfu",
        "mfu_exact",
        "hfu",
        "flops",
        "flops_compiled",
        "roofline",
        "memory",
        "naive",
    )
    return {k: found[k] for k in kept}


PARTS = {"facts": facts, "step": step, "gradients": gradients, "attribution": attribution}


# The session.


class Session:
    """Runs points one after the other until its time is over, and keeps what they said."""

    def __init__(self, budget_s: float):
        self.deadline = time.monotonic() + budget_s
        self.points: dict[str, dict] = {}

    def run(self, name: str, part: str, flags: str = "", **point) -> dict | None:
        """What a part returned, kept by name; None where it failed or there was no time."""
        left = self.deadline - time.monotonic()
        if left < 20:
            self.points[name] = {"left_out": "no time left"}
            return None
        environment = dict(os.environ) | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
        command = [sys.executable, __file__, "--part", part, json.dumps(point)]
        started = time.monotonic()
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            self.points[name] = {"left_out": "no time left", **point}
            return None
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failed": reason(done.stderr)}
        self.points[name] = {**point, "flags": flags, **found, "wall_s": round(time.monotonic() - started, 1)}
        print(f"{name}: {describe(self.points[name])}", flush=True)
        return found if done.returncode == 0 else None


def reason(stderr: str) -> str:
    """The line that says why a process failed."""
    lines = [line for line in stderr.splitlines() if "RESOURCE_EXHAUSTED" in line or "Error" in line] or stderr.splitlines()[
        -1:
    ]
    return lines[-1][:300] if lines else "ended without a word"


def describe(point: dict) -> str:
    for why in ("left_out", "failed"):
        if why in point:
            return f"{why.replace('_', ' ')}: {point[why]}"
    if "step_time_s" not in point:
        return json.dumps({k: v for k, v in point.items() if not isinstance(v, dict | list)})
    percent = lambda x: "-" if x is None else f"{x:.1%}"  # noqa: E731
    memory = "" if not point.get("peak_bytes") else f", {point['peak_bytes'] / 2**30:.1f} GiB"
    return f"{point['step_time_s'] * 1e3:.1f} ms, MFU {percent(point['mfu'])} by 6ND, {percent(point['mfu_exact'])} exact, HFU {percent(point['hfu'])}{memory}"


def fastest(points: dict[str, dict]) -> dict | None:
    """The point with the highest MFU by 6ND, of the full steps."""
    done = [p for n, p in points.items() if n.startswith("step ") and p.get("mfu") is not None]
    return max(done, key=lambda p: p["mfu"]) if done else None


def measure_all(session: Session, recipe: str, batch: int, batches: tuple[int, ...]) -> None:
    """The points, the most telling first."""
    session.run("facts", "facts")
    first = dict(recipe=recipe, batch=batch)
    for attention in ("auto", "xla", "reference", "chunked"):
        session.run(f"step batch {batch}, {attention}", "step", **first, attention=attention, remat="none")
    best = fastest(session.points)
    attention = best["attention"] if best else "auto"
    for larger in batches:
        if (
            session.run(
                f"step batch {larger}, {attention}", "step", recipe=recipe, batch=larger, attention=attention, remat="none"
            )
            is None
        ):
            for remat in ("dots", "block"):
                session.run(
                    f"step batch {larger}, {attention}, remat {remat}",
                    "step",
                    recipe=recipe,
                    batch=larger,
                    attention=attention,
                    remat=remat,
                )
            break
    best = fastest(session.points) or {**first, "attention": attention, "remat": "none"}
    chosen = {k: best[k] for k in ("recipe", "batch", "attention", "remat")}
    session.run("attribution", "attribution", **chosen)
    session.run("gradients only", "gradients", **chosen)
    for workers in (1, 4):
        if chosen["batch"] % workers == 0:
            session.run(f"exact V {workers}", "step", **chosen, reduction="exact", workers=workers)
            session.run(f"fast with {workers} slots", "step", **chosen, slots=workers)
    for name, flags in FLAG_SETS.items() if json.dumps(session.points["facts"]).find('"platform": "gpu"') >= 0 else ():
        session.run(f"step flags: {name}", "step", flags=flags, **chosen)
    session.run("cudnn, head dimension 128", "step", **(chosen | {"attention": "cudnn"}), head_dim=128)


def summarise(points: dict[str, dict]) -> dict:
    """The figures that others will ask for, beside those to beat."""
    best, only = fastest(points), points.get("gradients only", {})
    exact = {
        w: (points.get(f"exact V {w}", {}).get("step_time_s"), points.get(f"fast with {w} slots", {}).get("step_time_s"))
        for w in (1, 4)
    }
    return {
        "best": best and {k: best.get(k) for k in ("batch", "attention", "remat", "flags", "mfu", "mfu_exact", "hfu", "step_time_s")},
        "mfu_without_optimizer": only.get("mfu"), "to_beat": BASELINE,
        "exact_over_fast": {str(w): e / f for w, (e, f) in exact.items() if e and f},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--budget-s", type=float, default=500)
    parser.add_argument("--recipe", default="pi0")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    options = parser.parse_args()
    session = Session(options.budget_s)
    measure_all(session, options.recipe, options.batch, tuple(int(b) for b in options.batches.split(",") if b))
    found = {"recipe": options.recipe, "summary": summarise(session.points), "points": session.points}
    print("\n" + "\n".join(f"{name:44} {describe(p)}" for name, p in session.points.items()))
    print(json.dumps(found["summary"], indent=1))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        print(json.dumps(PARTS[sys.argv[2]](**json.loads(sys.argv[3]))))
        sys.exit()
    main()

"""Whether the instrument tells the truth: a planted scope of known cost, attention left out, and what measuring itself costs.

`python bench/instrument.py [--only planted|ablation|overhead] [--rounds 15] [--quick]` prints JSON lines, each part in a process of
its own. Shares are of the step; a part agrees where measuring and attributing it are within three points of each other.
"""

import argparse
import statistics
import time

from lines import OPTIONS, QUICK, print_figure, resolve, run_part, serve_part

PLANTED = ("--parallel.reduction", "fast", "--train.global-batch-size", "8")
# Long sequences make attention's scores large; two examples fit any machine.
LONG = (
    "--parallel.reduction",
    "fast",
    "--train.global-batch-size",
    "2",
    "--data.seq-len",
    "1024",
    "--model.max-seq-len",
    "1024",
)
LOOP = 24
"""Products of (tokens, D) with (D, D) that are planted in the feed-forward of every layer."""


def plant():
    """Gives the feed-forward of the transformer a loop of known FLOPs, in the forward pass only. Returns its original."""
    import jax

    from sharder.models import transformer

    original = transformer.Block.feed_forward

    def slow(self, x_BTD, keys_B, layout):
        out = original(self, x_BTD, keys_B, layout)
        with jax.named_scope("mlp"), jax.named_scope("planted"):
            weight_DD = jax.lax.stop_gradient(self.q[...].reshape(x_BTD.shape[-1], -1))
            y = jax.lax.stop_gradient(out).reshape(-1, x_BTD.shape[-1])
            y = jax.lax.fori_loop(0, LOOP, lambda _, y: y @ weight_DD, y)
            return out + 1e-30 * y.reshape(out.shape)

    transformer.Block.feed_forward = slow
    return original


def timed(runner) -> tuple[float, float]:
    """Seconds of a step, and of the processors' time in it, which others that use the machine change little."""
    before = time.process_time()
    seconds = runner.take_step()[0]
    return seconds, time.process_time() - before


def difference(whole, without) -> float:
    """The share of a step that it takes more. Of lower quartiles: others use the machine too, and can only slow a step down."""
    low = [statistics.quantiles(times, n=4)[0] if len(times) > 3 else min(times) for times in (whole, without)]
    return 1 - low[1] / low[0]


def open_runner(config: dict):
    from sharder import cluster
    from sharder.config import from_dict
    from sharder.train.profiling import open_runner

    run = from_dict(config)
    cluster.initialize(run.cluster)
    return open_runner(run)


def attributed(runner, steps: int):
    """Shares of a trace of some steps, as sharder profile finds them."""
    import tempfile
    from pathlib import Path

    from sharder.instrument import trace
    from sharder.instrument.profile import measure_shares
    from sharder.train.profiling import programs_of

    timing = runner.time_steps(steps)
    with tempfile.TemporaryDirectory() as folder:
        with trace.recording(Path(folder)):
            for number in range(steps):
                with trace.step_annotation(number):
                    runner.take_step()
        return measure_shares(trace.read(trace.newest(Path(folder))), programs_of(runner), timing)


def planted(config: dict, rounds: int) -> dict:
    """The planted loop's share by trace, and by timing the step with and without it in turn."""
    from sharder.models import transformer

    without = open_runner(config)
    original = plant()
    slow = open_runner(config)
    transformer.Block.feed_forward = original
    shares = attributed(slow, rounds)
    pairs = [(timed(slow), timed(without)) for _ in range(2 * rounds)]
    seconds, cpu = ([(a[i], b[i]) for a, b in pairs] for i in (0, 1))
    model, size = config["model"], config["train"]["global_batch_size"] * config["data"]["seq_len"]
    attributed_share = sum(share for part, share in shares.parts.items() if part.scope.endswith("mlp/planted"))
    return {
        "measured": difference(*zip(*seconds)),
        "measured_cpu": difference(*zip(*cpu)),
        "attributed": attributed_share,
        "feed_forward": shares.categories["feed-forward"],
        "elsewhere": sum(s for part, s in shares.parts.items() if "planted" in part.scope and part.category != "feed-forward"),
        "coverage": shares.least_coverage,
        "flops": model["num_layers"] * LOOP * 2 * size * model["embed_dim"] ** 2,
    }


def ablation(config: dict, rounds: int) -> dict:
    """Attention's share by trace, and by leaving it out; and how much more of the whole step's time the other parts take then by
    trace: what ran beside attention runs alone, so leaving it out saves less than it takes."""
    from sharder.instrument.ablation import standing_in

    runner = open_runner(config)
    shares = attributed(runner, rounds)
    whole = runner.stepper.train_step
    with standing_in("attention", runner.setup.config.model):
        runner.compile()
    alone = attributed(runner, rounds)
    without, pairs = runner.stepper.train_step, []
    for _ in range(2 * rounds + 1):
        pair = []
        for runner.stepper.train_step in (whole, without):
            pair.append(timed(runner))
        pairs.append(pair)
    seconds, cpu = ([(a[i], b[i]) for a, b in pairs[1:]] for i in (0, 1))
    attributed_share, measured = shares.categories["attention"], difference(*zip(*seconds))
    others = [part for part in alone.categories if part not in ("feed-forward", "data wait", "idle")]
    grows = lambda *parts: sum((1 - measured) * alone.categories[p] - shares.categories.get(p, 0.0) for p in parts)  # noqa: E731
    return {"measured": measured, "measured_cpu": difference(*zip(*cpu)), "attributed": attributed_share,
            "feed_forward_grows": grows("feed-forward"), "others_grow": grows(*others),
            "coverage": shares.least_coverage,
            "attributed_of_calls": shares.calls["attention"], "coverage_of_calls": shares.coverage_of_calls}  # fmt: skip


def overhead(config: dict, rounds: int) -> dict:
    """What a step of the training loop pays for its ledger and its rates, as a share of the step: steps in turn with the real
    ledger and with none, and the ledger's own calls alone."""
    from sharder.train.step_ledger import NoLedger, StepLedger

    runner = open_runner(config)
    stepper, ratios = runner.stepper, []
    for number in range(rounds + 1):
        seconds = []
        for ledger in (StepLedger(None, 0), NoLedger()):
            stepper.ledger = ledger
            started = time.perf_counter()
            for step in range(4):
                with ledger.part("data_wait"):
                    batch = next(runner.loader)
                runner.state = stepper.dispatch(runner.state, batch, step, runner.loader.wait_s, False)
            stepper.drain()
            seconds.append(time.perf_counter() - started)
        ratios += [seconds[0] / seconds[1] - 1] if number else []
    ledger, started = StepLedger(None, 0), time.perf_counter()
    for step in range(1000):
        for name in ("data_wait", "dispatch", "device", "logging"):
            with ledger.part(name):
                pass
        ledger.end_step(step)
    alone = (time.perf_counter() - started) / 1000
    return {"paired": statistics.median(ratios), "alone_s": alone, "alone": alone / runner.time_steps(3).step_time_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["planted", "ablation", "overhead"], default=None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    for part in [options.only] if options.only else ["planted", "ablation", "overhead"]:
        config = resolve((*OPTIONS, *(LONG if part == "ablation" else PLANTED), *(QUICK if options.quick else ())))
        rounds = 2 if options.quick else options.rounds
        for figure, value in run_part(__file__, part, config=config, rounds=rounds).items():
            unit = "s" if figure.endswith("_s") else "FLOP" if figure == "flops" else "share of the step"
            print_figure("instrument", f"{part}_{figure}", value, unit, f"tiny_lm on one CPU device, {rounds} rounds")


if __name__ == "__main__":
    serve_part({"planted": planted, "ablation": ablation, "overhead": overhead})
    main()

"""`sharder profile`: the real step of a recipe, timed without the profiler, traced with it, and handed to the instruments."""

import json
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from rich.console import Console

from sharder import __version__, cluster
from sharder.config import RunConfig, UserError, to_dict
from sharder.data.loader import Prefetcher, open_loader
from sharder.data.open import open_datasets, open_order
from sharder.events import EventLog
from sharder.instrument import trace
from sharder.instrument.ablation import check_part, standing_in
from sharder.instrument.memory import compiled_bytes, measured_bytes
from sharder.instrument.profile import CompiledProgram, Programs, Timing, measure_shares
from sharder.instrument.profile_report import Measured, describe, to_json
from sharder.train.description import describe_step
from sharder.train.exact import ExactStep
from sharder.train.opening import compile_ahead, step_facts
from sharder.train.run_dir import Attempt
from sharder.train.setup import Setup, prepare
from sharder.train.state import TrainState, create_state
from sharder.train.stepping import Stepper

WARM_UP = 2
"""Steps before anything is timed."""


@dataclass
class Runner:
    """A run in the hands of the profiler: its state, its next batch, its compiled step."""

    setup: Setup
    stepper: Stepper
    loader: Prefetcher
    state: TrainState

    def compile(self) -> None:
        with redirect_stdout(sys.stderr):
            compile_ahead(self.stepper, self.state, next(self.loader), self.stepper.events)

    def take_step(self) -> tuple[float, float, float]:
        """Seconds of one whole step, of them waiting for its batch, and of dispatching it."""
        started = time.perf_counter()
        batch = next(self.loader)
        dispatched = time.perf_counter()
        self.state, metrics = self.stepper.train_step(*self.stepper.arguments(self.state, batch, False))
        free = time.perf_counter()
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - started, self.loader.wait_s, free - dispatched

    def time_steps(self, num_steps: int) -> Timing:
        taken = [self.take_step() for _ in range(num_steps)]
        return Timing(*map(list, zip(*taken)))


def open_runner(config: RunConfig) -> Runner:
    """Compiled and warm."""
    setup = prepare(config)
    training, _ = open_datasets(setup.config)
    order = open_order(setup.config, training)
    loader = open_loader(training, order, setup.train_batch, 0, setup.config.data.prefetch)
    state = create_state(setup.config, setup.declared, setup.state_shardings)
    stepper = Stepper(setup, step_facts(setup, order, Attempt(Path(), 1, None)), [], EventLog(None, 1))
    runner = Runner(setup, stepper, loader, state)
    runner.compile()
    runner.time_steps(WARM_UP)
    return runner


def programs_of(runner: Runner) -> Programs:
    """What the compiler made of the step, as text."""
    step, setup = runner.stepper.train_step, runner.setup
    named = (
        {name: (p, step.runs[name]) for name, p in step.programs.items()}
        if isinstance(step, ExactStep)
        else {"step": (step, setup.mesh.size)}
    )
    mesh = {axis: setup.plan.mesh.size(axis) for axis in ("data", "fsdp", "tensor")}
    hosts = [d.process_index for d in setup.mesh.devices.flat]
    return Programs([CompiledProgram(n, p.as_text(), runs, counted_flops(p)) for n, (p, runs) in named.items()], mesh, hosts)


def counted_flops(program: jax.stages.Compiled) -> float | None:
    analysis = program.cost_analysis() or {}
    return analysis.get("flops")


def profile(config: RunConfig, name: str, run_dir: Path | None, steps: int, ablate: str | None, as_json: bool) -> int:
    """Prints where the time of a step goes; with `run_dir` leaves profile.json and the trace in its folder profile. Returns 0."""
    if ablate is not None:
        check_part(ablate, config.model)
    if steps < 1:
        raise UserError(f"--steps is {steps}, but must be at least 1.")
    cluster.initialize(config.cluster, exact=config.parallel.reduction == "exact")
    with nullcontext(run_dir / "profile") if run_dir else tempfile.TemporaryDirectory(prefix="sharder-profile-") as folder:
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made: {error.strerror}. Choose another --run-dir.") from None
        found = measure(config, name, folder, steps, ablate)
        cluster.shutdown()
        if jax.process_index() != 0:
            return 0
        text = json.dumps(to_json(found), indent=1)
        if run_dir is not None:
            (folder / "profile.json").write_text(text)
    if as_json:
        print(text)
    else:
        describe(found, Console(), run_dir)
    return 0


def measure(config: RunConfig, name: str, folder: Path, steps: int, ablate: str | None) -> Measured:
    """Times, traces and, where asked for, ablates."""
    runner = open_runner(config)
    timing = runner.time_steps(steps)
    # Processes of one host would write to the same file.
    folder = folder if jax.process_count() == 1 else folder / f"process_{jax.process_index()}"
    with trace.recording(folder):
        for number in range(steps):
            with trace.step_annotation(number):
                runner.take_step()
    programs = programs_of(runner)
    shares = measure_shares(trace.read(trace.newest(folder)), programs, timing)
    collective_s = gather_from_processes(shares.collective_s)
    ablation = ablated(runner, ablate, steps) if ablate else None
    runner.loader.close()
    config = runner.setup.config
    return Measured(
        recipe=name, config=to_dict(config), versions={"sharder": __version__, "jax": jax.__version__},
        platform=jax.devices()[0].platform, device_kind=jax.devices()[0].device_kind, num_devices=jax.device_count(),
        num_processes=jax.process_count(), num_params=runner.setup.declared.num_params, run=config, timing=timing, shares=shares,
        programs=programs, memory=memory_of(runner), collective_s=collective_s, ablation=ablation,
    )  # fmt: skip


def memory_of(runner: Runner) -> dict:
    """Bytes per device: predicted by part, compiled, and measured where the backend counts."""
    from sharder.instrument.machine import memory_of as predict

    config, devices = runner.setup.config, jax.devices()
    predicted = predict(describe_step(config, len(devices), jax.local_device_count(), devices[0].platform))
    step = runner.stepper.train_step
    compiled = None if isinstance(step, ExactStep) else compiled_bytes(step)
    measured = measured_bytes(jax.local_devices()[0])
    return {"predicted": asdict(predicted) | {"total": predicted.total}, "compiled": compiled, "measured": measured}


def gather_from_processes(collective_s: float) -> list[float]:
    """Seconds per step that every process spent in collectives, by process."""
    if jax.process_count() == 1:
        return [collective_s]
    from jax.experimental import multihost_utils

    return [float(x) for x in multihost_utils.process_allgather(jax.numpy.float32(collective_s))]


def ablated(runner: Runner, scope: str, rounds: int) -> dict:
    """The same step with a stand-in for one scope, the two timed in turn: what the whole step loses with it."""
    whole = runner.stepper.train_step
    with standing_in(scope, runner.setup.config.model):
        runner.compile()
    without = runner.stepper.train_step
    times: dict[str, list[float]] = {"whole": [], "without": []}
    for number in range(rounds + 1):
        for kind, step in (("whole", whole), ("without", without)):
            runner.stepper.train_step = step
            seconds = runner.take_step()[0]
            times[kind] += [seconds] if number else []
    runner.stepper.train_step = whole
    shares = [1 - b / a for a, b in zip(times["whole"], times["without"])]
    low, middle, high = statistics.quantiles(shares, n=4) if rounds > 1 else 3 * shares
    medians = {f"{k}_s": statistics.median(v) for k, v in times.items()}
    return {"scope": scope, "share": middle, "share_low": low, "share_high": high,
            **medians, **{f"steps_{k}_s": v for k, v in times.items()}}  # fmt: skip

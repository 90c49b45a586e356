"""How a run opens: which attempt it is, what it goes on from, and what it says and writes before its first step."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import jax

from sharder import __version__, checkpoint, heartbeat
from sharder.accounting import account
from sharder.agreement import DECISION_TIMEOUT_S, decide
from sharder.checkpoint.mirror import Mirror
from sharder.checkpoint.remote import FETCH_TIMEOUT_S
from sharder.config import RunConfig, UserError
from sharder.data.dataset import Dataset
from sharder.data.open import write_assets
from sharder.data.order import Order
from sharder.events import EventLog, read_json_lines
from sharder.facts import address_of
from sharder.exactness import untested
from sharder.instrument.flops import count_step, step_flops_6nd, tokens_of_example
from sharder.instrument.peak import matrix_ceiling
from sharder.models.freeze import describe as describe_frozen
from sharder.sharding.show import to_json, undivided_text
from sharder.train.attempt import Attempt, Branch, describe_branch
from sharder.train.console import open_console, say
from sharder.train.description import state_leaves
from sharder.train.exact import ExactStep
from sharder.train.metrics import JsonLines, StepFacts, Writer, optional_writers
from sharder.train.nonfinite import gradient_paths
from sharder.train.run_dir import Resume, RunLock, begin, open_attempt
from sharder.train.saved import restore_newest, restore_state
from sharder.train.setup import Setup
from sharder.train.snapshot import Snapshots
from sharder.train.state import TrainState, by_path
from sharder.train.step import compile_step
from sharder.train.stepping import Stepper

STOP_FILE = "STOP"
"""In the folder of a run: while it is there, the run stops and does not start."""
DATA_TIMEOUT_S = 1800
"""How long processes wait for one another to open the data: a host may have to tokenize first."""


def data_facts(training: Dataset, validation: Dataset | None) -> dict:
    """What must be the same of the data in all processes."""
    splits = {"training": training} | ({"validation": validation} if validation is not None else {})
    facts = {f"the SHA-256 of the {name} data": split.fingerprint for name, split in splits.items()}
    return facts | {f"the number of {name} examples": len(split) for name, split in splits.items()}


def interrupted_evaluation(run_dir: Path, step: int | None) -> dict | None:
    """The record of `step`, where the attempt before stopped in its evaluation: it is due again."""
    stops = [e for e in read_json_lines(run_dir / "events.jsonl")[0] if e.get("kind") == "stopped"]
    if not stops or stops[-1].get("step") != step or stops[-1].get("evaluation") != "interrupted":
        return None
    return next((r for r in reversed(read_json_lines(run_dir / "metrics.jsonl")[0]) if r.get("step") == step), None)


def is_over(attempt: Attempt, config: RunConfig, unevaluated: dict | None) -> bool:
    """Whether nothing is left to do. `unevaluated`: as `interrupted_evaluation` found."""
    reached = attempt.resume_step is not None and attempt.resume_step >= config.train.steps
    return reached and attempt.source is None and unevaluated is None


def restore(
    setup: Setup, attempt: Attempt, snapshots: Snapshots, events: EventLog, store: Mirror | None
) -> tuple[TrainState | None, int]:
    """The state that the attempt goes on from, verified, and its step; (None, 0) where it begins."""
    heartbeat.enter("restore", attempt.resume_step)
    found, source = snapshots.restore(setup), "snapshot"
    if found is None and attempt.resume_step is None:
        return None, 0
    if found is None and attempt.source is not None:
        found, source = (restore_state(setup, attempt.source, attempt.resume_step), attempt.resume_step), str(attempt.source)
    elif found is None:
        found, source = restore_newest(setup, attempt.run_dir, attempt.resume_step, events, store), "checkpoint"
    events.write("restored", found[1], source=source)
    return found


def agree_on_attempt(
    run_dir: Path, resume: Resume, config: RunConfig, lock: RunLock, branch: Branch | None, store: Mirror | None
) -> Attempt:
    """The attempt as process 0 finds it, which takes the lock, and has the store bring what the folder lacks."""

    def choose() -> dict:
        lock.take()
        if (run_dir / STOP_FILE).exists():
            raise UserError(f"{run_dir / STOP_FILE} asks this run to stop: remove it to continue.")
        if store is not None and resume != "never":
            store.bring_newest(run_dir, branch.step if branch is not None and branch.run_dir == run_dir else None)
        attempt = open_attempt(run_dir, resume, config, branch)
        over = is_over(attempt, config, interrupted_evaluation(run_dir, attempt.resume_step))
        # Where nothing is to be done a run that goes on elsewhere is left alone.
        if store is not None and not (over and store.is_elsewhere()):
            back_to = attempt.resume_step if attempt.rewinds else None
            attempt = replace(attempt, number=store.begin(attempt.run_id, attempt.number, back_to))
        return {**asdict(attempt), "run_dir": str(run_dir), "source": attempt.source and str(attempt.source)}

    # Process 0 may have to fetch a checkpoint first.
    chosen = decide(choose, DECISION_TIMEOUT_S if store is None else FETCH_TIMEOUT_S)
    return Attempt(**chosen | {"run_dir": run_dir, "source": chosen["source"] and branch.run_dir.resolve()})


def machine_facts() -> dict:
    """What the run is computed with."""
    device = jax.devices()[0]
    return {
        "versions": {"sharder": __version__, "jax": jax.__version__},
        "devices": {"kind": device.device_kind, "platform": device.platform, "count": jax.device_count()},
        "num_processes": jax.process_count(),
    }


def open_run(setup: Setup, attempt: Attempt, training: Dataset, order: Order) -> EventLog:
    """Writes config.json and plan.json, starts the event log, and says what is about to run."""
    config, run_dir = setup.config, attempt.run_dir
    if jax.process_index() != 0:
        return EventLog(None, attempt.number, jax.process_index())
    device = jax.devices()[0]
    peak = matrix_ceiling(config.model.compute_dtype)
    facts = {
        **machine_facts(),
        "data": {"fingerprint": training.fingerprint, "num_examples": len(training)},
        "peak_flops": peak.value,
        "peak_source": peak.source,
    }
    set_aside = begin(attempt, config, facts)
    for name, reason in set_aside:
        print(f"what is no whole checkpoint was set aside as checkpoints/{name}: {reason}")
    plan = to_json(setup.plan, state_leaves(config, setup.declared, setup.plan))
    checkpoint.write_durably(run_dir / "plan.json", json.dumps(plan, indent=1))
    write_assets(run_dir / "assets", training)
    if setup.declared.frozen:
        print(describe_frozen(setup.declared.params, setup.declared.frozen))
    if attempt.source is not None:
        print(describe_branch(attempt, config))
    why_fast = setup.why_fast and f"fast mode, not exact: {setup.why_fast}"
    for note in filter(None, (untested(config, device.platform, jax.__version__), why_fast, undivided_text(setup.plan))):
        print(note)
    events = EventLog(run_dir, attempt.number)
    events.write("start", attempt.resume_step, num_processes=jax.process_count(), num_devices=jax.device_count())
    for name, reason in set_aside:
        events.write("set_aside", name=name, reason=reason)
    mesh, size = setup.plan.mesh, plan["bytes_per_device"]
    began = "from the start" if attempt.resume_step is None else f"resumed at step {attempt.resume_step}"
    address, epoch = address_of(run_dir), f"epoch of {order.steps_per_epoch} steps"
    print(
        f"{setup.declared.num_params:,} parameters; policy {setup.plan.policy}, mesh data {mesh.data} x fsdp {mesh.fsdp} x tensor"
        f" {mesh.tensor}, {jax.process_count()} process(es); per device {size['params']:,} bytes of parameters,"
        f" {size['opt_state']:,} of optimizer state\n"
        f"{account(config, mesh.num_replicas)}; {epoch}, data SHA-256 {training.fingerprint[:16]}...\n"
        f"attempt {attempt.number}, {began}, to step {config.train.steps}; {address + ', staged in ' if address else ''}{run_dir}",
        flush=True,
    )
    return events


def open_writers(config: RunConfig, run_dir: Path, first_step: int) -> list[Writer]:
    """Process 0 writes; the others have no writers."""
    if jax.process_index() != 0:
        return []
    console = open_console(first_step, config.train.steps)
    return [JsonLines(run_dir / "metrics.jsonl"), console, *optional_writers(config.log, config, run_dir)]


def step_facts(setup: Setup, order: Order, attempt: Attempt) -> StepFacts:
    config, flops = setup.config, count_step(setup.config)
    num_tokens = config.train.global_batch_size * tokens_of_example(config.model, config.data.seq_len)
    return StepFacts(
        global_batch_size=config.train.global_batch_size,
        tokens_per_step=config.train.global_batch_size * config.data.seq_len if setup.declared.tokens_per_example else None,
        steps_per_epoch=order.steps_per_epoch,
        flops={"mfu": step_flops_6nd(setup.declared.num_params, num_tokens), "mfu_exact": flops.model, "hfu": flops.hardware},
        num_devices=jax.device_count(),
        peak_flops=matrix_ceiling(config.model.compute_dtype).value,
        state_paths=list(by_path(setup.state_shardings)),
        gradient_paths=gradient_paths(setup.declared),
        example_ids=lambda step: order.ids(step - 1, 0, config.train.global_batch_size),
        skips_nonfinite=config.train.on_nonfinite == "skip",
        attempt=attempt.number,
        reached=attempt.reached,
    )


def compile_ahead(stepper: Stepper, state: TrainState, batch: dict, events: EventLog) -> None:
    """Compiles the step before the loop, so that no step's time contains it."""
    started = time.perf_counter()
    setup, arguments = stepper.setup, stepper.arguments(state, batch, False)
    stepper.train_step = (
        ExactStep(setup, setup.workers, arguments, keep=True) if setup.workers else compile_step(setup, arguments)
    )
    compile_s = round(time.perf_counter() - started, 3)
    events.write("compiled", compile_s=compile_s)
    say(f"compiled in {compile_s:.1f} s")
    stepper.resume_clock()

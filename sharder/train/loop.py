"""The story of a run, told from top to bottom.

resolve config -> cluster -> mesh -> declare parameters -> plan -> preflight -> restore or initialise -> open the
loader at state.step -> for each step: dispatch, then read the previous step's metrics, then evaluate and save if due
-> final save, wait, shutdown, summary.
"""

import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import jax

from sharder import __version__, checkpoint, cluster, heartbeat
from sharder.accounting import account
from sharder.checkpoint.mirror import open_mirror
from sharder.checkpoint.save import Saver
from sharder.config import RunConfig, UserError
from sharder.data.dataset import Dataset
from sharder.data.loader import open_loader
from sharder.data.open import open_datasets, open_order, write_assets
from sharder.data.order import Order
from sharder.events import EventLog, read_json_lines
from sharder.exactness import untested
from sharder.facts import is_run
from sharder.identity import shared_settings
from sharder.instrument.flops import count_step, step_flops_6nd, tokens_of_example
from sharder.instrument.peak import matrix_ceiling
from sharder.models.freeze import describe as describe_frozen
from sharder.place import without_place
from sharder.preflight import with_reduction
from sharder.process_log import ProcessLog
from sharder.sharding.show import to_json
from sharder.stop import ELSEWHERE, PREEMPTED, StopRequest
from sharder.train.attempt import Attempt, Branch, describe_branch
from sharder.train.console import open_console
from sharder.train.description import state_leaves
from sharder.train.evaluation import Interrupted, evaluate, make_eval_step
from sharder.train.exact import ExactStep
from sharder.train.initial_weights import initialise, with_sizes_of_weights
from sharder.train.metrics import JsonLines, StepFacts, Writer, optional_writers, validation_fields
from sharder.train.nonfinite import gradient_paths
from sharder.train.own_files import with_kept_tokenizer
from sharder.train.run_dir import Resume, RunLock, begin, has_fitted, is_about_room, mode_asked_for, no_room, open_attempt
from sharder.train.saved import check_data, check_fits, describe_save, restore_newest, restore_state
from sharder.train.setup import Setup, prepare
from sharder.train.snapshot import Snapshots
from sharder.train.state import TrainState, by_path, create_state
from sharder.train.step import compile_step
from sharder.train.step_ledger import StepLedger
from sharder.train.stepping import Stepper

STOP_FILE = "STOP"
"""In the folder of a run: while it is there, the run stops and does not start."""
DATA_TIMEOUT_S = 1800
"""How long processes wait for one another to open the data: a host may have to tokenize first."""


def train(config: RunConfig, run_dir: Path, resume: Resume, stop: StopRequest, branch: Branch | None = None) -> int:
    """Runs until train.steps or a stop; returns the exit code. Raises UserError for what the user can mend."""
    heartbeat.enter("bring-up")
    facts = shared_settings(config) | {"--run-dir": os.path.abspath(run_dir), "--resume": resume}
    # The compiler's settings come first, and those of a run that goes on are the run's.
    cluster.initialize(config.cluster, mode_asked_for(run_dir, config) == "exact", facts, stop)
    config = replace(config, cluster=without_place(config.cluster))
    lock = RunLock(run_dir)
    with ProcessLog() as log:
        try:
            return run(config, run_dir, resume, stop, lock, log, branch)
        except cluster.PeerLost as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except OSError as error:
            if not is_about_room(run_dir, error):
                raise
            raise no_room(run_dir, error) from error
        finally:
            heartbeat.end()
            stop.close()
            lock.release()


def run(
    config: RunConfig, run_dir: Path, resume: Resume, stop: StopRequest, lock: RunLock, log: ProcessLog, branch: Branch | None
) -> int:  # fmt: skip
    """The story itself. Raises OSError where a file of the run cannot be written."""
    heartbeat.enter("set-up")
    config, resized = with_sizes_of_weights(config, run_dir)
    attempt = agree_on_attempt(run_dir, resume, config, lock, branch)
    config = with_reduction(config, attempt.reduction)
    unevaluated = cluster.decide(lambda: {"record": interrupted_evaluation(run_dir, attempt.resume_step)})["record"]
    is_over = attempt.resume_step is not None and attempt.resume_step >= config.train.steps and attempt.source is None
    if is_over and unevaluated is None:
        say(
            f"{run_dir} is finished: its last checkpoint is of step {attempt.resume_step}, --train.steps is {config.train.steps}."
        )
        cluster.shutdown()
        return 0
    setup = prepare(config, run_dir=run_dir, fitted=has_fitted(attempt, config, machine_facts()))
    config = setup.config
    training, validation = open_datasets(with_kept_tokenizer(run_dir, config))
    cluster.agree("data", data_facts(training, validation), DATA_TIMEOUT_S)
    order = open_order(config, training)
    if attempt.resume_step is not None and attempt.source is None:
        check_data(run_dir, attempt.resume_step, training)
    if attempt.source is not None:
        check_fits(setup, attempt.source, attempt.resume_step)
    events = open_run(setup, attempt, training, order)
    heartbeat.attach(events)
    log.open(run_dir, jax.process_index(), f"attempt {attempt.number}, process {jax.process_index()} of {jax.process_count()}")
    if jax.process_index() == 0:
        stop.watch(run_dir / STOP_FILE, config.train.max_minutes)

    snapshots = Snapshots(attempt, config.checkpoint, events, say)
    state, first_step = restore(setup, attempt, snapshots, events)
    if state is None:
        state = create_state(config, setup.declared, setup.state_shardings)
        if config.weights.path is not None:
            state, loaded = initialise(state, config, setup.declared.params, setup.state_shardings)
            say("\n".join(x for x in (resized, loaded) if x))
    snapshots.prepare(by_path(state))
    layout = setup.train_batch
    loader = open_loader(training, order, layout, first_step, config.data.prefetch)
    writers = open_writers(config, run_dir, first_step)
    ledger = StepLedger(run_dir, jax.process_index(), attempt.number)
    stepper = Stepper(setup, step_facts(setup, order, attempt), writers, events, ledger)
    heartbeat.enter("compile", first_step)
    compile_ahead(stepper, state, layout.abstract(training.read(order.ids(first_step, 0, 1))), events)
    eval_step = make_eval_step(setup) if validation is not None else None
    saver = Saver(run_dir, config.checkpoint, events, say, open_mirror(config.checkpoint))
    stop.training()

    def save(step: int, state: TrainState) -> None:
        heartbeat.enter("save", step)
        paths, fingerprint = stepper.facts.state_paths, stepper.record["fingerprint"]
        with ledger.part("checkpoint"):
            manifest = describe_save(setup, training, paths, fingerprint, stepper.leaf_digests, stepper.record)
            saver.save(step, by_path(state), manifest)

    def evaluate_into(record: dict) -> None:
        """Adds the evaluation of the present parameters to their record, and writes it; where it is interrupted, without."""
        try:
            with ledger.part("evaluation"):
                loss = evaluate(eval_step, state.params, validation, setup, lambda: stop.requested)[0]
            record |= validation_fields(loss, setup.declared.tokens_per_example)  # also for the manifest
            stepper.write(record)
        except Interrupted:
            stepper.stop_agreed = stepper.evaluation_interrupted = True
            stepper.write(record)
        stepper.resume_clock()

    if eval_step is not None and unevaluated is not None and first_step == attempt.resume_step:
        evaluate_into(unevaluated | {"attempt": attempt.number})
    # A run that goes on from its own checkpoint need not save it again.
    step, saved = first_step, first_step if first_step == attempt.resume_step and attempt.source is None else None
    ledger.restart()
    while step < config.train.steps and not stepper.stop_agreed and stepper.nonfinite is None:
        heartbeat.enter("data", step + 1)
        with ledger.part("data_wait"):
            batch = next(loader)
        ledger.move("data_wait", "host_to_device", loader.copy_wait_s)
        step += 1
        heartbeat.enter("step", step)
        state = stepper.dispatch(state, batch, step, loader.wait_s, stop.requested)
        last = step == config.train.steps
        if eval_step is not None and (last or due(step, config.train.validate_every)):
            heartbeat.enter("evaluate", step)
            record = stepper.drain()
            if record is not None:
                evaluate_into(record)
        if due(step, config.checkpoint.every) and not last:
            stepper.write_pending()
            if stepper.nonfinite is None:
                save(step, state)
                saved = step
            stepper.resume_clock()
        elif snapshots.due(step, first_step) and not last:
            stepper.write_pending()
            if stepper.nonfinite is None:
                with ledger.part("checkpoint"):
                    snapshots.take(step, by_path(state), stepper.leaf_digests, stepper.record["step_time_s"])
            stepper.resume_clock()

    stepper.write_pending()
    if stepper.nonfinite is not None:
        step = stepper.nonfinite.step - 1
    if step not in (saved, 0) and stepper.record:
        save(step, state)
    ledger.close(step)
    loader.close()
    heartbeat.enter("end", step)
    try:
        saver.close()
    finally:
        for writer in writers:
            writer.close()
    if stepper.nonfinite is None:
        snapshots.remove()
    return close_run(setup, stepper, events, step, stop)


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


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def say(text: str) -> None:
    """Process 0 speaks for all."""
    if jax.process_index() == 0:
        print(text, flush=True)


def restore(setup: Setup, attempt: Attempt, snapshots: Snapshots, events: EventLog) -> tuple[TrainState | None, int]:
    """The state that the attempt goes on from, verified, and its step; (None, 0) where it begins."""
    heartbeat.enter("restore", attempt.resume_step)
    found, source = snapshots.restore(setup), "snapshot"
    if found is None and attempt.resume_step is None:
        return None, 0
    if found is None and attempt.source is not None:
        found, source = (restore_state(setup, attempt.source, attempt.resume_step), attempt.resume_step), str(attempt.source)
    elif found is None:
        found, source = restore_newest(setup, attempt.run_dir, attempt.resume_step, events), "checkpoint"
    events.write("restored", found[1], source=source)
    return found


def agree_on_attempt(run_dir: Path, resume: Resume, config: RunConfig, lock: RunLock, branch: Branch | None) -> Attempt:
    """The attempt as process 0 finds it, which takes the lock, and looks at the mirror where the folder holds no run."""

    def choose() -> dict:
        lock.take()
        if (run_dir / STOP_FILE).exists():
            raise UserError(f"{run_dir / STOP_FILE} asks this run to stop: remove it to continue.")
        mirror = open_mirror(config.checkpoint)
        if mirror is not None and resume != "never" and not is_run(run_dir):
            fetched = mirror.fetch(run_dir)
            if fetched is not None:
                say(f"the checkpoint of step {fetched} was fetched from {mirror.url}")
        attempt = open_attempt(run_dir, resume, config, branch)
        if mirror is not None:
            mirror.check_owner(attempt.run_id)
        if mirror is not None and attempt.rewinds:
            mirror.set_aside([s for s in mirror.steps() if s > attempt.resume_step])
        return {**asdict(attempt), "run_dir": str(run_dir), "source": attempt.source and str(attempt.source)}

    chosen = cluster.decide(choose)
    return Attempt(**chosen | {"run_dir": run_dir, "source": chosen["source"] and Path(chosen["source"])})


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
    notes = untested(config, device.platform, jax.__version__), setup.why_fast and f"fast mode, not exact: {setup.why_fast}"
    for note in filter(None, notes):
        print(note)
    events = EventLog(run_dir, attempt.number)
    events.write("start", attempt.resume_step, num_processes=jax.process_count(), num_devices=jax.device_count())
    for name, reason in set_aside:
        events.write("set_aside", name=name, reason=reason)
    mesh, size = setup.plan.mesh, plan["bytes_per_device"]
    began = "from the start" if attempt.resume_step is None else f"resumed at step {attempt.resume_step}"
    epoch = f"epoch of {order.steps_per_epoch} steps"
    print(
        f"{setup.declared.num_params:,} parameters; policy {setup.plan.policy}, mesh data {mesh.data} x fsdp {mesh.fsdp} x tensor"
        f" {mesh.tensor}, {jax.process_count()} process(es); per device {size['params']:,} bytes of parameters,"
        f" {size['opt_state']:,} of optimizer state\n"
        f"{account(config, mesh.num_replicas)}; {epoch}, data SHA-256 {training.fingerprint[:16]}...\n"
        f"attempt {attempt.number}, {began}, to step {config.train.steps}; {run_dir}",
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


def close_run(setup: Setup, stepper: Stepper, events: EventLog, step: int, stop: StopRequest) -> int:
    """Leaves the group, says how it ended; returns the exit code."""
    failed, interrupted = stepper.nonfinite is not None, stepper.evaluation_interrupted
    stopped = step < setup.config.train.steps or interrupted
    # Process 0 notes it; what asks for a stop elsewhere is a signal.
    reason = "nonfinite" if failed else stop.reason or (ELSEWHERE if stopped else None)
    events.write("stopped" if stopped else "end", step, reason=reason, **({"evaluation": "interrupted"} if interrupted else {}))
    events.close()
    cluster.shutdown()
    if stepper.num_skipped:
        say(f"{stepper.num_skipped} batches were not finite and were dropped")
    ending = "stopped, not finite" if failed else "stopped; resume with the same command" if stopped else "finished"
    at = f", loss {stepper.record['loss']:.4f}, fingerprint {stepper.record['fingerprint']}" if stepper.record else ""
    say(f"{ending}: step {step}{at}")
    return 1 if failed else PREEMPTED if stopped else 0

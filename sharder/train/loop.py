"""The story of a run, told from top to bottom.

resolve config -> cluster -> mesh -> declare parameters -> plan -> preflight -> restore or initialise -> open the
loader at state.step -> for each step: dispatch, then read the previous step's metrics, then evaluate and save if due
-> final save, wait, shutdown, summary.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import jax

from sharder import cluster, heartbeat
from sharder.agreement import PeerLost, agree, decide, exchange
from sharder.checkpoint.mirror import Mirror
from sharder.checkpoint.remote import open_store
from sharder.checkpoint.save import SAVE_TIMEOUT_S, Saver
from sharder.config import RunConfig, UserError
from sharder.data.loader import open_loader
from sharder.data.open import open_datasets, open_order
from sharder.events import EventLog
from sharder.facts import address_of, called
from sharder.identity import shared_settings
from sharder.place import without_place
from sharder.preflight import with_reduction
from sharder.process_log import ProcessLog
from sharder.stop import ELSEWHERE, PREEMPTED, StopRequest
from sharder.train.attempt import Branch
from sharder.train.console import say
from sharder.train.evaluation import Interrupted, evaluate, make_eval_step
from sharder.train.initial_weights import initialise, with_sizes_of_weights
from sharder.train.metrics import validation_fields
from sharder.train.opening import (
    DATA_TIMEOUT_S,
    STOP_FILE,
    agree_on_attempt,
    compile_ahead,
    data_facts,
    interrupted_evaluation,
    is_over,
    machine_facts,
    open_run,
    open_writers,
    restore,
    step_facts,
)
from sharder.train.own_files import with_kept_tokenizer
from sharder.train.run_dir import Resume, RunLock, has_fitted, is_about_room, mode_asked_for, no_room
from sharder.train.saved import check_data, check_fits, describe_save
from sharder.train.setup import Setup, prepare
from sharder.train.snapshot import Snapshots
from sharder.train.state import TrainState, by_path, create_state
from sharder.train.step_ledger import StepLedger
from sharder.train.stepping import Stepper


def train(config: RunConfig, run_dir: Path, resume: Resume, stop: StopRequest, branch: Branch | None = None) -> int:
    """Runs until train.steps or a stop; returns the exit code. Raises UserError for what the user can mend."""
    heartbeat.enter("bring-up")
    store = open_store(config.checkpoint, run_dir, say)
    if store is not None:
        store.come_near()
    facts = shared_settings(config) | {"--run-dir": address_of(run_dir) or os.path.abspath(run_dir), "--resume": resume}
    # The compiler's settings come first, and those of a run that goes on are the run's.
    cluster.initialize(config.cluster, mode_asked_for(run_dir, config) == "exact", facts, stop)
    config = replace(config, cluster=without_place(config.cluster))
    lock = RunLock(run_dir)
    with ProcessLog() as log:
        try:
            return run(config, run_dir, resume, stop, lock, log, branch, store)
        except PeerLost as error:
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
    config: RunConfig, run_dir: Path, resume: Resume, stop: StopRequest, lock: RunLock, log: ProcessLog, branch: Branch | None,
    store: Mirror | None,
) -> int:  # fmt: skip
    """The story itself. Raises OSError where a file of the run cannot be written."""
    heartbeat.enter("set-up")
    config, resized = with_sizes_of_weights(config, run_dir)
    attempt = agree_on_attempt(run_dir, resume, config, lock, branch, store)
    config = with_reduction(config, attempt.reduction)
    unevaluated = decide(lambda: {"record": interrupted_evaluation(run_dir, attempt.resume_step)})["record"]
    if is_over(attempt, config, unevaluated):
        say(
            f"{called(run_dir)} is finished: its last checkpoint is of step {attempt.resume_step}, --train.steps is {config.train.steps}."
        )
        cluster.shutdown()
        return 0
    if store is not None:
        store.bring_to_all(None if attempt.source is not None else attempt.resume_step)
    setup = prepare(config, run_dir=run_dir, fitted=has_fitted(attempt, config, machine_facts()))
    config = setup.config
    training, validation = open_datasets(with_kept_tokenizer(run_dir, config))
    agree("data", data_facts(training, validation), DATA_TIMEOUT_S)
    order = open_order(config, training)
    if attempt.resume_step is not None and attempt.source is None:
        check_data(run_dir, attempt.resume_step, training)
    if attempt.source is not None:
        check_fits(setup, attempt.source, attempt.resume_step)
    events = open_run(setup, attempt, training, order)
    if store is not None and jax.process_index() == 0:
        store.opened()
    heartbeat.attach(events)
    log.open(run_dir, jax.process_index(), f"attempt {attempt.number}, process {jax.process_index()} of {jax.process_count()}")
    if jax.process_index() == 0:
        stop.watch(run_dir / STOP_FILE, config.train.max_minutes)

    snapshots = Snapshots(attempt, config.checkpoint, events, say)
    state, first_step = restore(setup, attempt, snapshots, events, store)
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
    saver = Saver(run_dir, config.checkpoint, events, say, store)
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
    return close_run(setup, stepper, events, step, stop, saver)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def close_run(setup: Setup, stepper: Stepper, events: EventLog, step: int, stop: StopRequest, saver: Saver) -> int:
    """Leaves the group, says how it ended; returns the exit code. Raises UserError where a finished run is not where it should
    be."""
    failed, interrupted = stepper.nonfinite is not None, stepper.evaluation_interrupted
    stopped = step < setup.config.train.steps or interrupted
    # Process 0 notes it; what asks for a stop elsewhere is a signal.
    reason = "nonfinite" if failed else stop.reason or (ELSEWHERE if stopped else None)
    events.write("stopped" if stopped else "end", step, reason=reason, **({"evaluation": "interrupted"} if interrupted else {}))
    events.close()
    missing = next(filter(None, exchange("finished", saver.finish(), SAVE_TIMEOUT_S)), None)
    cluster.shutdown()
    if stepper.num_skipped:
        say(f"{stepper.num_skipped} batches were not finite and were dropped")
    ending = "stopped, not finite" if failed else "stopped; resume with the same command" if stopped else "finished"
    at = f", loss {stepper.record['loss']:.4f}, fingerprint {stepper.record['fingerprint']}" if stepper.record else ""
    say(f"{ending}: step {step}{at}")
    if missing is not None and not stopped:
        raise UserError(f"{missing}.")
    if missing is not None:
        say(missing)
    return 1 if failed else PREEMPTED if stopped else 0

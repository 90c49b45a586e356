"""Whole runs inside this process, on its eight simulated devices."""

import dataclasses
import json
import threading
import time

import numpy as np
import pytest
from small import small, small_dropout

from sharder.config import UserError
from sharder.events import read_json_lines
from sharder.models.build import declare
from sharder.report.verify import compare
from sharder.stop import PREEMPTED, StopRequest
from sharder.train import stepping
from sharder.train.loop import train
from sharder.train.setup import prepare
from sharder.train.state import by_path, create_state


def change(config, **sections):
    """The config with fields replaced: change(c, train={"steps": 3})."""
    return dataclasses.replace(config, **{s: dataclasses.replace(getattr(config, s), **f) for s, f in sections.items()})


def run(config, run_dir, resume="auto", stop=None):
    return train(config, run_dir, resume, stop or StopRequest())


def metrics(run_dir):
    return read_json_lines(run_dir / "metrics.jsonl")[0]


def test_policies_agree_in_loss(tmp_path):
    """dp, zero and fsdp on eight devices, 40 steps."""
    losses = {}
    for policy in ("dp", "zero", "fsdp"):
        config = change(small(), parallel={"policy": policy}, train={"steps": 40}, checkpoint={"every": 0})
        assert run(config, tmp_path / policy) == 0
        losses[policy] = np.array([r["loss"] for r in metrics(tmp_path / policy)])
    assert len(losses["dp"]) == 40 and losses["dp"][-1] < losses["dp"][0] - 0.5
    for policy in ("zero", "fsdp"):
        np.testing.assert_allclose(losses[policy], losses["dp"], rtol=1e-5)


@pytest.mark.parametrize("policy", ["dp", "zero", "fsdp"])
def test_bytes_in_use_are_those_of_plan_json(tmp_path, policy):
    config = change(small(), parallel={"policy": policy}, train={"steps": 1})
    run(config, tmp_path / "run")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    setup = prepare(config)
    state = by_path(create_state(config, setup.declared, setup.state_shardings))
    for part in ("params", "opt_state"):
        leaves = [x for p, x in state.items() if p.startswith(part + "/")]
        held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
        assert held == plan["bytes_per_device"][part]
        whole = sum(x.nbytes for x in leaves if x.ndim)
        divided = {"dp": (), "zero": ("opt_state",), "fsdp": ("params", "opt_state")}[policy]
        scalars = sum(x.nbytes for x in leaves if not x.ndim)
        assert held - scalars == (whole // 8 if part in divided else whole)


def test_bfloat16_parameters_cost_twelve_bytes_each(tmp_path):
    """2 for the parameter, 2 for its gradient, 8 for AdamW's moments."""
    config = change(small(), model={"param_dtype": "bfloat16"}, train={"steps": 1})
    run(config, tmp_path / "run")
    per_param = json.loads((tmp_path / "run" / "plan.json").read_text())["bytes_per_param"]
    assert (per_param["params"], per_param["gradients"]) == (2, 2)
    assert per_param["opt_state"] == pytest.approx(8, abs=1e-3)
    setup = prepare(config)
    state = by_path(create_state(config, setup.declared, setup.state_shardings))
    assert sum(x.nbytes for p, x in state.items() if p.startswith("params/")) == 2 * setup.declared.num_params


def test_accumulation_does_not_change_the_loss(tmp_path):
    """2 examples x 4 replicas x 8 slots = 64, against one slot."""
    base = change(small(), parallel={"tensor": 2}, train={"global_batch_size": 64, "steps": 4})
    slots = change(base, train={"microbatch_size": 2})
    assert prepare(slots).batch.num_slots == 8 and prepare(slots).batch.slot_size == 8
    run(base, tmp_path / "one")
    run(slots, tmp_path / "eight")
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "eight")):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)


def test_accumulators_live_in_the_storage_layout():
    """Every array that the accumulation loop carries from slot to slot is an eighth of its parameter."""
    from sharder.train.step import compile_step
    from sharder.train.stepping import Stepper

    config = change(small(), parallel={"policy": "fsdp"}, train={"global_batch_size": 128, "microbatch_size": 4})
    setup = prepare(config)
    state = create_state(config, setup.declared, setup.state_shardings)
    batch = setup.batch.abstract({k: np.zeros((1, 32), np.int32) for k in ("inputs", "targets")})
    compiled = compile_step(setup, Stepper(setup, None, [], None).arguments(state, batch, False))
    loops = [line for line in compiled.as_text().splitlines() if " while(" in line and "f32[2,8,128]" in line]
    # blocks/mlp_in is (2, 64, 128): divided it is (2, 8, 128), and nowhere in the loop's carry is it whole in float32.
    assert loops and not any("f32[2,64,128]" in line for line in loops)


@pytest.mark.parametrize("boundary", [4, 12], ids=["inside an epoch", "past an epoch's end"])
def test_a_stopped_and_resumed_run_has_the_same_metrics(tmp_path, boundary):
    """Dropout and a moving average on; an epoch has 10 steps."""
    config = change(small_dropout(), train={"steps": 16}, checkpoint={"every": 0})
    assert run(config, tmp_path / "whole") == 0
    assert run(change(config, train={"steps": boundary}), tmp_path / "parts") == 0
    assert run(config, tmp_path / "parts", resume="must") == 0
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    exact = ("step", "epoch", "loss_hex", "grad_norm_hex", "fingerprint", "learning_rate", "num_examples")
    assert [[r[k] for k in exact] for r in parts] == [[r[k] for k in exact] for r in whole]
    assert [r["attempt"] for r in parts] == [1] * boundary + [2] * (16 - boundary)


def test_dropout_changes_the_run(tmp_path):
    run(small(), tmp_path / "without")
    run(small_dropout(), tmp_path / "with")
    assert metrics(tmp_path / "without")[0]["loss_hex"] != metrics(tmp_path / "with")[0]["loss_hex"]


class StopAt(StopRequest):
    """Asks to stop once it has been looked at `count` times."""

    def __init__(self, count):
        self.count = count
        super().__init__()

    @property
    def requested(self):
        self.count -= 1
        return self.count < 0

    @requested.setter
    def requested(self, value):
        pass


def test_a_stop_request_saves_and_exits_75(tmp_path):
    assert run(small(), tmp_path / "run", stop=StopAt(3)) == PREEMPTED
    done = metrics(tmp_path / "run")[-1]["step"]
    assert 4 <= done < 12
    assert (tmp_path / "run" / "checkpoints" / str(done) / "manifest.json").exists()
    assert run(small(), tmp_path / "run") == 0
    run(small(), tmp_path / "whole")
    assert compare(tmp_path / "run", tmp_path / "whole").identical


def validations(run_dir):
    return {r["step"]: r["validation_loss"] for r in metrics(run_dir) if "validation_loss" in r}


@pytest.mark.parametrize("steps", [6, 4], ids=["under way", "at the end"])
def test_an_interrupted_evaluation_is_repeated(tmp_path, steps):
    config = change(small(), train={"validate_every": 4, "steps": steps}, checkpoint={"every": 0})
    # Looked at once in each of four steps, and then by the evaluation.
    assert run(config, tmp_path / "run", stop=StopAt(4)) == PREEMPTED
    assert [r["step"] for r in metrics(tmp_path / "run")] == [1, 2, 3, 4] and validations(tmp_path / "run") == {}
    assert (tmp_path / "run" / "checkpoints" / "4" / "manifest.json").exists()
    assert run(config, tmp_path / "run") == 0
    run(config, tmp_path / "whole")
    assert sorted(validations(tmp_path / "whole")) == sorted({4, steps})
    assert validations(tmp_path / "run") == validations(tmp_path / "whole")


def test_a_stop_file_stops_the_run_and_keeps_it_stopped(tmp_path):
    config = change(small(), train={"steps": 100_000}, checkpoint={"every": 0})

    def touch_after_some_steps():
        while len(metrics(tmp_path / "run")) < 3:
            time.sleep(0.01)
        (tmp_path / "run" / "STOP").touch()

    thread = threading.Thread(target=touch_after_some_steps)
    thread.start()
    assert run(config, tmp_path / "run") == PREEMPTED
    thread.join()
    last = metrics(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / str(last) / "manifest.json").exists()
    with pytest.raises(UserError, match="STOP asks this run to stop: remove it to continue"):
        run(config, tmp_path / "run")
    (tmp_path / "run" / "STOP").unlink()
    assert run(change(config, train={"steps": last + 1}), tmp_path / "run") == 0


def test_a_run_stops_when_its_time_is_over(tmp_path):
    config = change(small(), train={"steps": 100_000, "max_minutes": 1e-6}, checkpoint={"every": 0})
    assert run(config, tmp_path / "run") == PREEMPTED
    last = metrics(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / str(last) / "manifest.json").exists()
    log = (tmp_path / "run" / "logs" / "process_0.log").read_text()
    assert "attempt 1, process 0 of 1" in log and f"stopped; resume with the same command: step {last}" in log


def test_a_lost_process_redoes_steps_with_the_same_bits(tmp_path):
    """What a kill between two saves leaves: metrics beyond the last checkpoint, and a folder without a manifest."""
    config = change(small(), train={"steps": 12})
    run(config, tmp_path / "whole")
    run(config, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "12" / "manifest.json").unlink()
    assert run(config, tmp_path / "run") == 0
    records = metrics(tmp_path / "run")
    assert [r["step"] for r in records if r["attempt"] == 2] == [11, 12]
    result = compare(tmp_path / "run", tmp_path / "whole")
    assert result.identical and result.num_redone == 2
    assert (tmp_path / "run" / "checkpoints" / "12.unfinished").exists()


def test_validation_changes_nothing(tmp_path):
    run(small(), tmp_path / "without")
    run(change(small(), train={"validate_every": 1}), tmp_path / "with")
    assert compare(tmp_path / "without", tmp_path / "with").identical
    assert all("validation_loss" in r and "validation_perplexity" in r for r in metrics(tmp_path / "with"))


def test_results_are_fetched_one_step_late(tmp_path, monkeypatch):
    """Nothing of step s leaves the devices before step s+1 was dispatched."""
    log = []
    dispatch, fetch = stepping.Stepper.dispatch, stepping.fetch

    def watched_dispatch(self, state, batch, step, *rest):
        compiled = self.train_step

        def call(*arguments):
            result = compiled(*arguments)
            log.append(("dispatched", step))
            self.known = getattr(self, "known", {}) | {id(result[1]["loss"]): step}
            return result

        self.train_step = call
        try:
            return dispatch(self, state, batch, step, *rest)
        finally:
            self.train_step = compiled

    def watched_fetch(values):
        log.append(("fetched", None))
        return fetch(values)

    monkeypatch.setattr(stepping.Stepper, "dispatch", watched_dispatch)
    monkeypatch.setattr(stepping, "fetch", watched_fetch)
    run(change(small(), checkpoint={"every": 0, "snapshot_every": 0}), tmp_path / "run")
    fetches = [i for i, (what, _) in enumerate(log) if what == "fetched"]
    for number, at in enumerate(fetches[:-1], start=1):
        assert ("dispatched", number + 1) in log[:at], f"step {number} was fetched before step {number + 1} was dispatched"
    assert len(fetches) == 12


def test_a_finished_run_says_so_and_more_steps_are_allowed(tmp_path, capsys):
    run(small(), tmp_path / "run")
    assert run(small(), tmp_path / "run") == 0
    assert "is finished" in capsys.readouterr().out
    assert len(metrics(tmp_path / "run")) == 12
    assert run(change(small(), train={"steps": 14}), tmp_path / "run") == 0
    run(change(small(), train={"steps": 14}), tmp_path / "longer")
    assert compare(tmp_path / "run", tmp_path / "longer").num_compared == 14
    assert compare(tmp_path / "run", tmp_path / "longer").identical


def test_an_existing_run_is_refused_or_resumed_as_asked(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        run(small(), tmp_path / "run", resume="must")
    assert not (tmp_path / "run").exists()
    run(small(), tmp_path / "run")
    with pytest.raises(UserError, match="holds a run already"):
        run(small(), tmp_path / "run", resume="never")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").touch()
    with pytest.raises(UserError, match="is not a run"):
        run(small(), tmp_path / "foreign")


@pytest.mark.parametrize(
    "section, field, value",
    [("train", "seed", 1), ("train", "global_batch_size", 32), ("optimizer", "learning_rate", 1e-4), ("model", "mlp_dim", 256)],
)
def test_other_settings_are_refused_with_what_differs(tmp_path, section, field, value):
    run(change(small(), train={"steps": 1}), tmp_path / "run")
    with pytest.raises(UserError, match=f"--{section}.{field.replace('_', '-')} was .*, is {value}"):
        run(change(small(), **{section: {field: value}}), tmp_path / "run")


def test_other_data_is_refused(tmp_path):
    for name, text in (("one.txt", "abcdefgh" * 400), ("two.txt", "abcdefgx" * 400)):
        (tmp_path / name).write_text(text)
    data = {"source": "text", "validation_fraction": 0.2}
    run(change(small(), data=data | {"path": str(tmp_path / "one.txt")}, train={"steps": 2}), tmp_path / "run")
    with pytest.raises(UserError, match="was trained on other data"):
        run(change(small(), data=data | {"path": str(tmp_path / "two.txt")}, train={"steps": 4}), tmp_path / "run")


def test_a_schedule_does_not_depend_on_the_length_of_the_run(tmp_path):
    run(change(small(), train={"steps": 3}), tmp_path / "short")
    run(change(small(), train={"steps": 12}), tmp_path / "long")
    rates = [[r["learning_rate"] for r in metrics(tmp_path / n)[:3]] for n in ("short", "long")]
    assert rates[0] == rates[1]


def test_the_metrics_line_has_all_fields(tmp_path):
    run(change(small(), train={"steps": 2}), tmp_path / "run")
    record = metrics(tmp_path / "run")[0]
    assert list(record) == [
        "step", "attempt", "epoch", "loss", "loss_hex", "grad_norm", "grad_norm_hex", "learning_rate", "fingerprint", "batch_fingerprint",
        "num_examples",
        "step_time_s", "data_wait_s", "tokens_per_s", "mfu", "mfu_exact", "hfu",
    ]  # fmt: skip
    assert float.fromhex(record["loss_hex"]) == record["loss"] and len(record["fingerprint"]) == 16
    assert record["num_examples"] == 16 and 0 < record["mfu"] and 0 < record["mfu_exact"] < record["hfu"]


def test_log_every_thins_the_lines(tmp_path):
    run(change(small(), train={"log_every": 5}), tmp_path / "run")
    assert [r["step"] for r in metrics(tmp_path / "run")] == [5, 10, 12]


def test_num_params_is_that_of_the_declared_model():
    assert declare(small().model).num_params == sum(np.prod(d.shape) for d in declare(small().model).params.values())

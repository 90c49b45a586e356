"""The command line as a user meets it: real processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from small import RECIPE, environment, sharder

from sharder import checkpoint
from sharder.events import read_json_lines
from sharder.report.verify import compare


def metrics(run_dir):
    return read_json_lines(run_dir / "metrics.jsonl")[0]


def wait_for_step(run_dir, step, process, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        records = metrics(run_dir)
        if records and records[-1]["step"] >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached; exit code {process.poll()}")


def start(*arguments, **popen):
    command = [sys.executable, "-m", "sharder", *map(str, arguments)]
    # A shell's background jobs ignore Ctrl-C, and so would what they start.
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment(), text=True, preexec_fn=heed, **pipes, **popen)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 400 steps on 2 devices."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert sharder("train", RECIPE, "--run-dir", run_dir, *OPTIONS).returncode == 0
    return run_dir


OPTIONS = ("--cluster.cpu-devices", "2", "--train.steps", "400", "--checkpoint.every", "50")


@pytest.mark.parametrize(
    "sign, code", [pytest.param(signal.SIGINT, 75, marks=pytest.mark.slow), (signal.SIGTERM, 75), (signal.SIGKILL, -9)]
)
def test_any_signal_then_the_same_command_gives_the_same_bits(tmp_path, whole, sign, code):
    arguments = ("train", RECIPE, "--run-dir", tmp_path / "run", *OPTIONS)
    process = start(*arguments)
    wait_for_step(tmp_path / "run", 70, process)
    process.send_signal(sign)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == code, output
    stopped_at = metrics(tmp_path / "run")[-1]["step"]
    assert stopped_at < 400
    assert sharder(*arguments).returncode == 0
    resumed = [r for r in metrics(tmp_path / "run") if r["attempt"] == 2]
    # After a request everything was saved; after a kill the steps since the last save are done again.
    assert resumed[0]["step"] == stopped_at + 1 if code == 75 else resumed[0]["step"] <= stopped_at + 1
    result = compare(tmp_path / "run", whole)
    assert result.identical and result.num_compared == 400


def test_a_second_signal_ends_at_once(tmp_path):
    process = start("train", RECIPE, "--run-dir", tmp_path / "run", "--train.steps", "100000", "--cluster.cpu-devices", "2")
    wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(signal.SIGSTOP)  # both signals are pending when it goes on
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=30)
    assert process.returncode == 75


def test_a_signal_before_the_first_step_loses_nothing(tmp_path):
    process = start(
        "train", RECIPE, "--run-dir", tmp_path / "run", "--cluster.cpu-devices", "2", "--cluster.compile-cache", "off"
    )
    while not (tmp_path / "run" / "events.jsonl").exists():
        time.sleep(0.02)
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 75 and "nothing is lost" in output
    assert time.monotonic() - sent < 5
    done = sharder("train", RECIPE, "--run-dir", tmp_path / "run", "--cluster.cpu-devices", "2")
    assert done.returncode == 0, done.stderr


def test_verify_exit_codes(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "copy")
    same = sharder("verify", whole, tmp_path / "copy")
    assert same.returncode == 0 and "400 steps compared (1 .. 400): identical" in same.stdout
    (tmp_path / "other").mkdir()
    shutil.copy(whole / "config.json", tmp_path / "other")
    records = metrics(whole)
    records[6]["fingerprint"] = "0" * 16
    (tmp_path / "other" / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    different = sharder("verify", whole, tmp_path / "other", "--json")
    assert different.returncode == 1
    assert json.loads(different.stdout)["first_difference"] == 7
    assert sharder("verify", whole, tmp_path / "nothing").returncode == 2


def test_a_fingerprint_is_recomputed_from_the_files(whole):
    listed = sharder("checkpoints", whole)
    assert [line.split()[1] for line in listed.stdout.splitlines()] == ["350", "400"]
    found = sharder("checkpoints", whole, "--fingerprint", "400")
    assert found.returncode == 0
    assert found.stdout.count(metrics(whole)[-1]["fingerprint"]) == 2


def test_eval_prints_the_validation_loss_of_the_run(whole):
    logged = metrics(whole)[-1]["validation_loss"]
    result = sharder("eval", whole)
    assert result.returncode == 0 and f"validation loss {logged:.6f}" in result.stdout


def test_eval_works_on_another_number_of_devices(whole):
    logged = metrics(whole)[-1]["validation_loss"]
    result = sharder("eval", whole, "--cluster.cpu-devices", "8", "--parallel.policy", "fsdp")
    loss = float(result.stdout.split("validation loss ")[1].split(",")[0])
    assert loss == pytest.approx(logged, rel=1e-5)


def test_a_relative_run_dir_is_saved_to_and_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for steps in (3, 5):
        result = sharder("train", RECIPE, "--run-dir", "runs/a", "--train.steps", steps, "--cluster.cpu-devices", "1")
        assert result.returncode == 0, result.stderr
    assert "attempt 2, resumed at step 3" in result.stdout
    assert sharder("eval", "runs/a").returncode == 0


def test_print_config_is_json_and_starts_nothing(tmp_path):
    result = sharder("train", "tiny_lm", "--run-dir", tmp_path / "run", "--model.num-layers", "2", "--print-config")
    assert json.loads(result.stdout)["model"]["num_layers"] == 2
    assert not (tmp_path / "run").exists()


BAD = [
    (["train"], "RECIPE is missing"),
    (["train", "nope", "--run-dir", "x"], "there is no recipe 'nope'"),
    (["train", "missing.py:f", "--run-dir", "x"], "there is no file missing.py"),
    (["train", "tiny_lm"], "--run-dir is missing"),
    (["train", "tiny_lm", "--run-dir", "x", "--train.steps", "0"], "must be from 1 to 2**31 - 1"),
    (["train", "tiny_lm", "--run-dir", "x", "--train.stepz", "3"], "--train.steps"),
    (["train", "tiny_lm", "--run-dir", "x", "--data.path", "nowhere.txt"], "nowhere.txt"),
    (["train", "tiny_lm", "--run-dir", "x", "--data.seq-len", "512"], "--data.seq-len is 512, more than the 128 positions"),
    (["train", "tiny_lm", "--run-dir", "x", "--train.global-batch-size", "30", "--cluster.cpu-devices", "4"], "use 28 or 32"),
    (["train", "tiny_lm", "--run-dir", "x", "--cluster.cpu-devices", "4", "--parallel.fsdp", "3"], "but there are 4"),
    (
        ["train", "tiny_lm", "--run-dir", "x", "--cluster.cpu-devices", "4", "--parallel.tensor", "3"],
        "must divide the 4 devices",
    ),
    (["train", "tiny_lm", "--run-dir", "x", "--optimizer.name", "sgd"], "--optimizer.name"),
    (
        ["train", "tiny_lm", "--run-dir", "x", "--optimizer.name", "muon", "--parallel.reduction", "exact"],
        "--optimizer.name is muon in exact mode",
    ),
    (["train", "llama_tiny", "--run-dir", "x", "--model.num-kv-heads", "3"], "--model.num-kv-heads is 3"),
    (["generate", "x", "--prompt", "a", "--parallel.tensor", "2"], "x is not a run"),
    (["train", "mlp", "--run-dir", "x", "--data.source", "text"], "MLP reads only synthetic"),
    (["generate", "x", "--prompt", "a"], "x is not a run"),
    (["eval", "x"], "x is not a run"),
    (["checkpoints", "x"], "x is not a run"),
    (["checkpoints", "x", "--fingerprint", "3"], "x is not a run"),
    (["check", "tiny_lm", "--data.path", "nowhere.txt"], "nowhere.txt does not exist"),
    (["check", "tiny_lm", "--train.global-batch-size", "8192"], "examples, less than one batch of 8192"),
    (
        ["check", "tiny_lm", "--data.path", "nowhere.txt", "--parallel.fsdp", "3", "--data.seq-len", "512"],
        "6 reasons why this run cannot start: - --parallel.data",
    ),
    (["train", "tiny_lm", "--run-dir", "/dev/null"], "--run-dir /dev/null is a file, or lies below one"),
    (["train", "tiny_lm", "--run-dir", "nonsense://b/run"], "--run-dir nonsense://b/run cannot be opened"),
    (["eval", "nonsense://b/run"], "--run-dir nonsense://b/run cannot be opened"),
    (["watch", "gs://b/run"], "gs://b/run is an address, but this command takes the folder of a run"),
    (
        ["launch", "--processes", "2", "--engine", "ray", "--", "train", "tiny_lm", "--run-dir", "s3://b/r"],
        "and --checkpoint.mirror s3://b/r for a copy",
    ),
    (["launch", "--processes", "2", "--", "train", "tiny_lm", "--run-dir", "x", "--data.path", "nowhere.txt"], "nowhere.txt"),
    (["launch", "--processes", "2"], "there is nothing to launch"),
    (["launch", "--processes", "0", "--", "recipes"], "must be at least 1"),
    (
        ["launch", "--processes", "2", "--devices-per-process", "2", "--", "train", "tiny_lm", "--cluster.cpu-devices", "4"],
        "say two things",
    ),
    (["nonsense"], "there is no command 'nonsense'"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=[" ".join(a)[:60] for a, _ in BAD])
def test_bad_input_gets_one_message_and_exit_code_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = sharder(*arguments)
    assert result.returncode == 2
    flat = " ".join(result.stderr.replace("│", " ").split())
    assert message in flat
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "x").exists()


def test_a_partial_environment_names_the_missing_variable(tmp_path):
    result = sharder("train", RECIPE, "--run-dir", tmp_path / "run", JAX_NUM_PROCESSES="2", JAX_PROCESS_ID="0")
    assert result.returncode == 2 and "JAX_COORDINATOR_ADDRESS" in result.stderr


def test_help_of_a_recipe_shows_its_defaults():
    result = sharder("train", "gpt", "--help")
    assert result.returncode == 0 and "(default: 50432)" in result.stdout


@pytest.mark.parametrize("command, usage", [("train", "sharder train RECIPE"), ("generate", "sharder generate RUN")])
def test_help_without_a_recipe_or_run_says_to_name_one(command, usage):
    result = sharder(command, "--help")
    assert result.returncode == 0 and f"usage: {usage}" in result.stdout and "name it before --help" in result.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["written at the end", "written at once"])
@pytest.mark.parametrize("arguments", [["recipes"], ["train", "tiny_lm", "--help"]], ids=" ".join)
def test_output_that_nobody_reads_any_more_ends_a_command_quietly(arguments, unbuffered):
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "sharder", *arguments]
    ran = subprocess.run(
        command, env=environment(PYTHONUNBUFFERED=unbuffered), stdout=writes, stderr=subprocess.PIPE, text=True
    )
    os.close(writes)
    assert (ran.returncode, ran.stderr) == (141, "")


def limited(*arguments, file_bytes):
    """The command line where no file may become larger: what a full disk looks like."""
    code = "import resource, sys; n = int(sys.argv[1]); resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)); sys.argv[1:2] = []\n"
    command = [sys.executable, "-c", code + "from sharder.cli import main; main()", file_bytes, *arguments]
    return subprocess.run(list(map(str, command)), env=environment(), capture_output=True, text=True, timeout=300)


def test_without_room_training_goes_on_to_the_end_where_the_last_save_fails_with_one_message(tmp_path):
    arguments = ("train", RECIPE, "--run-dir", tmp_path / "run", "--cluster.cpu-devices", "1")
    assert sharder(*arguments, "--train.steps", "4").returncode == 0
    full = limited(*arguments, file_bytes=200_000)
    # tensorstore's own threads may print meanwhile that their event loop is closed.
    assert full.returncode == 2 and full.stderr.count("error: ") == 1, full.stderr
    assert "checkpoints/12 cannot be written" in full.stderr and "the last whole checkpoint is of step 4" in full.stderr
    assert full.stdout.count("Training goes on, and the next save tries again") == 1 and "checkpoints/5 cannot" in full.stdout
    failed = [e["step"] for e in read_json_lines(tmp_path / "run" / "events.jsonl")[0] if e["kind"] == "save_failed"]
    assert failed == [5, 10, 12] and checkpoint.list_steps(tmp_path / "run") == [4]
    again = sharder(*arguments)
    assert again.returncode == 0, again.stderr
    records = metrics(tmp_path / "run")
    assert [r["step"] for r in records] == [*range(1, 13), *range(5, 13)]
    assert [r["fingerprint"] for r in records[4:12]] == [r["fingerprint"] for r in records[12:]]


def test_a_second_trainer_of_a_run_is_refused(tmp_path):
    arguments = ("train", RECIPE, "--run-dir", tmp_path / "run", "--train.steps", "100000", "--cluster.cpu-devices", "1")
    first = start(*arguments)
    try:
        wait_for_step(tmp_path / "run", 6, first)
        second = sharder(*arguments)
        listed = sharder("checkpoints", tmp_path / "run")
    finally:
        first.kill()
        first.communicate()
    assert second.returncode == 2 and f"in use by process {first.pid} on " in second.stderr
    assert listed.returncode == 0


def test_ctrl_c_outside_training_is_one_line_and_130(tmp_path):
    """The recipe waits, so that the interrupt finds the command line before it trains."""
    (tmp_path / "mine.py").write_text(f"import time; open({str(tmp_path / 'begun')!r}, 'w').close(); time.sleep(60)")
    process = start("check", f"{tmp_path}/mine.py:f")
    while not (tmp_path / "begun").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=30)[0]
    assert (process.returncode, output) == (130, "interrupted.\n")


def test_processes_that_do_not_meet_are_named_not_aborted(tmp_path):
    setting = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:9", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    result = sharder("train", RECIPE, "--run-dir", tmp_path / "run", "--cluster.bringup-timeout-s", "2", **setting)
    assert result.returncode == 2 and "process 1 of 2 did not meet process 0 at 127.0.0.1:9" in result.stderr


def test_check_prints_all_findings_as_json_and_nothing_else():
    done = sharder("check", "gpt", "--cluster.cpu-devices", "10", "--parallel.fsdp", "2", "--parallel.tensor", "5", "--json")
    printed = json.loads(done.stdout)
    assert done.returncode == 2 and set(printed) == {"findings", "plan", "accounting"}
    told = {(f["rule"], f["path"], f["factor"]) for f in printed["findings"]}
    heads, mlp = ("attn_out", "q", "q_bias"), ("mlp_in", "mlp_in_bias", "mlp_out")
    assert {("heads", f"blocks/{p}", 5) for p in heads} | {("dimension", f"blocks/{p}", 5) for p in mlp} <= told


def test_check_without_findings_prints_plan_and_accounting_as_json():
    done = sharder("check", RECIPE, "--cluster.cpu-devices", "4", "--json")
    printed = json.loads(done.stdout)
    assert done.returncode == 0 and printed["findings"] == []
    assert printed["plan"]["mesh"] == {"data": 1, "fsdp": 4, "tensor": 1} and printed["accounting"]["global_batch_size"] == 16


def test_check_shows_who_holds_what_and_writes_a_figure(tmp_path):
    done = sharder(
        "check", RECIPE, "--cluster.cpu-devices", "4", "--show", "--param", "blocks/q", "--out", tmp_path / "plan.svg"
    )
    assert done.returncode == 0 and "blocks/q" in done.stdout and "by strategy" in done.stdout
    assert (tmp_path / "plan.svg").exists()

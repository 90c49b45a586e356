"""The page of a run: from recorded files only, whatever is missing named, whatever is cut off skipped."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small import RECIPE, environment, sharder

from sharder.config import UserError
from sharder.instrument.words import doubt
from sharder.launch.ledger import make_ledger
from sharder.report import timeline
from sharder.report.page import make_page, write_report
from sharder.report.read import read_run
from sharder.report.timeline import FAULTS, ORDINARY, STOPS, make_timeline


def record(step: int, attempt: int = 1, **more) -> dict:
    return {"step": step, "attempt": attempt, "loss": 5.0 / step, "loss_hex": (5.0 / step).hex(), "grad_norm": 1.0, "learning_rate": 1e-3,
            "fingerprint": f"{step:016x}", "step_time_s": 0.1, "data_wait_s": 0.0, "tokens_per_s": 100.0, "mfu": 0.3, "mfu_exact": 0.31, "hfu": 0.32} | more  # fmt: skip


def event(time_s: float, kind: str, attempt: int = 1, **more) -> dict:
    return {"time_s": 1000 + time_s, "kind": kind, "attempt": attempt, "process": 0, "step": None, **more}


def make_run(folder, records, events=(), tail: str = ""):
    from sharder.config import to_dict
    from sharder.recipes import load_recipe

    folder.mkdir()
    facts = {"config": to_dict(load_recipe("tiny_lm")), "config_hash": "ab", "versions": {"jax": "0.10.2"}, "num_processes": 1,
             "devices": {"kind": "cpu", "platform": "cpu", "count": 1}, "data": {"fingerprint": "f" * 64, "num_examples": 7},
             "peak_flops": 1e11, "peak_source": "measured"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return folder


def test_what_was_not_recorded_leaves_a_named_gap(tmp_path):
    page = make_page([read_run(make_run(tmp_path / "a", [record(1), record(2)]))])
    gaps = re.findall(r'class="gap">Not recorded: ([^.<]+\S*)', page)
    assert {g.split()[0] for g in gaps} == {
        "events.jsonl.",
        "steps/process_N.jsonl.",
        "profile/profile.json.",
        "predicted",
        "collectives",
        "plan.json.",
    }
    assert page.count("<svg") == 6  # loss, norm, rate, tokens/s, step time, utilisation


@pytest.mark.parametrize("name, lacks", [("plan.json", "bytes_per_device"), ("profile/profile.json", "shares")])
def test_a_file_of_another_program_is_named(tmp_path, name, lacks):
    run_dir = make_run(tmp_path / "a", [record(1)])
    (run_dir / "profile").mkdir()
    (run_dir / name).write_text("{}")
    with pytest.raises(UserError, match=f"{name} lacks {lacks}, .*: another program wrote it. Remove it"):
        read_run(run_dir)


def test_a_truncated_line_is_skipped_and_counted(tmp_path):
    page = make_page([read_run(make_run(tmp_path / "a", [record(1)], tail='{"step": 2, "lo'))])
    assert "1 unreadable line(s) of metrics.jsonl skipped" in page


@pytest.mark.parametrize("hfu, is_doubted", [(0.99, False), (1.25, True)])
def test_more_than_the_measured_peak_is_doubted(tmp_path, hfu, is_doubted):
    page = make_page([read_run(make_run(tmp_path / "a", [record(s, hfu=hfu, mfu=1.5) for s in (1, 2, 3)]))])
    assert ("125.0% of the peak cannot be" in page) == is_doubted == ("<p class=bad>" in page)


def test_a_datasheets_peak_is_not_doubted():
    assert doubt(1.25, "measured") and not doubt(1.25, "datasheet") and not doubt(None, "measured")


@pytest.mark.parametrize("command", ["report", "watch"])
def test_a_folder_that_is_no_run_is_refused(tmp_path, command):
    done = sharder(command, tmp_path)
    assert done.returncode == 2 and "is not a run" in done.stderr and "Traceback" not in done.stderr


def test_a_run_without_metrics_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no metrics: metrics.jsonl is missing or empty"):
        write_report([make_run(tmp_path / "a", [])], None)


def test_several_runs_are_overlaid_and_compared(tmp_path):
    runs = [make_run(tmp_path / n, [record(s) for s in (1, 2, 3)]) for n in ("a", "b")]
    other = make_run(tmp_path / "c", [record(1), record(2, loss_hex="0x1p+3", fingerprint="f" * 16)])
    with pytest.raises(UserError, match="name its file with --out"):
        write_report(runs, None)
    page = write_report([*runs, other], tmp_path / "all.html").read_text()
    assert "identical" in page and "first difference at step 2" in page


def test_runs_whose_folders_have_the_same_name_are_told_apart(tmp_path):
    runs = []
    for place in ("x", "y"):
        (tmp_path / place).mkdir()
        runs.append(make_run(tmp_path / place / "a", [record(1), record(2)]))
    page = write_report(runs, tmp_path / "out.html").read_text()
    first_figure = page[page.index("<svg") : page.index("</svg>")]
    assert all(str(run) in first_figure for run in runs)
    with pytest.raises(UserError, match="is named more than once"):
        write_report([runs[0], runs[0]], tmp_path / "out.html")


def test_the_page_needs_no_network(tmp_path):
    page = make_page([read_run(make_run(tmp_path / "a", [record(1), record(2)], [event(0, "start"), event(1, "first_step")]))])
    named = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert all(
        url.startswith(("http://www.w3.org/", "http://purl.org/", "http://creativecommons.org/", "https://matplotlib.org/"))
        for url in named
    )
    assert "<script" not in page and "<link" not in page and "@import" not in page


def test_identifiers_of_figures_do_not_collide(tmp_path):
    page = make_page([read_run(make_run(tmp_path / "a", [record(s) for s in range(1, 9)]))])
    found = re.findall(r' id="([^"]+)"', page)
    assert len(found) == len(set(found)) > 50


def test_an_attempt_that_ended_without_a_word_is_a_fault():
    events = [
        event(0, "start"),
        event(2, "first_step", step=1),
        event(6, "save", step=5),
        event(10, "start", 2),
        event(11, "first_step", 2),
        event(14, "end", 2),
    ]
    found = make_timeline(events, {1: 1008.0})
    assert [(s.kind, s.attempt, s.start_s, s.end_s) for s in found.spans] == [
        ("starting", 1, 0, 2), ("stepping", 1, 2, 8), ("down", 1, 8, 10), ("starting", 2, 10, 11), ("stepping", 2, 11, 14)
    ]  # fmt: skip
    assert [(m.is_fault, m.label) for m in found.marks] == [(True, "attempt 1 ended without a word, after step 5")]


def test_an_attempt_begins_with_its_processes_as_in_the_ledger():
    """Their start is written down later, with its own time: it is neither before the run nor time in which nothing ran."""
    events = [
        event(0, "phase", name="start-up"), event(4, "start"), event(6, "first_step"), event(8, "phase", name="step"),
        event(10, "phase", 2, name="start-up"), event(14, "start", 2), event(16, "first_step", 2), event(18, "end", 2),
    ]  # fmt: skip
    found = make_timeline(events)
    assert [(s.kind, s.attempt, s.start_s, s.end_s) for s in found.spans] == [
        ("starting", 1, 0, 6), ("stepping", 1, 6, 8), ("down", 1, 8, 10), ("starting", 2, 10, 16), ("stepping", 2, 16, 18)
    ]  # fmt: skip
    assert make_ledger(events, []).wall_s == found.spans[-1].end_s


def test_a_supervisor_names_the_culprit_of_an_end():
    """Its events, and the fault that a test brings about, belong to no attempt; the end counts when it came, not when it was seen."""
    culprit = {"process": 1, "what": "was ended by SIGKILL", "phase": "step", "step": 4, "lines": ["secret"], "exit_code": -9}
    events = [
        event(0, "launch", None), event(1, "start"), event(2, "first_step", step=1), event(3, "snapshot", step=2), event(5, "new_step", step=4),
        event(6, "fault", None, what="kill", phase="step", number=1), event(9, "ended", None, code=-9, failed_at=1007, culprit=culprit),
        event(9, "restart", None), event(10, "spawn", None), event(11, "start", 2), event(12, "first_step", 2), event(14, "end", 2),
        event(15, "ended", None, code=0, failed_at=None, culprit=None), event(15, "closed", None, code=0),
    ]  # fmt: skip
    assert [(m.time_s, m.is_fault, m.label) for m in make_timeline(events).marks] == [
        (6, True, "fault: kill, phase step"),
        (7, True, "process 1 was ended by SIGKILL, step 4"),
    ]


def test_every_event_that_is_written_is_known_to_the_timeline():
    """A new one would be drawn as a fault."""
    source = Path(timeline.__file__).parent.parent
    text = "".join(p.read_text() for folder in ("", "train", "launch", "checkpoint") for p in (source / folder).glob("*.py"))
    written = set(re.findall(r'(?:events|journal)\.write\(\s*"(\w+)"', text)) | {"end", "fault"}
    assert {"snapshot", "ended", "phase"} <= written <= ORDINARY | STOPS | FAULTS


def test_the_page_of_a_killed_and_resumed_run(tmp_path):
    """A real run, killed, resumed by the same command: both attempts, the fault, and every part that a run records."""
    run = tmp_path / "run"
    arguments = [
        "train",
        RECIPE,
        "--run-dir",
        str(run),
        "--cluster.cpu-devices",
        "1",
        "--train.steps",
        "400",
        "--checkpoint.every",
        "10",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "sharder", *arguments], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 25) and process.poll() is None:
        assert time.monotonic() < deadline, "no 25 steps"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = sharder(*("60" if a == "400" else a for a in arguments))
    assert done.returncode == 0, done.stderr
    done = sharder("report", run)
    assert done.returncode == 0, done.stderr
    page = (run / "report.html").read_text()
    assert "attempt 1 ended without a word" in page and "attempt 2" in page and "process 0" in page
    assert set(re.findall(r"Not recorded: ([^.<]+)", page)) == {
        "profile/profile",
        "predicted and measured memory",
        "collectives of the compiled step",
    }
    assert "step 60 of 60" in " ".join(sharder("watch", run).stdout.split())

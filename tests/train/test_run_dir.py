"""The folder of a run: who may use it, and what a damaged one is told."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from small import small

from sharder import checkpoint
from sharder.config import ParallelConfig, UserError, to_dict
from sharder.train.run_dir import RunLock, finished_saves, is_about_room, mode_asked_for, no_room, open_attempt


def begun(run_dir, events=(), manifests=()):
    """A run as its files tell it: `manifests` by name of a folder under checkpoints, None for a whole one."""
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps({"config": to_dict(small())}))
    (run_dir / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    for name, text in dict(manifests).items():
        (run_dir / "checkpoints" / name).mkdir(parents=True)
        if text is None:
            checkpoint.write_manifest(run_dir / "checkpoints" / name, {"step": int(name), "leaves": {}})
        else:
            (run_dir / "checkpoints" / name / "manifest.json").write_text(text)
    return run_dir


SAVED = [{"kind": k, "step": s, "attempt": 1} for k, s in (("start", None), ("save", 5), ("saved", 5), ("save", 10))]


def test_a_folder_in_use_is_refused_naming_the_holder(tmp_path):
    lock = RunLock(tmp_path / "run")
    lock.take()
    code = "import sys; from pathlib import Path; from sharder.train.run_dir import RunLock; RunLock(Path(sys.argv[1])).take()"
    result = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], capture_output=True, text=True)
    lock.release()
    assert f"in use by process {os.getpid()} on " in result.stderr


def test_a_lock_ends_with_its_process(tmp_path):
    code = "import os, sys; from pathlib import Path; from sharder.train.run_dir import RunLock; RunLock(Path(sys.argv[1])).take(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "run"]).returncode == 9
    lock = RunLock(tmp_path / "run")
    lock.take()
    lock.release()


def test_a_lock_leaves_nothing_where_no_run_was_begun(tmp_path):
    lock = RunLock(tmp_path / "a" / "run")
    lock.take()
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/run", "dead"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "dead").symlink_to(tmp_path / "nowhere" / "else")
    with pytest.raises(UserError, match=f"--run-dir .*{name} .*[Cc]hoose another folder"):
        RunLock(tmp_path / name).take()


def test_a_foreign_folder_gets_no_lock(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="exists and is not a run"):
        RunLock(tmp_path).take()
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_damaged_events_do_not_stop_a_resume(tmp_path):
    run_dir = begun(tmp_path / "run", manifests={"5": None})
    (run_dir / "events.jsonl").write_bytes(b'{"attempt": 3}\n\xff\n42\n{"attempt": "x"}\n{"attempt": null}\n')
    assert open_attempt(run_dir, "auto", small()).number == 4


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 10}'])
def test_a_checkpoint_with_a_damaged_manifest_is_none(tmp_path, content):
    run_dir = begun(tmp_path / "run", SAVED, {"5": None, "10": content})
    assert open_attempt(run_dir, "auto", small()).resume_step == 5


@pytest.mark.parametrize("manifests", [{}, {"5": "{"}, {"5.damaged": "{"}], ids=["gone", "damaged", "set aside"])
def test_a_run_that_lost_its_checkpoints_does_not_begin_again(tmp_path, manifests):
    run_dir = begun(tmp_path / "run", SAVED, manifests)
    with pytest.raises(
        UserError, match="no checkpoint that can be read, although it saved checkpoints up to step 5.*begin again in another"
    ):
        open_attempt(run_dir, "auto", small())


def test_a_run_that_never_finished_a_save_begins_again(tmp_path):
    run_dir = begun(tmp_path / "run", SAVED[:2])
    (run_dir / "checkpoints" / "5.orbax-checkpoint-tmp").mkdir(parents=True)
    assert open_attempt(run_dir, "auto", small()).resume_step is None


def test_a_save_that_was_begun_is_not_finished():
    failed = [{"kind": "save", "step": 12}, {"kind": "save_failed", "step": 12}, {"kind": "end", "step": 12}]
    assert finished_saves(SAVED + failed) == {5}


@pytest.mark.parametrize(
    "error, about_room",
    [
        (OSError(28, "No space left on device"), True),
        (PermissionError(13, "Permission denied", "RUN/metrics.jsonl"), True),
        (FileNotFoundError(2, "No such file or directory", "data/episode.mp4"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),
    ],
    ids=str,
)
def test_only_what_concerns_the_files_of_a_run_is_about_room(tmp_path, error, about_room):
    if error.filename:
        error.filename = error.filename.replace("RUN", str(tmp_path))
    assert is_about_room(tmp_path, error) == about_room


def test_auto_is_the_mode_of_a_run_that_exists(tmp_path):
    auto = dataclasses.replace(small(), parallel=ParallelConfig())
    assert mode_asked_for(tmp_path, auto) == "auto"
    exact = dataclasses.replace(small(), parallel=ParallelConfig(reduction="exact"))
    (tmp_path / "config.json").write_text(json.dumps({"config": to_dict(exact)}))
    assert mode_asked_for(tmp_path, auto) == "exact" and mode_asked_for(tmp_path, small()) == "fast"


def test_no_room_names_the_file_the_last_checkpoint_and_what_to_do(tmp_path):
    run_dir = begun(tmp_path / "run", manifests={"5": None})
    text = str(no_room(run_dir, OSError(28, "No space left on device", "x/metrics.jsonl")))
    assert (
        "x/metrics.jsonl cannot be written: No space left" in text and "of step 5" in text and "Free space on the disk" in text
    )

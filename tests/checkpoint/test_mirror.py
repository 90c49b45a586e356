"""A mirror at a remote address, here a file system in memory that fails when it is told to."""

import dataclasses
import errno
import os
import shutil

import fsspec
import pytest
from flaky import Flaky, empty
from small import small

from sharder import checkpoint
from sharder.checkpoint.mirror import ATTEMPTS, Mirror
from sharder.config import UserError
from sharder.events import read_json_lines
from sharder.report.verify import compare
from sharder.stop import StopRequest
from sharder.train.attempt import Branch
from sharder.train.loop import train


@pytest.fixture
def url(monkeypatch):
    return empty(monkeypatch)


def config(url, **train_fields):
    made = dataclasses.replace(small(), checkpoint=dataclasses.replace(small().checkpoint, mirror=url))
    return dataclasses.replace(made, train=dataclasses.replace(made.train, **train_fields))


def kinds(run_dir, kind):
    return [e["step"] for e in read_json_lines(run_dir / "events.jsonl")[0] if e["kind"] == kind]


def test_a_run_whose_folder_is_gone_goes_on_from_its_mirror(url, tmp_path, capsys):
    assert train(config(url), tmp_path / "run", "auto", StopRequest()) == 0
    assert Mirror(url).steps() == checkpoint.list_steps(tmp_path / "run") == [10, 12]
    shutil.move(tmp_path / "run", tmp_path / "lost")
    assert train(config(url, steps=14), tmp_path / "run", "auto", StopRequest()) == 0
    assert "the checkpoint of step 12 was fetched from flaky://bucket/run" in capsys.readouterr().out
    assert [r["step"] for r in read_json_lines(tmp_path / "run" / "metrics.jsonl")[0] if r["attempt"] == 2] == [13, 14]
    train(config(None, steps=14), tmp_path / "whole", "auto", StopRequest())
    assert compare(tmp_path / "run", tmp_path / "whole").identical


def test_what_is_kept_for_good_stays_there_although_a_new_folder_lacks_it(url, tmp_path):
    kept = dataclasses.replace(config(url).checkpoint, keep_every=5, keep_last=1)
    first = dataclasses.replace(config(url), checkpoint=kept)
    train(first, tmp_path / "run", "auto", StopRequest())
    train(dataclasses.replace(first, train=config(url, steps=14).train), tmp_path / "new", "auto", StopRequest())
    assert Mirror(url).steps() == [5, 10, 14] and checkpoint.list_steps(tmp_path / "new") == [14]


def test_failures_are_tried_again(url, tmp_path):
    Flaky.failures = ATTEMPTS - 1
    assert train(config(url), tmp_path / "run", "auto", StopRequest()) == 0
    assert kinds(tmp_path / "run", "mirrored") == [5, 10, 12] and Flaky.failures == 0


def test_a_mirror_that_does_not_answer_costs_the_copy_and_not_the_run(url, tmp_path, capsys):
    Flaky.failures = 10**9
    assert train(config(url), tmp_path / "run", "auto", StopRequest()) == 0
    assert kinds(tmp_path / "run", "mirror_failed") == [5, 10, 12] and checkpoint.list_steps(tmp_path / "run") == [10, 12]
    assert "503 try again" in capsys.readouterr().out


def test_a_torn_upload_is_no_checkpoint(url, tmp_path):
    """The manifest goes last; what is cut off there is found when it is fetched, and the one before it is used."""
    train(config(url), tmp_path / "run", "auto", StopRequest())
    largest = max((p for p in Flaky.store if "/12/params/d/" in p), key=lambda p: Flaky.store[p].size)
    with fsspec.filesystem("flaky").open(largest, "wb") as file:
        file.write(b"torn")
    (tmp_path / "new").mkdir()
    assert Mirror(url).fetch(tmp_path / "new") == 10
    assert checkpoint.list_steps(tmp_path / "new") == [10]


def test_a_full_disk_here_is_not_laid_at_the_mirrors_door(url, tmp_path, monkeypatch):
    train(config(url), tmp_path / "run", "auto", StopRequest())
    asked = []

    def full(self, there, here, **options):
        asked.append(here)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), here)

    monkeypatch.setattr(Flaky, "get_file", full)
    with pytest.raises(UserError, match="No space left on device; there is no whole checkpoint yet. Free space"):
        train(config(url), tmp_path / "new", "auto", StopRequest())
    assert len(asked) == 1


def test_an_address_holds_one_run(url, tmp_path):
    train(config(url), tmp_path / "run", "auto", StopRequest())
    with pytest.raises(UserError, match="holds another run"):
        train(config(url), tmp_path / "other", "never", StopRequest())


def test_a_run_that_went_back_leaves_no_later_checkpoint_there(url, tmp_path):
    train(config(url), tmp_path / "run", "auto", StopRequest())
    assert train(config(url, steps=11), tmp_path / "run", "auto", StopRequest(), Branch(tmp_path / "run", 10, rewind=True)) == 0
    assert Mirror(url).steps() == [10, 11]


def test_an_address_that_nothing_opens_is_refused():
    with pytest.raises(UserError, match="nonsense://x cannot be opened"):
        Mirror("nonsense://x")

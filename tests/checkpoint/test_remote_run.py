"""A run whose --run-dir is an address, here of a file system in memory that fails when it is told to."""

import dataclasses
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
from flaky import Flaky, empty
from small import small

from sharder import checkpoint
from sharder.checkpoint import mirror as module
from sharder.checkpoint.mirror import ATTEMPTS
from sharder.checkpoint.reading import bring_branch, bring_near, fetch_run
from sharder.checkpoint.remote import RemoteRun, open_store
from sharder.checkpoint.staging import VARIABLE, base, settle, staging_folder
from sharder.config import UserError
from sharder.events import read_json_lines
from sharder.report.verify import compare
from sharder.serve.checkpoints import list_others
from sharder.serve.checkpoints import run as run_checkpoints
from sharder.stop import StopRequest
from sharder.train.attempt import parse_branch
from sharder.train.loop import train


@pytest.fixture
def url(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "here"))
    return empty(monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run, in a folder."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert train(made(14), run_dir, "auto", StopRequest()) == 0
    return run_dir


def made(steps):
    config = small()
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=steps),
        # What lies in the memory of this host is no help to a run that has lost its host.
        checkpoint=dataclasses.replace(config.checkpoint, snapshot_every=0),
    )


def go(url, steps=12, resume="auto", branch=None, **checkpoint_fields):
    run_dir, config = settle(url, made(steps))
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **checkpoint_fields))
    return train(config, run_dir, resume, StopRequest(), branch)


def on_host(monkeypatch, tmp_path, name):
    monkeypatch.setenv(VARIABLE, str(tmp_path / name))


def checkpoints(arguments):
    return run_checkpoints(arguments, "")


def there(url):
    return RemoteRun(url, staging_folder(url)).steps()


def damage(url, step):
    """Flips a byte in the store."""
    largest = max((p for p in Flaky.store if f"/{step}/params/d/" in p), key=lambda p: Flaky.store[p].size)
    content = bytearray(Flaky.store[largest].getvalue())
    content[len(content) // 2] ^= 0xFF
    with fsspec.filesystem("flaky").open(largest, "wb") as file:
        file.write(bytes(content))


def test_a_run_lives_at_an_address_and_its_staging_folder_may_go(url, tmp_path, whole, capsys):
    assert go(url) == 0 and there(url) == [10, 12]
    shutil.rmtree(tmp_path / "here")
    assert go(url, 14) == 0
    assert "the checkpoint of step 12 was fetched from flaky://bucket/run" in capsys.readouterr().out
    assert compare(fetch_run(url, "none"), whole).identical
    # All that the run noted is there, up to its end.
    assert [e["kind"] for e in read_json_lines(fetch_run(url, "none") / "events.jsonl")[0]][-1] == "end"
    assert len(checkpoint.list_steps(staging_folder(url))) == 2


def test_a_store_that_fails_at_first_is_tried_again(url):
    Flaky.failures = ATTEMPTS - 1
    assert go(url, 5) == 0 and there(url) == [5] and Flaky.failures == 0


def test_a_store_that_is_down_at_the_start_is_an_error_with_a_way_out(url):
    Flaky.failures = 10**9
    with pytest.raises(UserError, match="flaky://bucket/run cannot be used: 503 try again. See that it answers"):
        go(url)


def down_from(monkeypatch, step):
    """The store is down from the first copy of this checkpoint on."""
    upload = RemoteRun.upload

    def fails(self, run_dir, at):
        if at >= step:
            Flaky.failures = 10**9
        return upload(self, run_dir, at)

    monkeypatch.setattr(RemoteRun, "upload", fails)


def test_a_store_that_goes_down_costs_the_copies_and_the_end_says_where_the_run_is(url, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        down_from(patch, 10)
        with pytest.raises(UserError, match="checkpoint of step 12 is not in flaky://bucket/run .503 try again., but in "):
            go(url)
    assert "flaky://bucket/run: the checkpoint of step 10 was not copied: 503" in capsys.readouterr().out
    Flaky.failures = 0
    assert there(url) == [5]
    assert go(url) == 0 and there(url) == [5, 10, 12]
    assert "step 12 had not got to flaky://bucket/run: it is copied now" in capsys.readouterr().out


@pytest.mark.slow
def test_what_never_got_there_is_moved_aside_when_the_run_went_on_elsewhere(url, tmp_path, monkeypatch, capsys, whole):
    with monkeypatch.context() as patch, pytest.raises(UserError, match="is not in"):
        down_from(patch, 10)
        go(url)
    Flaky.failures = 0
    on_host(monkeypatch, tmp_path, "other")
    assert go(url, 8) == 0 and there(url) == [5, 8]
    on_host(monkeypatch, tmp_path, "here")
    assert go(url, 14) == 0
    err = capsys.readouterr().err
    assert "held checkpoints that flaky://bucket/run does not have (of steps 10, 12)" in err
    (aside,) = base().glob("*.aside-1")
    assert f"kept in {aside}" in err and checkpoint.list_steps(aside) == [10, 12]
    records = read_json_lines(staging_folder(url) / "metrics.jsonl")[0]
    assert [r["step"] for r in records if r["attempt"] == 3] == [9, 10, 11, 12, 13, 14]
    assert compare(staging_folder(url), whole).identical


def test_the_attempt_that_began_last_owns_the_run(url, monkeypatch):
    opened = RemoteRun.opened

    def taken_over(self):
        opened(self)
        self._fs.pipe_file(self._at("attempt.json"), json.dumps({"attempt": 7, "staging": "x", "host": "elsewhere"}).encode())

    monkeypatch.setattr(RemoteRun, "opened", taken_over)
    with pytest.raises(UserError, match="was taken over: attempt 7 began on elsewhere while this one, attempt 1, went on"):
        go(url)
    assert there(url) == []


@pytest.mark.slow
def test_damage_here_is_mended_from_there(url, whole, capsys):
    assert go(url) == 0
    here = checkpoint.entry(staging_folder(url), 12) / "params" / "d"
    largest = max(here.iterdir(), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    largest.write_bytes(content)
    assert go(url, 14) == 0
    assert "set aside as checkpoints/12.damaged" in capsys.readouterr().out
    assert [r["step"] for r in read_json_lines(staging_folder(url) / "metrics.jsonl")[0] if r["attempt"] == 2] == [13, 14]
    assert compare(staging_folder(url), whole).identical


def test_damage_there_costs_the_steps_since_the_checkpoint_before_it(url, tmp_path, whole):
    assert go(url) == 0
    damage(url, 12)
    shutil.rmtree(tmp_path / "here")
    assert go(url, 14) == 0
    assert compare(staging_folder(url), whole).identical
    assert [r["step"] for r in read_json_lines(staging_folder(url) / "metrics.jsonl")[0] if r["attempt"] == 2][0] == 11
    assert there(url) == [10, 14]


@pytest.mark.slow
def test_going_back_fetches_what_is_there_alone(url, tmp_path, whole):
    assert go(url) == 0
    shutil.rmtree(tmp_path / "here")
    back = parse_branch(bring_branch(f"{url}@10", url), True)
    assert go(url, 14, branch=back) == 0
    assert there(url) == [10, 14] and compare(staging_folder(url), whole).identical


@pytest.mark.slow
def test_a_branch_remembers_the_address_that_it_left(url, tmp_path):
    assert go(url, 5) == 0
    branch = parse_branch(bring_branch(f"{url}@5", str(tmp_path / "b")), False)
    for steps in (6, 7):  # the second time it is resumed
        assert train(made(steps), tmp_path / "b", "auto", StopRequest(), branch) == 0
    assert json.loads((tmp_path / "b" / "config.json").read_text())["branched_from"]["run"] == url


def test_commands_that_read_get_what_they_need(url, tmp_path):
    assert go(url) == 0
    on = staging_folder(url, ".read")
    assert bring_near("report", [url]) == [str(on)] and checkpoint.list_steps(on) == []
    assert bring_near("eval", [url, "--step", "10"]) == [str(on), "--step", "10"] and checkpoint.list_steps(on) == [10]
    assert bring_near("verify", [url, "x", "--leaves"]) == [str(on), "x", "--leaves"] and checkpoint.list_steps(on) == [10, 12]
    assert bring_near("report", ["x", "--out", url]) == ["x", "--out", url]
    assert bring_near("train", [url]) == [url]
    with pytest.raises(UserError, match="flaky://bucket/none is not a run: it has no config.json"):
        bring_near("eval", ["flaky://bucket/none"])


def test_a_run_that_is_there_is_not_begun_again(url, tmp_path):
    assert go(url, 5) == 0
    shutil.rmtree(tmp_path / "here")
    with pytest.raises(UserError, match="holds a run already"):
        go(url, 5, resume="never")


def test_two_addresses_for_one_run_are_refused(url):
    config = made(5)
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, mirror="flaky://bucket/other"))
    with pytest.raises(UserError, match="leave out --checkpoint.mirror flaky://bucket/other"):
        settle(url, config)


def test_a_scheme_whose_package_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    for address in ("nonsense://x", *(() if find_spec("gcsfs") else ("gs://bucket/run",))):
        run_dir, config = settle(address, made(5))
        with pytest.raises(
            UserError, match=f"--run-dir {address} cannot be opened: .*gs:// takes the package gcsfs, s3:// s3fs"
        ):
            open_store(config.checkpoint, run_dir)


# Without training: an attempt, and whole checkpoints of a few bytes.


def attempt(url):
    run = RemoteRun(url, staging_folder(url))
    run.come_near()
    run.bring_newest(run.run_dir)
    run.begin("id", 1, None)
    (run.run_dir / "config.json").write_text('{"run_id": "id"}')
    run.opened()
    return run


def save(run, step, content="x", copy=True):
    where = checkpoint.entry(run.run_dir, step)
    for part in ("params", "train_state"):
        (where / part).mkdir(parents=True)
        (where / part / "manifest.ocdbt").write_text(content * 500)
    checkpoint.write_manifest(where, {"step": step, "leaves": {}, "metrics": {}, "fingerprint": content})
    if copy:
        run.upload(run.run_dir, step)


def here(run):
    return {step: checkpoint.read_manifest(run.run_dir, step)["sha256"] for step in checkpoint.list_steps(run.run_dir)}


def test_an_older_staging_folder_gives_way(url, tmp_path, monkeypatch):
    old = attempt(url)
    save(old, 5)
    (old.run_dir / "metrics.jsonl").write_text("of the first attempt, never copied")
    on_host(monkeypatch, tmp_path, "other")
    new = attempt(url)
    save(new, 8)
    on_host(monkeypatch, tmp_path, "here")
    again = attempt(url)
    assert here(again) == {5: here(old)[5], 8: here(new)[8]} and not list(base().glob("*.aside-*"))
    assert not (again.run_dir / "metrics.jsonl").exists()


def test_the_same_step_of_another_attempt_is_not_taken_for_it(url, tmp_path, monkeypatch):
    save(attempt(url), 8, "a", copy=False)
    on_host(monkeypatch, tmp_path, "other")
    new = attempt(url)
    save(new, 8, "b")
    on_host(monkeypatch, tmp_path, "here")
    assert here(attempt(url)) == here(new) and list(base().glob("*.aside-1"))


def test_numbers_of_attempts_are_not_given_twice(url, tmp_path, monkeypatch):
    numbers = []
    for host in ("here", "other", "here"):
        on_host(monkeypatch, tmp_path, host)
        numbers.append(RemoteRun(url, staging_folder(url)))
        numbers[-1].come_near()
        numbers[-1] = numbers[-1].begin("id", 1, None)
    assert numbers == [1, 2, 3]


def test_a_checkpoint_that_the_disk_has_no_room_for_is_not_fetched(url, tmp_path, monkeypatch):
    save(attempt(url), 5)
    on_host(monkeypatch, tmp_path, "other")
    usage = shutil.disk_usage
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(path)._replace(free=999))
    with pytest.raises(UserError, match="the checkpoint of step 5 of flaky://bucket/run takes 1,000 bytes, and 999 are free"):
        attempt(url)


def test_an_address_that_holds_something_else_is_refused(url):
    with fsspec.filesystem("flaky").open("flaky://bucket/run/thesis.tex", "wb") as file:
        file.write(b"x")
    with pytest.raises(UserError, match="flaky://bucket/run holds thesis.tex, and is not a run: choose another --run-dir"):
        attempt(url)


def test_an_address_of_another_run_is_refused(url):
    attempt(url)
    with pytest.raises(UserError, match="--run-dir flaky://bucket/run holds another run"):
        RemoteRun(url, staging_folder(url)).begin("another", 1, None)


def test_the_staging_folder_is_no_run_of_its_own(url):
    with pytest.raises(
        UserError, match="is where the run flaky://bucket/run is staged on this host: use --run-dir flaky://bucket/run"
    ):
        open_store(made(5).checkpoint, attempt(url).run_dir)


def test_an_upload_that_was_cut_off_leaves_nothing_for_the_next_one(url):
    """A process that there is no more would be joined into the next save of the step."""
    run = attempt(url)
    with fsspec.filesystem("flaky").open(
        "flaky://bucket/run/checkpoints/8/params/ocdbt.process_3/manifest.ocdbt", "wb"
    ) as file:
        file.write(b"x")
    save(run, 8)
    assert not [path for path in Flaky.store if "process_3" in path]


@pytest.mark.parametrize(
    "text", ["s3://", "gs:///", "file://", "file://folder/run", "file:/folder/run", "FILE:///folder/run", "gs:/bucket/run"]
)
def test_what_is_nearly_an_address_is_no_folder(text):
    with pytest.raises(UserError, match=r"is no address: write gs://bucket/run"):
        settle(text, made(5))


@pytest.mark.parametrize("text", ["runs/a", "/tmp/a:b/run", "gs://bucket/run", "file:///folder/run"])
def test_folders_and_addresses_are_taken(text):
    settle(text, made(5))


def test_a_command_with_nothing_to_do_leaves_a_run_that_goes_on_elsewhere_alone(url, tmp_path, monkeypatch, capsys):
    assert go(url, 2) == 0
    owner = Flaky.store["/bucket/run/attempt.json"].getvalue()
    on_host(monkeypatch, tmp_path, "other")
    assert go(url, 2) == 0
    assert f"{url} is finished: its last checkpoint is of step 2" in capsys.readouterr().out
    assert Flaky.store["/bucket/run/attempt.json"].getvalue() == owner


def test_a_checkpoint_that_lacks_a_file_there_is_named(url, capsys):
    assert go(url) == 0
    missing = max((p for p in Flaky.store if "/12/params/d/" in p), key=lambda p: Flaky.store[p].size)
    del Flaky.store[missing]
    with pytest.raises(UserError, match=f"{url}/checkpoints/12 is damaged: .* is missing. Use one before it"):
        checkpoints(bring_near("checkpoints", [url, "--verify", "--step", "12"]))
    assert checkpoints(bring_near("checkpoints", [url, "--verify"])) == 1
    out = capsys.readouterr().out
    assert f"12: not a checkpoint ({missing.partition('/12/')[2]} is missing)" in out and "step       10  verified" in out
    with pytest.raises(UserError, match=f"{url} holds no checkpoint of step 11; it has .10, 12."):
        bring_near("eval", [url, "--step", "11"])
    capsys.readouterr()
    assert checkpoint.list_steps(Path(bring_near("eval", [url])[0])) == [10]
    assert "is no good: " in capsys.readouterr().out


def test_a_manifest_that_is_not_what_was_written_there_is_named(url, capsys):
    save(attempt(url), 12)
    with fsspec.filesystem("flaky").open("flaky://bucket/run/checkpoints/12/manifest.json", "wb") as file:
        file.write(b"{")
    list_others(Path(bring_near("checkpoints", [url])[0]))
    assert "12: not a checkpoint (its manifest.json cannot be read" in capsys.readouterr().out


def test_an_attempt_file_that_cannot_be_read_has_a_way_out(url):
    attempt(url)
    Flaky.store["/bucket/run/attempt.json"].seek(0)
    Flaky.store["/bucket/run/attempt.json"].truncate(1)
    with pytest.raises(UserError, match=f"{url}/attempt.json is damaged, .* remove that file"):
        attempt(url)


def test_one_place_has_one_staging_folder(tmp_path):
    assert staging_folder("file:///a//b/../c/") == staging_folder("file:///a/c")
    assert settle("file:///a//b/../c", made(5))[1].checkpoint.mirror == "file:///a/c"
    assert staging_folder("gs://bucket/a//b") != staging_folder("gs://bucket/a/b")


def test_memory_of_the_process_is_no_place_for_a_run():
    with pytest.raises(UserError, match="--run-dir memory://x would be lost with the process: name a folder"):
        settle("memory://x", made(5))


def test_of_what_is_not_whole_there_nothing_stays_here(url, tmp_path, monkeypatch):
    run = attempt(url)
    save(run, 5)
    save(run, 8)
    del Flaky.store["/bucket/run/checkpoints/8/params/manifest.ocdbt"]
    on_host(monkeypatch, tmp_path, "other")
    again = attempt(url)
    assert [where.name for where in checkpoint.folder(again.run_dir).iterdir()] == ["5"]

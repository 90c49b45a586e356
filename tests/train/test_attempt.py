"""Where an attempt begins: branches from other runs, and going back in the run itself."""

import dataclasses

import pytest
from small import small

from sharder import checkpoint
from sharder.config import UserError
from sharder.events import read_json_lines
from sharder.facts import read_facts
from sharder.report.verify import compare
from sharder.stop import StopRequest
from sharder.train.attempt import Branch, parse_branch
from sharder.train.loop import train


def change(config, **sections):
    return dataclasses.replace(config, **{s: dataclasses.replace(getattr(config, s), **f) for s, f in sections.items()})


def run(config, run_dir, branch=None):
    return train(config, run_dir, "auto", StopRequest(), branch)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """12 steps, checkpoints 5, 10 and 12."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    run(change(small(), checkpoint={"keep_last": 3}), run_dir)
    return run_dir


@pytest.fixture
def copy(original, tmp_path):
    import shutil

    return shutil.copytree(original, tmp_path / "copy")


def steps(run_dir):
    return [r["step"] for r in read_json_lines(run_dir / "metrics.jsonl")[0]]


def test_a_branch_goes_on_from_a_checkpoint_of_another_run(original, tmp_path, capsys):
    """With the same settings it takes the same steps; with others it says which."""
    assert run(small(), tmp_path / "same", Branch(original, 10)) == 0
    assert steps(tmp_path / "same") == [11, 12] and compare(tmp_path / "same", original).identical
    other = change(small(), optimizer={"learning_rate": 1e-4})
    assert run(other, tmp_path / "other", Branch(original, 5)) == 0
    output = capsys.readouterr().out
    assert f"branched from {original}@5, with other settings:\n- --optimizer.learning-rate was 0.003, is 0.0001" in output
    origin = read_facts(tmp_path / "other")["branched_from"]
    assert (origin["run"], origin["step"], origin["fingerprint"]) == (
        str(original),
        5,
        checkpoint.read_manifest(original, 5)["fingerprint"],
    )
    assert run(change(other, train={"steps": 14}), tmp_path / "other", Branch(original, 5)) == 0
    assert steps(tmp_path / "other") == [*range(6, 15)] and read_facts(tmp_path / "other")["branched_from"] == origin


def test_a_run_that_exists_is_no_place_for_another_branch(original, copy):
    with pytest.raises(UserError, match="holds a run already, which is no branch: choose another --run-dir"):
        run(small(), copy, Branch(original, 10))


def test_a_branch_needs_a_checkpoint_that_fits(original, tmp_path):
    with pytest.raises(UserError, match=r"no checkpoint of step 7; it has \[5, 10, 12\]"):
        run(small(), tmp_path / "a", Branch(original, 7))
    with pytest.raises(UserError, match="does not fit the model and optimizer"):
        run(change(small(), model={"mlp_dim": 256}), tmp_path / "b", Branch(original, 10))
    with pytest.raises(UserError, match="is not a run"):
        run(small(), tmp_path / "c", Branch(tmp_path / "nowhere", None))


def test_going_back_is_refused_unless_asked_for_and_then_overwrites_nothing(original, copy):
    longer = change(small(), train={"steps": 14})
    with pytest.raises(
        UserError, match=r"up to step 12: to go back to step 5, add --rewind; the later ones \(10, 12\) are then set aside"
    ):
        run(longer, copy, Branch(copy, 5))
    assert run(longer, copy, Branch(copy, 5, rewind=True)) == 0
    assert checkpoint.list_others(copy) == ["10.rewound", "12.rewound"] and checkpoint.list_steps(copy) == [10, 14]
    assert (checkpoint.folder(copy) / "12.rewound" / "manifest.json").exists()
    assert steps(copy) == [*range(1, 13), *range(6, 15)] and compare(copy, original).identical


@pytest.mark.parametrize("text, expected", [("runs/a@10", ("runs/a", 10)), ("runs/a", ("runs/a", None)), ("a@b@3", ("a@b", 3))])
def test_a_branch_is_read(text, expected):
    branch = parse_branch(text, False)
    assert (str(branch.run_dir), branch.step) == expected


def test_what_is_no_branch_is_refused():
    with pytest.raises(UserError, match="must be RUN or RUN@STEP"):
        parse_branch("runs/a@ten", False)
    with pytest.raises(UserError, match="--rewind goes with --resume-from"):
        parse_branch(None, True)
    assert parse_branch(None, False) is None


@pytest.mark.parametrize(
    "section, field, value", [("train", "seed", 1), ("parallel", "virtual_workers", 4), ("optimizer", "name", "adafactor")]
)
def test_settings_are_held_against_the_checkpoint_itself(copy, section, field, value):
    """config.json says what is asked for; the manifest says what was saved."""
    import json

    from sharder.config import to_dict

    config = change(small(), parallel={"reduction": "exact"})
    asked = change(config, **{section: {field: value}})
    (copy / "config.json").write_text(json.dumps(read_facts(copy) | {"config": to_dict(asked)}))
    manifest = checkpoint.read_manifest(copy, 12) | {"config": to_dict(config)}
    checkpoint.write_manifest(checkpoint.entry(copy, 12), manifest)
    with pytest.raises(
        UserError, match=f"checkpoints/12 was saved with other settings:\n- --{section}.{field.replace('_', '-')} was .*, is"
    ):
        run(asked, copy)

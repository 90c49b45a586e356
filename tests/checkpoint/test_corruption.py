"""Twenty ways in which a checkpoint can be damaged; none is accepted, and the one before it is used."""

import json
import shutil

import jax
import numpy as np
import pytest
from small import RECIPE, sharder, small

from sharder import checkpoint
from sharder.checkpoint.restore import restore_numpy
from sharder.config import UserError
from sharder.events import EventLog, read_json_lines
from sharder.report.verify import compare
from sharder.train.saved import restore_newest
from sharder.train.setup import prepare


@pytest.fixture(scope="module")
def setup():
    return prepare(small())


def data_files(item):
    """The files that hold arrays, largest first."""
    return sorted((p for p in item.rglob("d/*") if p.is_file()), key=lambda p: -p.stat().st_size)


def flip(item, share):
    """One bit of the largest file, at this share of its length."""
    file = data_files(item)[0]
    content = bytearray(file.read_bytes())
    content[int(share * (len(content) - 1))] ^= 1
    file.write_bytes(content)


def truncate(file, share=0.5):
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


def rewrite(where, change, sealed=True):
    """The manifest with a change; `sealed`: with the checksum of the new content, as no accident would write it."""
    manifest = json.loads((where / "manifest.json").read_text())
    change(manifest)
    if sealed:
        (where / "manifest.json").unlink()
        checkpoint.write_manifest(where, manifest)
    else:
        (where / "manifest.json").write_text(json.dumps(manifest))


def leaf_from_elsewhere(where, path):
    """A leaf of the state, properly saved, with one other element."""
    import orbax.checkpoint as ocp

    from sharder.checkpoint.orbax import items

    leaves = restore_numpy(where.parents[1], 12)
    leaves[path] = np.array(leaves[path])
    leaves[path].reshape(-1)[-1] += 1
    name = "params" if path.startswith("params/") else "train_state"
    shutil.rmtree(where / name)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(where / name, args=ocp.args.PyTreeSave(jax.tree.map(jax.numpy.asarray, items(leaves)[name])))
    rewrite(where, lambda manifest: None)


def leaf(path, **change):
    return lambda manifest: manifest["leaves"][path].update(change)


CORRUPTIONS = {
    "bit at the beginning of parameters": lambda w: flip(w / "params", 0.05),
    "bit in the middle of parameters": lambda w: flip(w / "params", 0.5),
    "bit at the end of parameters": lambda w: flip(w / "params", 0.95),
    "bit at the beginning of optimizer state": lambda w: flip(w / "train_state", 0.05),
    "bit in the middle of optimizer state": lambda w: flip(w / "train_state", 0.5),
    "an element of the embedding": lambda w: leaf_from_elsewhere(w, "params/embed/tokens"),
    "an element of a second moment": lambda w: leaf_from_elsewhere(w, "opt_state/0/nu/blocks/mlp_in"),
    "the step in the state": lambda w: leaf_from_elsewhere(w, "step"),
    "parameters cut off": lambda w: truncate(data_files(w / "params")[0]),
    "optimizer state cut off": lambda w: truncate(data_files(w / "train_state")[0], 0.9),
    "parameters emptied": lambda w: data_files(w / "params")[0].write_bytes(b""),
    "a shard of parameters missing": lambda w: data_files(w / "params")[0].unlink(),
    "a shard of optimizer state missing": lambda w: data_files(w / "train_state")[0].unlink(),
    "parameters missing": lambda w: shutil.rmtree(w / "params"),
    "optimizer state missing": lambda w: shutil.rmtree(w / "train_state"),
    "torn folder": lambda w: [shutil.rmtree(w / "params" / "d"), (w / "manifest.json").unlink()],
    "manifest missing": lambda w: (w / "manifest.json").unlink(),
    "manifest cut off": lambda w: truncate(w / "manifest.json"),
    "manifest with another step": lambda w: rewrite(w, lambda m: m.update(step=11)),
    "manifest with another dtype": lambda w: rewrite(w, leaf("params/embed/tokens", dtype="bfloat16"), sealed=False),
    "manifest with another shape": lambda w: rewrite(w, leaf("params/blocks/mlp_in", shape=[2, 64, 64]), sealed=False),
    "manifest with another fingerprint": lambda w: rewrite(w, leaf("params/blocks/q", fingerprint="0" * 16)),
    "checkpoint of another step under this name": lambda w: [shutil.rmtree(w), shutil.copytree(w.with_name("10"), w)],
}  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_no_corruption_is_accepted(run_dir, setup, name, capsys):
    """The state that training would go on from is that of step 10, and the damaged folder is set aside."""
    where = checkpoint.entry(run_dir, 12)
    CORRUPTIONS[name](where)
    before = checkpoint.set_aside_unfinished(run_dir)
    state, step = restore_newest(setup, run_dir, checkpoint.list_steps(run_dir)[-1], EventLog(run_dir, 2))
    assert step == 10 == int(state.step)
    assert not where.exists() and (where.with_name("12.damaged").exists() or where.with_name("12.unfinished").exists())
    if not before:
        (event,) = [e for e in read_json_lines(run_dir / "events.jsonl")[0] if e["kind"] == "set_aside"]
        assert (event["step"], event["name"]) == (12, "12.damaged") and "checkpoints/12" in event["reason"]
        assert "It was set aside as checkpoints/12.damaged" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bit in the middle of parameters", "manifest cut off"])
def test_training_goes_on_from_the_one_before_with_the_same_bits(original, run_dir, name):
    """The real command line, on another number of devices than wrote the checkpoint."""
    CORRUPTIONS[name](checkpoint.entry(run_dir, 12))
    assert sharder("checkpoints", run_dir, "--verify").returncode == 1
    result = sharder("train", RECIPE, "--run-dir", run_dir, "--train.steps", 14, "--cluster.cpu-devices", 8)
    assert result.returncode == 0, result.stderr
    assert "set aside as checkpoints/12.damaged" in result.stdout and "Event loop" not in result.stderr
    assert compare(run_dir, original).identical
    assert [r["step"] for r in read_json_lines(run_dir / "metrics.jsonl")[0] if r["attempt"] == 2] == [11, 12, 13, 14]
    verified = sharder("checkpoints", run_dir, "--verify")
    assert verified.returncode == 0 and "step       14  verified" in verified.stdout and "12.damaged" in verified.stdout


def test_where_none_is_good_the_run_stops_and_never_begins_again(run_dir):
    for step in (10, 12):
        flip(checkpoint.entry(run_dir, step) / "params", 0.5)
    command = ("train", RECIPE, "--run-dir", run_dir, "--train.steps", 14, "--cluster.cpu-devices", 1)
    first, second = sharder(*command), sharder(*command)
    assert first.returncode == 2 and "no checkpoint of" in first.stderr and "Traceback" not in first.stderr
    assert second.returncode == 2 and "holds no checkpoint that can be read" in second.stderr
    assert len(read_json_lines(run_dir / "metrics.jsonl")[0]) == 12


def test_damage_is_told_without_orbax_own_words(run_dir):
    flip(checkpoint.entry(run_dir, 12) / "params", 0.05)
    with pytest.raises(UserError, match="12.* (is damaged|cannot be read): .*Use the checkpoint of step 10") as error:
        prepared = prepare(small())
        from sharder.train.saved import restore_state

        restore_state(prepared, run_dir, 12)
    assert "method" not in str(error.value)

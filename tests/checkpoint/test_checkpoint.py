"""Checkpoints: what counts as one, what is refused, what is kept."""

import dataclasses
import json

import numpy as np
import pytest
from small import small

from sharder import checkpoint
from sharder.checkpoint.restore import restore_numpy
from sharder.config import UserError
from sharder.train.fingerprint import numpy_fingerprint
from sharder.train.saved import restore_state
from sharder.train.setup import prepare
from sharder.train.state import by_path


def with_parallel(**fields):
    return dataclasses.replace(small(), parallel=dataclasses.replace(small().parallel, **fields))


def test_the_manifest_describes_the_run(run_dir):
    manifest = checkpoint.read_manifest(run_dir, 12)
    assert manifest["step"] == 12 and manifest["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1}
    assert manifest["data"]["num_examples"] == 160 and manifest["data"]["global_batch_size"] == 16
    assert all({"shape", "dtype", "fingerprint"} <= leaf.keys() for leaf in manifest["leaves"].values())
    assert manifest["fingerprint"] == numpy_fingerprint(restore_numpy(run_dir, 12))


@pytest.mark.parametrize(
    "parallel",
    [{"policy": "dp"}, {"policy": "fsdp"}, {"policy": "fsdp", "fsdp": 4}, {"policy": "fsdp", "tensor": 2}, {"data": 8}],
)
def test_a_state_restores_into_any_layout(run_dir, parallel):
    """Saved under zero on 1 x 8; the fingerprint of what arrives is that of what was saved."""
    setup = prepare(with_parallel(**parallel))
    state = restore_state(setup, run_dir, 12)
    leaves = by_path(state)
    assert all(x.sharding == s for x, s in zip(leaves.values(), by_path(setup.state_shardings).values()))
    assert (
        numpy_fingerprint({p: np.asarray(x) for p, x in leaves.items()}) == checkpoint.read_manifest(run_dir, 12)["fingerprint"]
    )


def test_a_folder_without_a_manifest_is_no_checkpoint(run_dir):
    (checkpoint.folder(run_dir) / "12" / "manifest.json").unlink()
    (checkpoint.folder(run_dir) / "99").mkdir()
    assert checkpoint.list_steps(run_dir) == [10]
    renamed = checkpoint.set_aside_unfinished(run_dir)
    assert [name for name, _ in renamed] == ["12.unfinished", "99.unfinished"] and all(
        "never finished" in reason for _, reason in renamed
    )


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 12}', "\x00"])
def test_a_damaged_manifest_is_no_checkpoint_and_is_set_aside(run_dir, content):
    (checkpoint.folder(run_dir) / "12" / "manifest.json").write_text(content)
    assert (checkpoint.list_steps(run_dir), checkpoint.list_others(run_dir)) == ([10], ["12"])
    ((name, reason),) = checkpoint.set_aside_unfinished(run_dir)
    assert name == "12.damaged" and "manifest.json" in reason


def test_what_was_set_aside_is_not_overwritten(run_dir):
    for expected in ("12.damaged", "12.damaged.2", "12.damaged.3"):
        where = checkpoint.folder(run_dir) / "12"
        where.mkdir(exist_ok=True)
        (where / "manifest.json").write_text(expected)
        assert [name for name, _ in checkpoint.set_aside_unfinished(run_dir)] == [expected]
    assert (checkpoint.folder(run_dir) / "12.damaged" / "params").is_dir()


def test_without_one_before_it_none_is_offered(run_dir):
    assert "none before it" in checkpoint.way_out(run_dir, 10)


def test_another_dtype_or_shape_is_refused(run_dir):
    """orbax alone would cast in silence."""
    config = dataclasses.replace(small(), model=dataclasses.replace(small().model, param_dtype="bfloat16"))
    with pytest.raises(UserError, match=r"params/blocks/attn_out: saved .*float32.*wanted .*bfloat16"):
        restore_state(prepare(config), run_dir, 12)
    config = dataclasses.replace(small(), model=dataclasses.replace(small().model, mlp_dim=256))
    with pytest.raises(UserError, match=r"params/blocks/mlp_in: saved \(\(2, 64, 128\).*wanted \(\(2, 64, 256\)"):
        restore_state(prepare(config), run_dir, 12)


def test_the_steps_asked_for_are_on_disk(original):
    assert checkpoint.list_steps(original) == [10, 12]


def test_choosing_a_step_names_what_there_is(run_dir, tmp_path):
    assert checkpoint.choose_step(run_dir, None) == 12
    with pytest.raises(UserError, match=r"no checkpoint of step 5; it has \[10, 12\]"):
        checkpoint.choose_step(run_dir, 5)
    with pytest.raises(UserError, match="no checkpoint"):
        checkpoint.choose_step(tmp_path / "nothing", None)


def test_a_damaged_manifest_does_not_appear_half_written(tmp_path):
    checkpoint.write_durably(tmp_path / "manifest.json", json.dumps({"a": 1}))
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]

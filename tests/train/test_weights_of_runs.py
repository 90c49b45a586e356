"""A run that begins with the weights of another: how many, which not, and whether they are what was saved."""

import dataclasses

import pytest
from small import small

from sharder import checkpoint
from sharder.config import UserError
from sharder.stop import StopRequest
from sharder.train.loop import train


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run") / "run"
    train(dataclasses.replace(small(), train=dataclasses.replace(small().train, steps=2)), run_dir, "auto", StopRequest())
    return run_dir


def begin_with(original, run_dir, mlp_dim=128, **weights):
    config = dataclasses.replace(
        small(), model=dataclasses.replace(small().model, mlp_dim=mlp_dim), train=dataclasses.replace(small().train, steps=1),
        weights=dataclasses.replace(small().weights, path=str(original), **weights),
    )  # fmt: skip
    return train(config, run_dir, "auto", StopRequest())


def test_all_of_them(original, tmp_path, capsys):
    assert begin_with(original, tmp_path / "run") == 0
    count = len([p for p in checkpoint.read_manifest(original, 2)["leaves"] if p.startswith("params/")])
    assert f"Loaded {count} of {count} parameters" in capsys.readouterr().out


def test_what_does_not_fit_is_listed_and_may_be_accepted_by_name(original, tmp_path, capsys):
    with pytest.raises(UserError, match=r"nothing was loaded: 0 missing, 0 unexpected, 3 of another shape") as error:
        begin_with(original, tmp_path / "refused", mlp_dim=256)
    names = ("blocks/mlp_in", "blocks/mlp_in_bias", "blocks/mlp_out")
    assert all(name in str(error.value) for name in names) and "--weights.accept PATH" in str(error.value)
    assert begin_with(original, tmp_path / "run", mlp_dim=256, accept=names) == 0
    output = capsys.readouterr().out
    assert f"drawn afresh: {', '.join(names)}" in output and "Loaded" in output
    with pytest.raises(UserError, match="--weights.accept names blocks/nothing"):
        begin_with(original, tmp_path / "unknown", accept=("blocks/nothing",))


def test_a_flipped_bit_is_not_loaded(original, tmp_path):
    file = max(
        (p for p in (checkpoint.entry(original, 2) / "params").rglob("d/*") if p.is_file()), key=lambda p: p.stat().st_size
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="is damaged|cannot be read"):
        begin_with(original, tmp_path / "run")

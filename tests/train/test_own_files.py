"""A run works after its tokenizer has moved, and from any folder."""

import dataclasses
import shutil

import pytest
from small import small

from sharder.config import UserError
from sharder.data.tokenize import open_tokenizer
from sharder.identity import differences
from sharder.train.own_files import keep_tokenizer, with_absolute_paths, with_kept_tokenizer


def with_tokenizer(path):
    return dataclasses.replace(small(), data=dataclasses.replace(small().data, tokenizer=path and str(path)))


@pytest.fixture
def tokenizer(tmp_path):
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1, "<e>": 2}, unk_token="a")).save(str(path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<e>"}')
    return path


@pytest.fixture
def run_dir(tmp_path, tokenizer):
    (tmp_path / "run").mkdir()
    keep_tokenizer(tmp_path / "run", with_tokenizer(tokenizer))
    return tmp_path / "run"


def test_a_tokenizer_that_is_gone_is_taken_from_the_run(run_dir, tokenizer):
    fingerprint = open_tokenizer(str(tokenizer)).fingerprint
    tokenizer.unlink()
    kept = with_kept_tokenizer(run_dir, with_tokenizer(tokenizer)).data.tokenizer
    assert open_tokenizer(kept).fingerprint == fingerprint


def test_another_tokenizer_is_refused(run_dir, tokenizer):
    tokenizer.write_text(tokenizer.read_text().replace('"b"', '"c"'))
    with pytest.raises(UserError, match="is not the tokenizer that .* was started with"):
        with_kept_tokenizer(run_dir, with_tokenizer(tokenizer))


def test_the_same_tokenizer_elsewhere_is_the_same_run(run_dir, tokenizer, tmp_path):
    (tmp_path / "moved").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / name, tmp_path / "moved" / name)
    assert differences(with_tokenizer(tokenizer), with_tokenizer(tmp_path / "moved" / "tokenizer.json")) == []
    with_kept_tokenizer(run_dir, with_tokenizer(tmp_path / "moved" / "tokenizer.json"))


def test_a_tokenizer_in_place_of_bytes_is_another_run(tokenizer):
    assert [name for name, *_ in differences(with_tokenizer(None), with_tokenizer(tokenizer))] == ["--data.tokenizer"]


def test_paths_hold_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = with_absolute_paths(
        dataclasses.replace(small(), data=dataclasses.replace(small().data, path="a/*.txt", token_cache="c"))
    )
    assert (config.data.path, config.data.token_cache, config.data.tokenizer) == (f"{tmp_path}/a/*.txt", f"{tmp_path}/c", None)


@pytest.mark.parametrize("name", ["no.model", "folder.model"])
def test_a_tokenizer_that_cannot_be_copied_is_named_also_where_the_data_has_no_text(tmp_path, name):
    (tmp_path / "folder.model").mkdir()
    config = small()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(tmp_path / name)))
    with pytest.raises(UserError, match=f"--data.tokenizer .*{name} cannot be copied into the run"):
        keep_tokenizer(tmp_path, config)

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharder.config import DataConfig, UserError
from sharder.data.corpus import Corpus
from sharder.data.sources import Topic
from sharder.data.text import ByteText, open_text


def byte_text(contents: list[bytes], seq_len: int) -> ByteText:
    split, _ = Corpus("test", tuple(Topic(str(i), content) for i, content in enumerate(contents))).split("auto", 0.0)
    return ByteText.of(split, split.runs(), split.fingerprint, seq_len)


def open_file(tmp_path, content: bytes, **options):
    (tmp_path / "x.txt").write_bytes(content)
    return open_text(DataConfig(path=str(tmp_path / "x.txt"), **options), 256)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=9), min_size=1, max_size=12), st.integers(1, 7))
def test_examples_are_windows_of_the_concatenated_documents(contents, seq_len):
    stream = list(b"".join(contents) + b"0123456789")
    dataset = byte_text([*contents, b"0123456789"], seq_len)
    found = dataset.read(np.arange(len(dataset)))
    starts = range(0, len(dataset) * seq_len, seq_len)
    assert found["inputs"].tolist() == [stream[s : s + seq_len] for s in starts]
    assert found["targets"].tolist() == [stream[s + 1 : s + seq_len + 1] for s in starts]


@given(st.integers(2, 60), st.integers(1, 7))
def test_length_counts_the_windows_that_fit(size, seq_len):
    if size > seq_len:
        starts = [s for s in range(0, size, seq_len) if s + seq_len + 1 <= size]
        assert len(byte_text([b"x" * size], seq_len)) == len(starts)


def test_ids_are_read_in_the_order_asked_for():
    dataset = byte_text([b"abcdefghi"], 2)
    ids = np.array([3, 0, 3])
    assert [bytes(row) for row in dataset.read(ids)["inputs"].astype(np.uint8)] == [b"gh", b"ab", b"gh"]


def test_batches_are_int32():
    batch = byte_text([b"abc\xff"], 3).read(np.array([0], np.uint64))
    assert {name: (value.dtype, value.shape) for name, value in batch.items()} == {
        "inputs": (np.int32, (1, 3)),
        "targets": (np.int32, (1, 3)),
    }


@pytest.mark.parametrize("ids", [[-1], [4], [0, 9]], ids=repr)
def test_ids_outside_the_dataset_are_refused(ids):
    with pytest.raises(IndexError, match="dataset that has 4"):
        byte_text([b"abcdefghi"], 2).read(np.array(ids))


def test_train_and_validation_share_no_window_and_lose_none(tmp_path):
    train, validation = open_file(tmp_path, bytes(range(100)), seq_len=9, validation_fraction=0.2)
    seen = [set(np.unique(d.read(np.arange(len(d)))["inputs"]).tolist()) for d in (train, validation)]
    assert seen == [set(range(72)), set(range(80, 98))]  # windows of 10 in 80 and in 20 bytes


def test_same_examples_from_parquet_as_from_files(tmp_path):
    rows = [f"row {i}\n" * (i % 7) for i in range(100)]
    pq.write_table(pa.table({"text": rows}), tmp_path / "x.parquet")
    options = {"seq_len": 16, "validation_split": "range", "validation_fraction": 0.1, "token_cache": str(tmp_path / "cache")}
    from_rows = open_text(DataConfig(path=str(tmp_path / "x.parquet"), **options), 256)
    from_file = open_file(tmp_path, "".join(rows).encode(), **options)
    for one, other in zip(from_rows, from_file, strict=True):
        np.testing.assert_array_equal(one.read(np.arange(len(one)))["targets"], other.read(np.arange(len(other)))["targets"])


def test_built_in_corpus_opens_with_the_defaults():
    train, validation = open_text(DataConfig(), 256)
    assert len(train) > 1000 and 0.02 < len(validation) / len(train) < 0.08


def test_fraction_zero_has_no_validation(tmp_path):
    assert open_file(tmp_path, b"0123456789", seq_len=4, validation_fraction=0.0)[1] is None


def test_fingerprint_depends_on_content_length_and_side(tmp_path):
    a, b = open_file(tmp_path, b"x" * 100, seq_len=4, validation_fraction=0.2)
    c, d = open_file(tmp_path, b"x" * 100, seq_len=5, validation_fraction=0.2)
    e, f = open_file(tmp_path, b"x" * 99 + b"y", seq_len=4, validation_fraction=0.2)
    assert len({dataset.fingerprint for dataset in (a, b, c, d, e, f)}) == 6


def test_fingerprint_is_the_same_in_another_folder(tmp_path):
    (tmp_path / "other").mkdir()
    one, _ = open_file(tmp_path, b"x" * 100, seq_len=4)
    other, _ = open_file(tmp_path / "other", b"x" * 100, seq_len=4)
    assert one.fingerprint == other.fingerprint


def test_dataset_travels_to_other_processes_without_its_text(tmp_path):
    dataset, _ = open_file(tmp_path, bytes(range(256)) * 4000, seq_len=4)
    dataset.read(np.arange(3))
    assert len(pickle.dumps(dataset)) < 2000


@pytest.mark.parametrize(
    ("size", "window_and_fraction", "message"),
    [
        (100, (200, 0.0), "train split .* 100 bytes, .* needs 201 .*Lower --data.seq-len to 99 or"),
        (100, (90, 0.2), "train .* 80 bytes, .* needs 91 .*79 or less, lower --data.validation-f"),
        (100, (20, 0.1), "validation .* 10 bytes, .* needs 21 .*9 or less, raise .* 0.1 or set"),
        (10, (2, 0.05), "validation .* 0 bytes, .* needs 3 .*Raise --data.validation-fraction"),
        (10, (9, 0.2), "train .* 8 bytes, .* needs 10 .*7 or less, lower --data.validation-fraction"),
        (5, (8, 0.2), r"train .* 4 bytes, .* needs 9 .*Lower --data.seq-len to 3 or less or give more text with --data.path\.$"),
        (21, (10, 0.1), r"validation .* 2 bytes, .* needs 11 .*Lower --data.seq-len to 1 or less or set --data.validation-fraction 0 to"),
    ],
)  # fmt: skip
def test_error_of_a_split_shorter_than_a_window(tmp_path, size, window_and_fraction, message):
    seq_len, fraction = window_and_fraction
    with pytest.raises(UserError, match=message):
        open_file(tmp_path, b"x" * size, seq_len=seq_len, validation_fraction=fraction)


def test_error_of_a_model_without_ids_for_bytes():
    with pytest.raises(UserError, match="0 to 255, but --model.vocab-size is 128. Set --model.vocab-size 256"):
        open_text(DataConfig(), 128)

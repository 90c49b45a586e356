import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharder.config import UserError
from sharder.data.corpus import Corpus
from sharder.data.packed import PackedTokens
from sharder.data.sources import MappedFile, Topic
from sharder.data.token_files import TokenFiles


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


def packed(folder, documents: list[list[int]], seq_len: int, dtype="<u2") -> PackedTokens:
    """Writes token files by hand, as the format says."""
    names = [folder / f"{len(list(folder.iterdir()))}.{kind}" for kind in ("tokens", "offsets")]
    np.array(sum(documents, []), dtype).tofile(names[0])
    np.cumsum([0, *map(len, documents)]).astype("<i8").tofile(names[1])
    files = TokenFiles(MappedFile.of(names[0]), MappedFile.of(names[1]), dtype, "content")
    split, _ = Corpus("test", (Topic("", b"x"),)).split("auto", 0.0)
    return PackedTokens.of(split, files, seq_len)


def reference(documents: list[list[int]], seq_len: int) -> list[dict[str, list]]:
    """One token at a time, from the definition."""
    stream = [(token, number) for number, document in enumerate(documents) for token in document]
    examples = []
    for start in range(0, len(stream) - seq_len, seq_len):
        example = {"inputs": [], "targets": [], "segments": [], "positions": [], "weights": []}
        segment, position = 0, 0
        for i in range(start, start + seq_len):
            (token, document), (target, its_document) = stream[i], stream[i + 1]
            if i > start and document != stream[i - 1][1]:
                segment, position = segment + 1, 0
            values = (token, target, segment, position, float(document == its_document))
            for name, value in zip(example, values, strict=True):
                example[name].append(value)
            position += 1
        examples.append(example)
    return examples


documents = st.lists(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=12), min_size=1, max_size=12)


@settings(deadline=None, max_examples=200)
@given(documents, st.integers(1, 9))
def test_packing_equals_the_reference(folder, documents, seq_len):
    documents = [*documents, [7] * 10]
    dataset = packed(folder, documents, seq_len)
    found = dataset.read(np.arange(len(dataset)))
    expected = reference(documents, seq_len)
    assert {name: value.tolist() for name, value in found.items()} == {n: [e[n] for e in expected] for n in expected[0]}


def test_packing_by_example(folder):
    found = packed(folder, [[10, 11, 12], [20], [30, 31, 32]], 6).read(np.array([0]))
    assert {name: value[0].tolist() for name, value in found.items()} == {
        "inputs": [10, 11, 12, 20, 30, 31],
        "targets": [11, 12, 20, 30, 31, 32],
        "segments": [0, 0, 0, 1, 2, 2],
        "positions": [0, 1, 2, 0, 0, 1],
        "weights": [1, 1, 0, 0, 1, 1],
    }


def test_positions_stay_below_the_window_in_a_long_document(folder):
    dataset = packed(folder, [list(range(100))], 8)
    assert dataset.read(np.arange(len(dataset)))["positions"].max() == 7


def test_ids_are_read_in_the_order_asked_for(folder):
    dataset = packed(folder, [list(range(9))], 2)
    assert dataset.read(np.array([3, 0, 3]))["inputs"].tolist() == [[6, 7], [0, 1], [6, 7]]


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u4"])
def test_largest_id_of_each_dtype_survives(folder, dtype):
    largest = min(np.iinfo(dtype).max, 2**31 - 1)
    assert packed(folder, [[largest, largest]], 1, dtype).read(np.array([0]))["targets"].tolist() == [[largest]]


def test_dtypes_are_those_of_the_protocol(folder):
    batch = packed(folder, [[1, 2, 3]], 2).read(np.array([0]))
    assert {name: value.dtype for name, value in batch.items()} == {
        "inputs": np.int32, "targets": np.int32, "segments": np.int32, "positions": np.int32, "weights": np.float32,
    }  # fmt: skip


@pytest.mark.parametrize("ids", [[-1], [4], [0, 9]], ids=repr)
def test_ids_outside_the_dataset_are_refused(folder, ids):
    with pytest.raises(IndexError, match="dataset that has 4"):
        packed(folder, [list(range(9))], 2).read(np.array(ids))


def test_fingerprint_depends_on_the_length(folder):
    assert packed(folder, [[1, 2, 3]], 1).fingerprint != packed(folder, [[1, 2, 3]], 2).fingerprint


def test_dataset_travels_to_other_processes_without_its_tokens(folder):
    dataset = packed(folder, [list(range(50000))], 8)
    dataset.read(np.arange(3))
    assert len(pickle.dumps(dataset)) < 2000


def test_error_of_a_split_shorter_than_a_window(folder):
    with pytest.raises(UserError, match="train split of test has 3 tokens, but one example needs 5 .*--data.seq-len to 2 or"):
        packed(folder, [[1, 2], [3]], 4)


def test_error_of_a_split_without_tokens(folder):
    with pytest.raises(UserError, match="has 0 tokens, but one example needs 5 .*Give more text"):
        packed(folder, [], 4)

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharder.data.synthetic import SyntheticRegression, SyntheticTokens, hash_uint32

IDS = st.lists(st.integers(0, 10**12), min_size=1, max_size=9).map(np.array)
DATASETS = {"tokens": SyntheticTokens(10**13, 12, 50), "regression": SyntheticRegression(10**13, 33, 5)}
dataset = pytest.mark.parametrize("dataset", DATASETS.values(), ids=DATASETS)


def murmur_finaliser(h: int) -> int:
    h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
    return h ^ (h >> 16)


@given(IDS, st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_hash_is_murmurs_finaliser_over_id_and_column(ids, columns, salt):
    def expected(example: int, column: int) -> int:
        x = example * columns + column
        return murmur_finaliser(((x ^ x >> 32) * 0x9E3779B9 + salt) % 2**32)

    assert hash_uint32(ids, columns, salt).tolist() == [[expected(int(i), c) for c in range(columns)] for i in ids]


@dataset
@given(IDS)
def test_an_example_depends_on_its_id_alone(dataset, ids):
    together = dataset.read(ids)
    for row, example in enumerate(ids):
        alone = dataset.read(np.array([example]))
        assert all(np.array_equal(alone[name][0], together[name][row]) for name in together)


@dataset
def test_ids_beyond_32_bits_are_other_examples(dataset):
    inputs = dataset.read(np.array([5, 5 + 2**32]))["inputs"]
    assert not np.array_equal(*inputs)


@pytest.mark.parametrize("cls, sizes", [(SyntheticTokens, (9, 12, 50)), (SyntheticRegression, (9, 3, 2))])
def test_salt_gives_other_examples_and_another_fingerprint(cls, sizes):
    ids = np.arange(9)
    a, b = cls(*sizes, salt=0), cls(*sizes, salt=1)
    assert a.fingerprint != b.fingerprint and not np.array_equal(a.read(ids)["inputs"], b.read(ids)["inputs"])


@dataset
def test_length_is_the_number_asked_for(dataset):
    assert len(dataset) == 10**13


@given(IDS, st.integers(1, 20), st.integers(1, 300))
def test_tokens_advance_by_one_stride_modulo_the_vocabulary(ids, seq_len, vocab_size):
    batch = SyntheticTokens(10**13, seq_len, vocab_size).read(ids)
    strides = (batch["targets"] - batch["inputs"]) % vocab_size
    assert np.array_equal(strides, np.broadcast_to(strides[:, :1], strides.shape))


@given(IDS, st.integers(2, 20))
def test_targets_are_the_inputs_one_later(ids, seq_len):
    batch = SyntheticTokens(10**13, seq_len, 50).read(ids)
    assert np.array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


@given(IDS, st.integers(1, 300))
def test_tokens_are_int32_in_the_vocabulary(ids, vocab_size):
    tokens = SyntheticTokens(10**13, 8, vocab_size).read(ids)["inputs"]
    assert tokens.dtype == np.int32 and 0 <= tokens.min() <= tokens.max() < vocab_size


def test_regression_inputs_are_uniform_between_minus_one_and_one():
    inputs = SyntheticRegression(10**6, 64, 1).read(np.arange(2000))["inputs"]
    assert inputs.dtype == np.float32 and -1 <= inputs.min() and inputs.max() < 1
    # 128,000 uniform numbers: one tenth in each bin, within four standard deviations of 0.0008.
    assert np.allclose(np.histogram(inputs, 10, (-1, 1))[0] / inputs.size, 0.1, atol=0.0034)


def test_regression_targets_are_a_sine_of_a_linear_map():
    dataset = SyntheticRegression(10**6, 64, 3)
    batch = dataset.read(np.arange(100))
    expected = np.sin(3 * batch["inputs"].astype(np.float64) @ dataset.teacher)
    np.testing.assert_allclose(batch["targets"], expected, atol=2e-6)


def test_held_out_examples_have_the_same_teacher():
    assert np.array_equal(SyntheticRegression(9, 3, 2, 0).teacher, SyntheticRegression(9, 3, 2, 1).teacher)

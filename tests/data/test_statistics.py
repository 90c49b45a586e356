import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sharder.data.statistics import exact_statistics, from_sort_keys, sort_keys

SHAPES = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "far from zero": lambda rng, n: 1000 + 0.01 * rng.standard_normal(n),
    "few values": lambda rng, n: rng.integers(-1, 3, n),
    "constant": lambda rng, n: np.full(n, 0.3),
    "heavy tails": lambda rng, n: -np.exp(4 * rng.standard_normal(n)),
    "tiny": lambda rng, n: 1e-41 * rng.integers(-9, 9, n),
}


def assert_equal_to_brute_force(found, x: np.ndarray) -> None:
    x = x.astype(np.float64)
    spread = np.abs(x).max(0)
    assert (np.abs(found.mean - x.mean(0)) <= 1e-12 * spread).all()
    assert (np.abs(found.std - x.std(0)) <= 1e-10 * spread).all()
    for name, q in (("q01", 0.01), ("q99", 0.99)):
        assert np.allclose(getattr(found, name), np.quantile(x, q, axis=0), rtol=1e-14, atol=0)


@pytest.mark.parametrize("count", [1, 2, 99, 101, 20_000])
def test_statistics_are_those_of_brute_force(count):
    rng = np.random.default_rng(count)
    x = np.stack([shape(rng, count) for shape in SHAPES.values()], 1).astype(np.float32)
    blocks = [(part, None) for part in np.array_split(x, min(count, 7))]
    assert_equal_to_brute_force(exact_statistics(lambda: blocks), x)


def test_weights_count_rows_several_times():
    rng = np.random.default_rng(3)
    x = np.stack([shape(rng, 3000) for shape in SHAPES.values()], 1).astype(np.float32)
    weights = rng.integers(1, 60, 3000)
    found = exact_statistics(lambda: [(x[:1000], weights[:1000]), (x[1000:], weights[1000:])])
    assert_equal_to_brute_force(found, np.repeat(x, weights, axis=0))


@settings(max_examples=200)
@given(hnp.arrays(np.float32, 20, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_keys_sort_as_their_numbers_and_lead_back(x):
    keys = sort_keys(x)
    assert np.array_equal(from_sort_keys(keys), x)
    order = np.argsort(keys, kind="stable")
    assert (np.diff(x[order]) >= 0).all()

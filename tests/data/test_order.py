import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharder.config import UserError
from sharder.data.order import Order

SEEDS = st.integers(0, 2**32 - 1)


def epoch_ids(num_examples: int, seed: int, epoch: int, rounds: int = 12) -> np.ndarray:
    """All ids of an epoch, read as one batch."""
    return Order(num_examples, num_examples, seed, rounds).ids(epoch)


def correlation(ids: np.ndarray) -> float:
    return abs(np.corrcoef(ids[:-1], ids[1:])[0, 1])


# Small datasets are slow: the index shuffle walks cycles in 2**16 (3 ms per index at 4 examples).
@settings(max_examples=20)
@given(st.integers(1, 300), SEEDS, st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(num_examples, seed, epoch):
    assert sorted(epoch_ids(num_examples, seed, epoch)) == list(range(num_examples))


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_successive_ids_do_not_correlate(seed):
    # Standard deviation of a random order's correlation: 1 / sqrt(2**16) = 0.004.
    assert correlation(epoch_ids(2**16, seed, 0)) < 0.02


def test_the_correlation_of_four_rounds_would_be_caught():
    assert correlation(epoch_ids(2**16, 0, 0, rounds=4)) > 0.02


@given(SEEDS, st.integers(0, 2**32), st.integers(1, 1000))
@settings(max_examples=20)
def test_epochs_differ(seed, epoch, later):
    order = Order(10**6, 32, seed)
    first = [epoch * order.steps_per_epoch, (epoch + later) * order.steps_per_epoch]
    assert order.ids(first[0]).tolist() != order.ids(first[1]).tolist()


def test_next_epoch_is_not_the_next_seed():
    assert epoch_ids(1000, 0, 1).tolist() != epoch_ids(1000, 1, 0).tolist()


def test_seeds_differ():
    assert epoch_ids(1000, 0, 0).tolist() != epoch_ids(1000, 1, 0).tolist()


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_contiguous_slices_of_processes_reassemble_the_batch(num_processes):
    order, size = Order(1000, 16, 3), 16 // num_processes
    slices = [order.ids(5, p * size, (p + 1) * size) for p in range(num_processes)]
    assert np.concatenate(slices).tolist() == order.ids(5).tolist()


@settings(max_examples=6)
@given(st.integers(300, 700), st.integers(1, 100), SEEDS, st.randoms(use_true_random=False))
def test_seeking_equals_stepping_across_epochs(num_examples, batch, seed, random):
    per_epoch = num_examples // batch
    first = max(per_epoch - 2, 0)
    stream = np.concatenate([epoch_ids(num_examples, seed, epoch)[: per_epoch * batch] for epoch in range(2)])
    steps = list(range(first, min(first + 4, 2 * per_epoch)))
    random.shuffle(steps)
    for step in steps:
        assert Order(num_examples, batch, seed).ids(step).tolist() == stream[step * batch : (step + 1) * batch].tolist()


@pytest.mark.parametrize("step, position", [(0, (0, 0)), (1, (0, 1)), (2, (1, 0)), (5, (2, 1))])
def test_remainder_of_an_epoch_is_dropped(step, position):
    assert Order(11, 4, 0).position(step) == position


def test_a_trillion_examples_need_no_memory():
    order = Order(10**12, 64, 0)
    order.ids(0)
    tracemalloc.start()
    ids = order.ids(10**10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000 and ids.max() > 10**11


def test_ids_are_int64():
    assert Order(10**12, 4, 0).ids(0).dtype == np.int64


def test_one_example_alone_is_an_order():
    assert Order(1, 1, 7).ids(3).tolist() == [0]


def test_dataset_smaller_than_a_batch_is_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"has 7 examples, less than one batch of 8: lower --train.global-batch-size to 7"):
        Order(7, 8, 0)


def test_order_is_the_one_of_earlier_versions():
    # A run is resumed by its step alone, so another order under the same seed would be silent data loss.
    assert Order(1000, 8, 0).ids(130).tolist() == [224, 893, 989, 691, 91, 277, 621, 704]

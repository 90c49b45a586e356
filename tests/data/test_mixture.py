import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharder.data.mixture import BLOCK, Mixture, MixtureOrder

ORDER = MixtureOrder((40_000, 26_000, 30_000), (0.5, 0.2, 0.3), 512, 7)


def which(ids: np.ndarray, order: MixtureOrder = ORDER) -> np.ndarray:
    return np.searchsorted(np.cumsum(order.sizes), ids, side="right")


def many(steps: int, order: MixtureOrder = ORDER) -> np.ndarray:
    return np.concatenate([order.ids(step) for step in range(steps)])


@pytest.fixture(scope="module")
def block() -> np.ndarray:
    """Ids of a whole block of rows, and half of the next."""
    return many(192)


def test_a_step_is_a_pure_function_of_its_number():
    again = MixtureOrder(ORDER.sizes, ORDER.weights, 512, 7)
    assert np.array_equal(ORDER.ids(130), again.ids(130))
    assert np.array_equal(np.concatenate([ORDER.ids(130, 0, 100), ORDER.ids(130, 100, 512)]), ORDER.ids(130))


def test_shares_hold_exactly_over_a_block(block):
    counts = np.bincount(which(block[:BLOCK]), minlength=3)
    assert np.abs(counts - np.array(ORDER.weights) * BLOCK).max() <= 1


def test_shares_hold_nearly_in_any_stretch(block):
    for at in range(0, len(block), 4096):
        counts = np.bincount(which(block[at : at + 4096]), minlength=3) / 4096
        assert np.abs(counts - ORDER.weights).max() < 0.04


def test_a_dataset_is_read_whole_before_it_is_read_again(block):
    for part, size in enumerate(ORDER.sizes):
        own = block[which(block) == part]
        assert len(np.unique(own[:size])) == min(size, len(own)) and len(np.unique(own[size : 2 * size])) == len(
            own[size : 2 * size]
        )


def test_every_turn_of_a_small_dataset_has_another_order():
    order = MixtureOrder((100, 5), (0.6, 0.4), 50, 1)
    ids = many(100, order)
    small = ids[ids >= 100]
    turns = [tuple(small[at : at + 5].tolist()) for at in range(0, len(small) - 5, 5)]
    assert all(sorted(turn) == list(range(100, 105)) for turn in turns) and len(set(turns)) > 60


def test_seeds_give_other_orders():
    other = MixtureOrder(ORDER.sizes, ORDER.weights, 512, 8)
    assert (ORDER.ids(3) == other.ids(3)).mean() < 0.01


@settings(max_examples=50)
@given(st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=40))
def test_places_fill_a_block_and_every_dataset_has_one(weights):
    places = MixtureOrder((9,) * len(weights), tuple(weights), 8, 0).places()
    assert sum(places) == BLOCK and min(places) >= 1


class Numbered:
    fingerprint = "n"

    def __init__(self, size: int, base: int):
        self.size, self.base = size, base

    def __len__(self) -> int:
        return self.size

    def read(self, ids):
        assert (0 <= ids).all() and (ids < self.size).all()
        return {"x": (self.base + ids).astype(np.int32), "y": np.stack([ids, ids], 1)}


def test_examples_come_from_their_datasets_in_the_order_asked_for():
    mixture = Mixture([Numbered(4, 0), Numbered(3, 100), Numbered(5, 200)], (1, 1, 1))
    batch = mixture.read(np.array([11, 0, 4, 7, 3, 6]))
    assert batch["x"].tolist() == [204, 0, 100, 200, 3, 102] and batch["y"].shape == (6, 2)

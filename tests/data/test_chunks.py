import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sharder.data.chunks import absolute_actions, chunk_rows, chunk_weights, expand_mask, pad_last, relative_actions

lengths_and_horizon = st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 12))


@given(lengths_and_horizon)
def test_chunks_stay_in_their_episode_and_flag_what_lies_beyond(case):
    lengths, horizon = np.array(case[0]), case[1]
    starts = np.cumsum(lengths) - lengths
    rows, is_pad = chunk_rows(np.arange(lengths.sum()), horizon, starts, lengths)
    for e, (start, length) in enumerate(zip(starts, lengths)):
        for t in range(length):
            wanted = [min(t + h, length - 1) + start for h in range(horizon)]
            assert rows[start + t].tolist() == wanted
            assert is_pad[start + t].tolist() == [t + h >= length for h in range(horizon)]


@settings(max_examples=50)
@given(lengths_and_horizon)
def test_weights_count_the_rows_of_all_chunks(case):
    lengths, horizon = np.array(case[0]), case[1]
    rows, _ = chunk_rows(np.arange(lengths.sum()), horizon, np.cumsum(lengths) - lengths, lengths)
    assert np.array_equal(np.bincount(rows.reshape(-1), minlength=lengths.sum()), chunk_weights(horizon, lengths))


def test_relative_actions_are_less_the_state_where_the_mask_says():
    rng = np.random.default_rng(0)
    actions, state = rng.standard_normal((4, 6, 5)).astype(np.float32), rng.standard_normal((4, 7)).astype(np.float32)
    found = relative_actions(actions, state, (True, False, True))
    assert np.array_equal(found[..., 0], actions[..., 0] - state[:, None, 0])
    assert np.array_equal(found[..., 2], actions[..., 2] - state[:, None, 2])
    assert np.array_equal(found[..., [1, 3, 4]], actions[..., [1, 3, 4]])


def test_absolute_actions_undo_relative_ones():
    rng = np.random.default_rng(1)
    actions, state = rng.standard_normal((4, 6, 5)), rng.standard_normal((4, 7))
    mask = expand_mask((2, -1, 2))
    assert np.allclose(absolute_actions(relative_actions(actions, state, mask), state, mask), actions, atol=1e-12, rtol=0)


def test_masks_and_padding():
    assert expand_mask((6, -1, 2)) == (True,) * 6 + (False,) + (True,) * 2
    assert pad_last(np.ones((2, 3)), 5).tolist() == [[1, 1, 1, 0, 0]] * 2

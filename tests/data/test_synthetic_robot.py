import numpy as np

from sharder.data.synthetic_robot import SyntheticRobot
from sharder.recipes import load_recipe

MODEL = load_recipe("pi0_tiny").model


def test_an_example_depends_on_its_id_only():
    data = SyntheticRobot(100, MODEL)
    together, alone = data.read(np.array([7, 3, 50])), data.read(np.array([3]))
    assert all(np.array_equal(together[name][1:2], alone[name]) for name in together)


def test_examples_differ():
    actions = SyntheticRobot(100, MODEL).read(np.arange(100))["actions"]
    assert len({row.tobytes() for row in actions}) == 100


def test_a_step_past_the_end_repeats_the_last():
    batch = SyntheticRobot(200, MODEL).read(np.arange(200))
    for actions, pad in zip(batch["actions"], batch["action_is_pad"]):
        last = np.flatnonzero(~pad)[-1]
        assert (actions[pad] == actions[last]).all()


def test_dimensions_that_are_filled_up_are_zero():
    batch = SyntheticRobot(50, MODEL).read(np.arange(50))
    assert (batch["actions"] * ~batch["action_dim_mask"][:, None] == 0).all() and not batch["action_dim_mask"].all()


def test_the_salt_makes_other_examples():
    a, b = (SyntheticRobot(9, MODEL, salt) for salt in (0, 1))
    assert a.fingerprint != b.fingerprint and not np.array_equal(a.read(np.arange(9))["state"], b.read(np.arange(9))["state"])

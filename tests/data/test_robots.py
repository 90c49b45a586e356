import numpy as np
import pytest

from sharder.config import UserError
from sharder.data.robots import (
    aloha,
    aloha_gripper_command_to_angle,
    aloha_gripper_from_angle,
    assign_cameras,
    droid,
    generic,
    libero,
    read_observation,
)  # fmt: skip

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


def picture(value: int, shape=(20, 30)) -> np.ndarray:
    return np.full((*shape, 3), value, np.uint8)


def test_libero_takes_its_two_cameras_and_masks_the_third():
    observation = {
        "observation/image": picture(1),
        "observation/wrist_image": picture(2),
        "observation/state": np.arange(8.0),
        "prompt": "x",
    }
    found = read_observation(libero(), observation, CAMERAS, (20, 30))
    assert [int(found[f"image/{c}"].max()) for c in CAMERAS] == [1, 2, 0]
    assert [bool(found[f"image_mask/{c}"]) for c in CAMERAS] == [True, True, False]
    assert found["state"].tolist() == list(range(8))


def test_droid_puts_joints_and_gripper_one_after_the_other():
    observation = {
        "observation/exterior_image_1_left": picture(1), "observation/wrist_image_left": picture(2),
        "observation/joint_position": np.arange(7.0), "observation/gripper_position": np.array([9.0]),
    }  # fmt: skip
    assert read_observation(droid(), observation, CAMERAS, (20, 30))["state"].tolist() == [0, 1, 2, 3, 4, 5, 6, 9]
    assert droid().num_actions == 8 and not any(droid().relative)


def test_aloha_takes_pictures_with_channels_first_and_masks_those_that_miss():
    observation = {
        "state": np.zeros(14),
        "images": {"cam_high": picture(7).transpose(2, 0, 1), "cam_low": picture(8), "cam_right_wrist": picture(9)},
    }
    found = read_observation(aloha(), observation, CAMERAS, (20, 30))
    assert [int(found[f"image/{c}"].max()) for c in CAMERAS] == [7, 0, 9]
    assert [bool(found[f"image_mask/{c}"]) for c in CAMERAS] == [True, False, True]


def test_aloha_flips_joints_and_turns_grippers_to_angles():
    state = np.arange(1.0, 15.0) / 20
    found = aloha().encode_state(state)
    joints = [j for j in range(14) if j not in (6, 13)]
    flips = np.ones(14)
    flips[[1, 2, 8, 9]] = -1
    assert np.allclose(found[joints], (state * flips)[joints])
    # The mechanism by hand: a triangle of arm 36 mm, horn 22 mm and the finger's distance.
    distance = 0.01844 + state[6] * (0.058 - 0.01844)
    angle = np.arcsin((0.022**2 + distance**2 - 0.036**2) / (2 * 0.022 * distance))
    assert np.isclose(found[6], (angle - 0.5476) / (1.6296 - 0.5476))


def test_aloha_actions_are_decoded_by_the_inverse():
    actions = np.random.default_rng(0).standard_normal((5, 3, 14))
    assert np.allclose(aloha().decode_actions(aloha().encode_actions(actions)), actions, atol=1e-5)
    assert np.allclose(aloha_gripper_command_to_angle(aloha_gripper_from_angle(actions)), actions)


def test_aloha_left_alone():
    assert aloha(adapt_to_pi=False).encode_state(np.arange(14.0)).tolist() == list(range(14))
    assert aloha().relative == (True,) * 6 + (False,) + (True,) * 6 + (False,)


@pytest.mark.parametrize(
    "cameras, places",
    [
        (("cam",), {"base_0_rgb": "cam"}),
        (("corner2", "gripper"), {"base_0_rgb": "corner2", "left_wrist_0_rgb": "gripper"}),
        (
            ("wrist_right", "wrist_left", "top"),
            {"base_0_rgb": "top", "left_wrist_0_rgb": "wrist_left", "right_wrist_0_rgb": "wrist_right"},
        ),
        (("front", "side"), {"base_0_rgb": "front", "left_wrist_0_rgb": "side"}),
        (("wrist",), {"left_wrist_0_rgb": "wrist"}),
        (("a", "b", "c", "d"), {"base_0_rgb": "a", "left_wrist_0_rgb": "b", "right_wrist_0_rgb": "c"}),
    ],
)
def test_cameras_take_the_places_of_the_model(cameras, places):
    assert assign_cameras(cameras) == places


@pytest.mark.parametrize(
    "change, message",
    [
        ({"observation/state": None}, "observation/state"),
        ({"observation/state": np.array([1.0, np.nan])}, "finite"),
        ({"observation/state": np.zeros((2, 2))}, "shape"),
        ({"observation/image": np.zeros((20, 30), np.uint8)}, "observation/image has shape"),
        ({"observation/image": np.zeros((20, 30, 3), np.int32)}, "dtype int32"),
    ],
)
def test_a_wrong_observation_names_its_key(change, message):
    observation = {"observation/image": picture(1), "observation/state": np.arange(8.0)} | change
    observation = {k: v for k, v in observation.items() if v is not None}
    with pytest.raises(UserError, match=message):
        read_observation(libero(), observation, CAMERAS, (20, 30))


def test_float_pictures_are_scaled():
    robot = generic(("front",), ("state",), "action")
    found = read_observation(robot, {"front": np.full((4, 4, 3), 0.5), "state": [1.0]}, CAMERAS, (4, 4))
    assert (found["image/base_0_rgb"] == 127).all()

"""What differs from robot to robot: the names of its cameras and numbers, its own units, and which actions are relative.

A robot turns an observation into what a policy expects, and the policy's actions into what the robot expects. The same holds for
the columns of a dataset and for the requests to a server; only the names of the keys differ. Constants and key names of ALOHA,
DROID and LIBERO: openpi (commit 15a9616), src/openpi/policies.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sharder.config import UserError
from sharder.data.chunks import expand_mask
from sharder.data.resize import resize_with_padding

LARGEST_SIDE = 8192
"""Pixels of a picture in a request; more is a mistake."""
MODEL_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


def same(x: np.ndarray) -> np.ndarray:
    return x


@dataclass(frozen=True)
class Keys:
    """Names in a dataset, or in a request."""

    cameras: dict[str, str]
    """By the model's name of the camera; a camera of the model that is not here, or not there, is masked."""
    state: tuple[str, ...]
    """Put one after the other."""
    action: str


@dataclass(frozen=True)
class Robot:
    """`encode_*` turn what the robot gives into what the policy expects, `decode_actions` turns back; all along the last axis."""

    name: str
    dataset: Keys
    request: Keys
    num_actions: int | None = None
    """Dimensions of an action; the policy's others are cut off. None: as many as the statistics have."""
    relative: tuple[bool, ...] = ()
    """Which dimensions the policy gives relative to the state at the beginning of the chunk."""
    encode_state: Callable[[np.ndarray], np.ndarray] = field(default=same)
    encode_actions: Callable[[np.ndarray], np.ndarray] = field(default=same)
    decode_actions: Callable[[np.ndarray], np.ndarray] = field(default=same)


ALOHA_FLIPS = np.array([1, -1, -1, 1, 1, 1, 1, 1, -1, -1, 1, 1, 1, 1], np.float64)
"""Signs of ALOHA's joints against those that pi0 was trained with."""
ALOHA_GRIPPERS = (6, 13)


def scale(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """low .. high to 0 .. 1."""
    return (x - low) / (high - low)


def aloha_gripper_to_angle(x: np.ndarray) -> np.ndarray:
    """From ALOHA's opening, 0 .. 1 of a linear position, to the angle that pi0 was trained with, 0 .. 1 of its encoder's range."""
    position_m = x * (0.05800 - 0.01844) + 0.01844
    arm_m, horn_m = 0.036, 0.022  # of the mechanism, by Interbotix
    sine = (horn_m**2 + position_m**2 - arm_m**2) / (2 * horn_m * position_m)
    return scale(np.arcsin(np.clip(sine, -1.0, 1.0)), 0.5476, 1.6296)


def aloha_gripper_from_angle(x: np.ndarray) -> np.ndarray:
    """From pi0's angle to the range of ALOHA's commands; the angle comes unscaled."""
    return scale(x + 0.5476, -0.6213, 1.4910)


def aloha_gripper_command_to_angle(x: np.ndarray) -> np.ndarray:
    """Inverse of `aloha_gripper_from_angle`."""
    return x * (1.4910 + 0.6213) - 0.6213 - 0.5476


def _aloha(of_gripper: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    def convert(x: np.ndarray) -> np.ndarray:
        if x.shape[-1] != 14:
            raise UserError(f"ALOHA has 14 joints, but there are {x.shape[-1]} numbers. Give another --robot.policy.")
        found = x * ALOHA_FLIPS
        found[..., ALOHA_GRIPPERS] = of_gripper(found[..., ALOHA_GRIPPERS])
        return found.astype(np.float32)

    return convert


def aloha(adapt_to_pi: bool = True) -> Robot:
    """Two arms of six joints and a gripper. `adapt_to_pi`: joints and grippers as the released pi0 knows them."""
    names = {"base_0_rgb": "cam_high", "left_wrist_0_rgb": "cam_left_wrist", "right_wrist_0_rgb": "cam_right_wrist"}
    robot = Robot(
        "aloha",
        dataset=Keys({k: f"observation.images.{v}" for k, v in names.items()}, ("observation.state",), "action"),
        request=Keys({k: f"images/{v}" for k, v in names.items()}, ("state",), "actions"),
        num_actions=14,
        relative=expand_mask((6, -1, 6, -1)),
    )
    if not adapt_to_pi:
        return robot
    return dataclasses.replace(
        robot, encode_state=_aloha(aloha_gripper_to_angle), encode_actions=_aloha(aloha_gripper_command_to_angle),
        decode_actions=_aloha(aloha_gripper_from_angle),
    )  # fmt: skip


def droid() -> Robot:
    """A Franka arm of seven joints and a gripper; actions are joint velocities, so never relative."""
    names = {"base_0_rgb": "exterior_image_1_left", "left_wrist_0_rgb": "wrist_image_left"}
    return Robot(
        "droid",
        dataset=Keys(names, ("joint_position", "gripper_position"), "actions"),
        request=Keys(
            {k: f"observation/{v}" for k, v in names.items()},
            ("observation/joint_position", "observation/gripper_position"),
            "actions",
        ),
        num_actions=8,
    )


def libero() -> Robot:
    """A simulated Franka arm; its actions are changes already."""
    return Robot(
        "libero",
        dataset=Keys({"base_0_rgb": "image", "left_wrist_0_rgb": "wrist_image"}, ("state",), "actions"),
        request=Keys(
            {"base_0_rgb": "observation/image", "left_wrist_0_rgb": "observation/wrist_image"},
            ("observation/state",),
            "actions",
        ),
        num_actions=7,
    )


def known(policy: str, adapt_to_pi: bool = True) -> Robot:
    """A robot by name: aloha, droid or libero."""
    return {"aloha": lambda: aloha(adapt_to_pi), "droid": droid, "libero": libero}[policy]()


def generic(
    cameras: tuple[str, ...], state: tuple[str, ...], action: str, model_cameras: tuple[str, ...] = MODEL_CAMERAS
) -> Robot:
    """Any robot: the dataset's cameras take the model's places in a fixed way, state and actions stay as they are."""
    keys = Keys(assign_cameras(cameras, model_cameras), state, action)
    return Robot("generic", dataset=keys, request=keys)


def assign_cameras(cameras: tuple[str, ...], places: tuple[str, ...] = MODEL_CAMERAS) -> dict[str, str]:
    """A camera for each of the model's places as far as they go, by the model's name of the place.

    A camera whose name says hand, wrist or gripper takes a wrist's place, that of its side if it names one; the others take the
    places that are no wrist's; what remains takes the first place that is left. Cameras without a place are left out.
    """
    found: dict[str, str] = {}
    rules = (
        lambda camera, place: _is_wrist(camera) and _is_wrist(place) and _side(camera) == _side(place),
        lambda camera, place: _is_wrist(camera) and _is_wrist(place),
        lambda camera, place: not _is_wrist(camera) and not _is_wrist(place),
        lambda camera, place: True,
    )
    for fits in rules:
        for camera in cameras:
            place = next((p for p in places if p not in found and fits(camera, p)), None)
            if place is not None and camera not in found.values():
                found[place] = camera
    return {place: found[place] for place in places if place in found}


def _is_wrist(name: str) -> bool:
    return re.search(r"wrist|gripper|hand", name.lower()) is not None


def _side(name: str) -> str | None:
    return next((side for side in ("left", "right") if re.search(rf"(^|[^a-z]){side}([^a-z]|$)", name.lower())), None)


def lookup(tree: dict, key: str) -> object:
    """A value of a nested dict: tree["a/b"] where that is a key, else tree["a"]["b"]. Raises UserError naming the key."""
    if key in tree:
        return tree[key]
    head, _, rest = key.partition("/")
    if rest and isinstance(tree.get(head), dict):
        return lookup(tree[head], rest)
    raise UserError(f"the observation has no {key!r}, only {', '.join(map(repr, tree))}.")


def parse_picture(value: object, key: str) -> np.ndarray:
    """uint8 (height, width, 3) from that, from (3, height, width), or from floats in 0 .. 1. Raises UserError."""
    try:
        picture = np.asarray(value)
    except ValueError:
        raise UserError(f"{key} is no picture: its rows have different lengths.") from None
    if picture.ndim == 3 and picture.shape[0] == 3 and picture.shape[2] != 3:
        picture = picture.transpose(1, 2, 0)
    if picture.ndim != 3 or picture.shape[2] != 3:
        raise UserError(f"{key} has shape {np.shape(value)}, but a picture is (height, width, 3) or (3, height, width).")
    if not all(1 <= side <= LARGEST_SIDE for side in picture.shape[:2]):
        raise UserError(f"{key} has shape {np.shape(value)}, but a picture has 1 to {LARGEST_SIDE} pixels a side.")
    if np.issubdtype(picture.dtype, np.floating):
        if not np.isfinite(picture).all():
            raise UserError(f"{key} holds a number that is not finite.")
        picture = np.clip(picture * 255, 0, 255).astype(np.uint8)
    if picture.dtype != np.uint8:
        raise UserError(f"{key} is of dtype {picture.dtype}, but a picture is uint8, or float in 0 .. 1.")
    return picture


def read_observation(
    robot: Robot, observation: dict, model_cameras: tuple[str, ...], height_width: tuple[int, int]
) -> dict[str, np.ndarray]:
    """One request as a policy expects it: `image/<camera>` uint8, `image_mask/<camera>`, `state` encoded, not yet normalised.

    Raises UserError naming the key that is missing or wrong.
    """
    found: dict[str, np.ndarray] = {}
    for camera in model_cameras:
        key = robot.request.cameras.get(camera)
        try:
            value = None if key is None else lookup(observation, key)
        except UserError:
            if camera == model_cameras[0]:
                raise
            value = None
        found[f"image_mask/{camera}"] = np.array(value is not None)
        found[f"image/{camera}"] = (
            np.zeros((*height_width, 3), np.uint8)
            if value is None
            else resize_with_padding(parse_picture(value, key), *height_width)
        )
    parts = []
    for key in robot.request.state:
        value = lookup(observation, key)
        try:
            part = np.atleast_1d(np.asarray(value, np.float32))
        except (TypeError, ValueError):
            raise UserError(f"{key} is no array of numbers.") from None
        if part.ndim != 1 or not np.isfinite(part).all():
            raise UserError(f"{key} has shape {part.shape}, but must be one row of finite numbers.")
        parts.append(part)
    found["state"] = robot.encode_state(np.concatenate(parts))
    return found

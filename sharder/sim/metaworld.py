"""Meta-World (arXiv:1910.10897) as a robot meets it: what its cameras see, what its arm does, and whether the task is done."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sharder.config import UserError, require
from sharder.data.lerobot.info import SCENE

SENTENCES = {
    "reach-v3": "Reach the red target with the gripper.",
    "push-v3": "Push the red puck to the green goal.",
    "drawer-open-v3": "Open the drawer by pulling its handle.",
    "pick-place-v3": "Pick up the red puck and place it at the goal.",
}
CAMERAS = ("corner", "corner2", "corner3", "corner4", "topview", "behindGripper", "gripperPOV")
STATE = ("hand_x", "hand_y", "hand_z", "gripper_opening")
"""The first numbers of an observation; the others tell where the objects are, which a policy has to see."""
ACTION = ("dx", "dy", "dz", "gripper_effort")


@dataclass(frozen=True)
class Scene:
    """What a robot sees, and how it acts. A policy is evaluated as its demonstrations were recorded."""

    cameras: tuple[str, ...] = ("corner2",)
    """One or more of corner, corner2, corner3, corner4, topview, behindGripper and gripperPOV."""
    image_size: int = 96
    """Pixels along each side."""
    shadows: bool = False
    """Draw shadows and smooth edges too: without a GPU a picture then takes ten times as long."""
    hold: int = 2
    """Simulator steps for which an action is held."""
    max_steps: int = 100
    """Actions after which an episode that has not succeeded is given up."""

    def __post_init__(self):
        distinct = len(set(self.cameras)) == len(self.cameras) >= 1
        require(distinct and set(self.cameras) <= set(CAMERAS), "cameras", self.cameras, f"one or more of {', '.join(CAMERAS)}")
        for name in ("hold", "max_steps"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.image_size >= 16 and self.image_size % 2 == 0, "image_size", self.image_size, "an even number from 16 on")


def read_scene(assets: Path | None) -> Scene:
    """That of the demonstrations of a policy, by the assets that lie with its weights; the usual one where they do not say.

    Raises UserError where the file is damaged.
    """
    path = None if assets is None else assets / SCENE
    if path is None or not path.is_file():
        return Scene()
    try:
        values = json.loads(path.read_text())
        return Scene(**{**values, "cameras": tuple(values["cameras"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} cannot be read: {error}. Restore it from the dataset's meta, or remove it.") from None


def sentence(task: str) -> str:
    """What a task is called in English: its name in words where there is no better."""
    return SENTENCES.get(task, task.rsplit("-v", 1)[0].replace("-", " ").capitalize() + ".")


class World:
    """One task. An observation is Meta-World's: 39 numbers, of which the first four are the robot's own state."""

    def __init__(self, environment, scene: Scene):
        self.environment, self.scene = environment, scene

    def begin(self, seed: int) -> np.ndarray:
        """The first observation of the episode with this number. Meta-World's own reset takes no notice of a seed."""
        environment = self.environment
        environment._partially_observable = False  # the expert has to know the goal
        environment.__dict__.pop("sawyer_observation_space", None)  # bounds that were kept, to which a goal would be cut
        environment._freeze_rand_vec = False  # objects and goal are placed anew
        environment._set_task_called = environment.seeded_rand_vec = True
        environment.seed(seed)
        return environment.reset()[0]

    def see(self) -> dict[str, np.ndarray]:
        """What each camera sees, uint8 (height, width, 3)."""
        return {camera: self._draw(camera) for camera in self.scene.cameras}

    def _draw(self, camera: str) -> np.ndarray:
        """Meta-World's corner cameras hang upside down: what they see is turned by half a turn, and not mirrored."""
        self.environment.mujoco_renderer.camera_id = self.environment.model.camera(camera).id
        picture = self.environment.render()
        return np.ascontiguousarray(picture[::-1, ::-1] if camera.startswith("corner") else picture)

    def act(self, action: np.ndarray) -> tuple[np.ndarray, bool, bool]:
        """(observation, whether the task is done, whether the episode is over) after an action that is held."""
        for _ in range(self.scene.hold):
            observation, _, _, truncated, info = self.environment.step(action)
            if info["success"] or truncated:
                break
        return observation, bool(info["success"]), bool(info["success"] or truncated)

    def close(self) -> None:
        self.environment.close()


def open_world(task: str, scene: Scene) -> tuple[World, Callable]:
    """(world, a function that makes the task's scripted expert). Raises UserError where a package or the task is missing."""
    os.environ.setdefault("MUJOCO_GL", "egl" if any(Path("/dev").glob("nvidia[0-9]*")) else "osmesa")
    try:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
        from metaworld.policies import ENV_POLICY_MAP
    except ImportError as error:
        raise UserError(f"the simulator is not installed: install sharder-jax[sim] ({error}).") from None
    if task not in ENV_POLICY_MAP:
        raise UserError(f"--tasks: Meta-World has no task {task!r}; it has {', '.join(sorted(ENV_POLICY_MAP))}.")
    size = scene.image_size
    try:
        environment = ALL_V3_ENVIRONMENTS[task](render_mode="rgb_array", camera_name=scene.cameras[0], width=size, height=size)
        if not scene.shadows:
            environment.model.vis.quality.shadowsize = environment.model.vis.quality.offsamples = 0
        world = World(environment, scene)
        world.begin(0)
        world.see()
    except Exception as error:
        gl = os.environ["MUJOCO_GL"]
        raise UserError(
            f"the simulator cannot draw with MUJOCO_GL={gl} ({type(error).__name__}: {error}). Without a GPU, install"
            " libosmesa6."
        ) from None
    return world, ENV_POLICY_MAP[task]

"""Meta-World (arXiv:1910.10897): demonstrations by its scripted experts, written as a LeRobot dataset."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from sharder.config import UserError, require
from sharder.data.lerobot.write import DatasetWriter, Encoding

SENTENCES = {
    "reach-v3": "Reach the red target with the gripper.",
    "push-v3": "Push the red puck to the green goal.",
    "drawer-open-v3": "Open the drawer by pulling its handle.",
    "pick-place-v3": "Pick up the red puck and place it at the goal.",
}
STATE = ("hand_x", "hand_y", "hand_z", "gripper_opening")
"""The first numbers of an observation; the others tell where the objects are, which a policy has to see."""
ACTION = ("dx", "dy", "dz", "gripper_effort")


@dataclass(frozen=True)
class Recording:
    """What is recorded, and how."""

    tasks: Annotated[tuple[str, ...], tyro.conf.Suppress] = ("reach-v3",)
    episodes: int = 50
    """Successful demonstrations of each task."""
    seed: int = 0
    """Of the first episode; the next have the next numbers."""
    camera: str = "corner2"
    image_size: int = 96
    """Pixels along each side."""
    hold: int = 2
    """Simulator steps for which an action is held."""
    fps: int = 10
    max_steps: int = 100
    """Actions after which an episode that has not succeeded is given up."""
    codec: str = "libsvtav1"

    def __post_init__(self):
        require(len(self.tasks) >= 1, "tasks", self.tasks, "one or more names, as reach-v3")
        for name in ("episodes", "hold", "fps", "max_steps"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.image_size >= 16 and self.image_size % 2 == 0, "image_size", self.image_size, "an even number from 16 on")
        require(self.seed >= 0, "seed", self.seed, "at least 0")


def sentence(task: str) -> str:
    """What a task is called in English: its name in words where there is no better."""
    return SENTENCES.get(task, task.rsplit("-v", 1)[0].replace("-", " ").capitalize() + ".")


def open_environment(task: str, recording: Recording):
    """(environment, a function that makes the task's expert). Raises UserError where a package or the task is missing."""
    os.environ.setdefault("MUJOCO_GL", "egl" if any(Path("/dev").glob("nvidia[0-9]*")) else "osmesa")
    try:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
        from metaworld.policies import ENV_POLICY_MAP
    except ImportError as error:
        raise UserError(f"recording needs the simulator: install sharder-jax[sim] ({error}).") from None
    if task not in ENV_POLICY_MAP:
        raise UserError(f"--tasks: Meta-World has no task {task!r}; it has {', '.join(sorted(ENV_POLICY_MAP))}.")
    size = recording.image_size
    try:
        environment = ALL_V3_ENVIRONMENTS[task](render_mode="rgb_array", camera_name=recording.camera, width=size, height=size)
        begin(environment, recording.seed)
        environment.render()
    except Exception as error:
        gl = os.environ["MUJOCO_GL"]
        raise UserError(
            f"the simulator cannot draw with MUJOCO_GL={gl} ({type(error).__name__}: {error}). Without a GPU, install libosmesa6."
        ) from None
    return environment, ENV_POLICY_MAP[task]


def begin(environment, seed: int) -> np.ndarray:
    """The first observation of the episode with this number. Meta-World's own reset takes no notice of a seed."""
    environment._partially_observable = False  # the expert has to know the goal
    environment.__dict__.pop("sawyer_observation_space", None)  # bounds that were kept, to which a goal would be cut
    environment._freeze_rand_vec = False  # objects and goal are placed anew
    environment._set_task_called = environment.seeded_rand_vec = True
    environment.seed(seed)
    return environment.reset()[0]


def draw(environment) -> np.ndarray:
    """The camera's picture, uint8 (height, width, 3), the right way up.

    Meta-World's corner cameras hang upside down: what they see is turned by half a turn, and not mirrored.
    """
    return np.ascontiguousarray(environment.render()[::-1, ::-1])


def demonstrate(environment, make_expert: Callable, recording: Recording, seed: int) -> dict[str, np.ndarray] | None:
    """`state`, `action` (T, 4) and `picture` (T, H, W, 3) of one episode of the expert, up to its success; None where it fails."""
    observation = begin(environment, seed)
    expert, taken = make_expert(), {"state": [], "action": [], "picture": []}
    for _ in range(recording.max_steps):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of gains that are too high; the action is clipped
            action = np.clip(expert.get_action(observation), -1, 1).astype(np.float32)
        for name, value in (("state", observation[:4].astype(np.float32)), ("action", action), ("picture", draw(environment))):
            taken[name].append(value)
        for _ in range(recording.hold):
            observation, _, _, truncated, info = environment.step(action)
            if info["success"]:
                return {name: np.stack(values) for name, values in taken.items()}
            if truncated:
                return None
    return None


def record(recording: Recording, out: Path, say: Callable[[str], None] = print) -> None:
    """Writes the dataset `out`. Raises UserError where it exists, or an expert fails more often than it succeeds."""
    name = f"observation.images.{recording.camera}"
    size = recording.image_size
    writer = DatasetWriter(
        out, recording.fps, {"observation.state": list(STATE), "action": list(ACTION)}, {name: (size, size)}, "metaworld_sawyer",
        Encoding(recording.codec),
    )  # fmt: skip
    for task in recording.tasks:
        environment, make_expert = open_environment(task, recording)
        kept, seed = 0, recording.seed
        while kept < recording.episodes:
            if seed - recording.seed > 2 * recording.episodes + 10:
                raise UserError(
                    f"the expert of {task} succeeded in {kept} of {seed - recording.seed} episodes only: raise --max-steps."
                )
            episode = demonstrate(environment, make_expert, recording, seed)
            seed += 1
            if episode is not None:
                writer.add_episode(
                    {"observation.state": episode["state"], "action": episode["action"]},
                    {name: episode["picture"]},
                    sentence(task),
                )
                kept += 1
        environment.close()
        say(f"{task}: {kept} episodes from {seed - recording.seed} seeds")
    writer.close()
    say(f"{out}: {len(writer.episodes)} episodes, {writer.num_frames} frames")

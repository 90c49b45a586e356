"""Demonstrations by Meta-World's scripted experts, written as a LeRobot dataset."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from sharder.config import UserError, require
from sharder.data.lerobot.info import SCENE
from sharder.data.lerobot.write import DatasetWriter, Encoding
from sharder.sim.episode import plan_of_expert, play
from sharder.sim.metaworld import ACTION, STATE, Scene, open_world, sentence


@dataclass(frozen=True)
class Recording(Scene):
    """What is recorded, and how."""

    tasks: Annotated[tuple[str, ...], tyro.conf.Suppress] = ("reach-v3",)
    episodes: int = 50
    """Successful demonstrations of each task."""
    seed: int = 0
    """Of the first episode; the next have the next numbers."""
    wander: int = 0
    """Actions at most, of a number and in a direction drawn at random, before a demonstration begins. An arm that always sets
    out from one place shows by where it is where it goes, and a policy that learns that need not look."""
    fps: int = 10
    codec: str = "libsvtav1"

    def __post_init__(self):
        super().__post_init__()
        require(len(self.tasks) >= 1, "tasks", self.tasks, "one or more names, as reach-v3")
        for name in ("episodes", "fps"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("seed", "wander"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")


def camera_key(camera: str) -> str:
    """What a camera is called in a dataset, and by a policy that was trained on it."""
    return f"observation.images.{camera}"


def wander(most: int, seed: int) -> np.ndarray:
    """Up to `most` times the same action, (n, 4), with an open gripper."""
    rng = np.random.default_rng(seed)
    return np.tile(np.append(rng.uniform(-1, 1, 3), -1.0).astype(np.float32), (rng.integers(most + 1), 1))


def record(recording: Recording, out: Path, say: Callable[[str], None] = print) -> None:
    """Writes the dataset `out`. Raises UserError where it exists, or an expert fails more often than it succeeds."""
    size = recording.image_size
    writer = DatasetWriter(
        out, recording.fps, {"observation.state": list(STATE), "action": list(ACTION)},
        {camera_key(camera): (size, size) for camera in recording.cameras}, "metaworld_sawyer", Encoding(recording.codec),
    )  # fmt: skip
    for task in recording.tasks:
        world, make_expert = open_world(task, recording)
        kept, seed = 0, recording.seed
        while kept < recording.episodes:
            if seed - recording.seed > 2 * recording.episodes + 10:
                raise UserError(
                    f"the expert of {task} succeeded in {kept} of {seed - recording.seed} episodes only: raise --max-steps."
                )
            episode = play(world, plan_of_expert(make_expert), seed, before=wander(recording.wander, seed))
            seed += 1
            if episode.succeeded:
                writer.add_episode(
                    {"observation.state": episode.state, "action": episode.action},
                    {camera_key(camera): pictures for camera, pictures in episode.pictures.items()},
                    sentence(task),
                )
                kept += 1
        world.close()
        say(f"{task}: {kept} episodes from {seed - recording.seed} seeds")
    writer.close()
    scene = {field.name: getattr(recording, field.name) for field in fields(Scene)}
    (out / "meta" / SCENE).write_text(json.dumps(scene, indent=4))
    say(f"{out}: {len(writer.episodes)} episodes, {writer.num_frames} frames")

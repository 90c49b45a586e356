"""One episode in closed loop: look, plan some actions, do them, look again. Demonstrations and evaluations are both made here.

Shape letters: T actions of the episode, H height, W width.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sharder.sim.metaworld import STATE, World

Plan = Callable[[np.ndarray, dict[str, np.ndarray]], np.ndarray]
"""(observation, picture of each camera) to the next actions, (any number, 4)."""


@dataclass(frozen=True)
class Episode:
    """What the robot saw before each action, what it did, and whether that did the task."""

    succeeded: bool
    state: np.ndarray
    """(T, 4) float32"""
    action: np.ndarray
    """(T, 4) float32 in [-1, 1]"""
    pictures: dict[str, np.ndarray]
    """By camera, uint8 (T, H, W, 3)."""


def play(world: World, plan: Plan, seed: int, replan_every: int = 1, before: Sequence[np.ndarray] = ()) -> Episode:
    """An episode up to its success, or to the scene's number of actions; of a plan `replan_every` actions are done at most.

    The actions `before` are done first, and are no part of it.
    """
    observation, over, succeeded = world.begin(seed), False, False
    for action in before:
        observation, _, _ = world.act(action)
    states, actions, seen, planned = [], [], [], []
    while not over and len(actions) < world.scene.max_steps:
        pictures = world.see()
        if not planned:
            planned = list(plan(observation, pictures)[:replan_every])
        action = np.clip(planned.pop(0), -1, 1).astype(np.float32)
        for kept, value in ((states, observation[: len(STATE)].astype(np.float32)), (actions, action), (seen, pictures)):
            kept.append(value)
        observation, succeeded, over = world.act(action)
    by_camera = {camera: np.stack([pictures[camera] for pictures in seen]) for camera in world.scene.cameras}
    return Episode(succeeded, np.stack(states), np.stack(actions), by_camera)


def plan_of_expert(make_expert: Callable) -> Plan:
    """The task's scripted expert, which knows where everything is."""
    expert = make_expert()

    def plan(observation: np.ndarray, pictures: dict[str, np.ndarray]) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of gains that are too high; the action is clipped
            return expert.get_action(observation)[None]

    return plan

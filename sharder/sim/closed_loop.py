"""How often a policy does a task: episodes in closed loop, asked as a server asks it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sharder.config import UserError
from sharder.serve.policy import Policy
from sharder.sim.episode import Episode, Plan
from sharder.sim.metaworld import ACTION, CAMERAS, STATE
from sharder.sim.record import camera_key

STATE_KEY = "observation.state"
Z_95 = 1.959964
"""Of the two-sided 95 % interval."""


@dataclass(frozen=True)
class Tally:
    """What came of the episodes of one task."""

    task: str
    first_seed: int
    succeeded: tuple[bool, ...]
    """By episode; the seeds follow one another."""
    num_actions: tuple[int, ...]
    """By episode, up to its success or to the limit."""

    @property
    def success_rate(self) -> float:
        return sum(self.succeeded) / len(self.succeeded)

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(sum(self.succeeded), len(self.succeeded))

    def describe(self) -> str:
        """One line."""
        done = [n for n, ok in zip(self.num_actions, self.succeeded) if ok]
        low, high = self.interval
        took = f"; a success took {np.median(done):.0f} actions (median)" if done else ""
        return (
            f"{self.task}: {sum(self.succeeded)} of {len(self.succeeded)} episodes succeeded, {self.success_rate:.0%}"
            f" (95 % interval {low:.0%} to {high:.0%}){took}"
        )

    def as_dict(self) -> dict:
        """As plain values."""
        return {
            "task": self.task, "episodes": len(self.succeeded), "successes": sum(self.succeeded),
            "success_rate": self.success_rate, "interval_95": list(self.interval), "first_seed": self.first_seed,
            "succeeded": list(self.succeeded), "num_actions": list(self.num_actions),
        }  # fmt: skip


def wilson_interval(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Confidence interval of a share, which stays within 0 and 1 also where all or none succeed (Wilson 1927)."""
    share, spread = successes / trials, z * z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def cameras_of(policy: Policy) -> tuple[str, ...]:
    """The simulator's cameras that the policy looks through. Raises UserError where it was not trained on this robot."""
    asked, known = tuple(policy.robot.request.cameras.values()), {camera_key(camera): camera for camera in CAMERAS}
    for key in asked:
        if key not in known:
            raise UserError(f"the policy looks through {key!r}, which Meta-World does not have; it has {', '.join(known)}.")
    if policy.robot.request.state != (STATE_KEY,) or policy.state_dim not in (None, len(STATE)):
        raise UserError(
            f"the policy takes {policy.state_dim} numbers of {' + '.join(policy.robot.request.state)}, but Meta-World's robot"
            f" has {STATE_KEY} of {len(STATE)}: {', '.join(STATE)}."
        )
    if policy.num_actions != len(ACTION):
        raise UserError(
            f"the policy gives {policy.num_actions} numbers, but Meta-World's robot takes {len(ACTION)}: {', '.join(ACTION)}."
        )
    return tuple(known[key] for key in asked)


def plan_of_policy(policy: Policy, prompt: str, blank_images: bool = False) -> Plan:
    """Chunks of actions of a policy, from the pictures, the robot's own state and the task in words.

    With `blank_images` it sees black: what it then still can do it does without looking.
    """

    def plan(observation: np.ndarray, pictures: dict[str, np.ndarray]) -> np.ndarray:
        shown = {camera_key(c): np.zeros_like(picture) if blank_images else picture for c, picture in pictures.items()}
        request = shown | {STATE_KEY: observation[: len(STATE)].astype(np.float32), "prompt": prompt}
        return policy.act([policy.read(request)], 1)[0]

    return plan


def tally(
    task: str, play_one: Callable[[int], Episode], first_seed: int, episodes: int, keep: int
) -> tuple[Tally, list[Episode]]:
    """Plays the episodes of the seeds from `first_seed` on; the first `keep` of them are returned whole."""
    succeeded, num_actions, kept = [], [], []
    for seed in range(first_seed, first_seed + episodes):
        episode = play_one(seed)
        succeeded.append(episode.succeeded)
        num_actions.append(len(episode.action))
        kept += [episode] if len(kept) < keep else []
    return Tally(task, first_seed, tuple(succeeded), tuple(num_actions)), kept

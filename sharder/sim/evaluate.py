"""A policy in the simulator: every task, so many episodes, and what is told of them."""

import dataclasses
from collections.abc import Callable, Sequence

from sharder.config import require
from sharder.serve.policy import Policy
from sharder.sim import metaworld
from sharder.sim.closed_loop import cameras_of, plan_of_policy, tally
from sharder.sim.episode import Episode, play
from sharder.sim.options import Trials


def evaluate_policy(
    policy: Policy, tasks: Sequence[str], trials: Trials, scene: metaworld.Scene, say: Callable[[str], None] = print
) -> tuple[dict, list[Episode]]:
    """(what came of it, as plain values; the first episodes of each task), in `scene`, but for the cameras: the policy has them.

    Raises UserError where the policy is of another robot.
    """
    scene, horizon = dataclasses.replace(scene, cameras=cameras_of(policy)), policy.model.action_horizon
    replan_every = trials.replan_every or max(1, horizon // 2)
    require(replan_every <= horizon, "replan_every", replan_every, f"at most {horizon}, the actions of a chunk")
    tallies, episodes = [], []
    for task in tasks:
        world, _ = metaworld.open_world(task, scene)
        # A policy that was trained with one prompt knows no other.
        prompt = metaworld.sentence(task) if policy.usage.prompt is None else policy.usage.prompt
        plan = plan_of_policy(policy, prompt, trials.blank_images)
        found, kept = tally(
            task, lambda seed: play(world, plan, seed, replan_every), trials.seed, trials.episodes, trials.video_episodes
        )
        world.close()
        say(found.describe())
        tallies.append(found.as_dict() | {"prompt": prompt})
        episodes += kept
    told = {
        "simulator": "metaworld", "tasks": tallies, "replan_every": replan_every, "action_horizon": horizon,
        "blank_images": trials.blank_images, **dataclasses.asdict(scene),
    }  # fmt: skip
    return told, episodes

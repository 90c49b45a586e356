"""Policies in closed loop: in a simulator without a simulator always, in Meta-World where it is installed."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import make
from lane import lane
from PIL import Image
from small import small_robot
from written_run import write_run

from sharder.config import ParallelConfig, UserError
from sharder.serve.opening import find, open_policy
from sharder.serve.options import ModelOptions, RobotOptions, SamplingOptions
from sharder.sim import commands, metaworld
from sharder.sim.closed_loop import cameras_of, plan_of_policy, tally, wilson_interval
from sharder.sim.episode import play
from sharder.sim.metaworld import Scene


@pytest.mark.parametrize(
    "successes, trials, low, high",
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (45, 50, 0.7864, 0.9565), (20, 20, 0.8389, 1.0)],
)  # fmt: skip
def test_the_interval_is_wilsons(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-4)


def test_a_plan_is_made_anew_when_its_first_actions_are_done():
    asked = []

    def plan(observation, pictures):
        asked.append(round(observation[0], 3))
        return np.tile(np.array([0.4, 0, 0, 0]), (5, 1))

    episode = play(lane(Scene(hold=1)), plan, seed=0, replan_every=3)
    assert asked == pytest.approx([0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9]) and len(episode.action) == 20


class Looking:
    """A policy that goes on as long as it sees the floor."""

    def read(self, request):
        return request

    def act(self, examples, batch_size):
        (request,) = examples
        assert request["prompt"] == "Go." and request["observation.state"].shape == (4,)
        goes = 1.0 if request["observation.images.corner2"].max() > 100 else -1.0
        return [np.tile(np.array([goes, 0, 0, 0], np.float32), (4, 1))]


def rate(blank: bool) -> float:
    world = lane(Scene(max_steps=10))
    plan = plan_of_policy(Looking(), "Go.", blank)
    return tally("go", lambda seed: play(world, plan, seed, 4), 0, 4, 0)[0].success_rate


def test_a_policy_that_looks_fails_on_black_pictures():
    assert (rate(blank=False), rate(blank=True)) == (1.0, 0.0)


def test_episodes_are_counted_and_the_first_are_kept():
    def plan(observation, pictures):
        return np.tile(np.array([0.5, 0, 0, 0]), (1, 1))

    world = lane(Scene(hold=1, max_steps=10))
    found, kept = tally("go", lambda seed: play(world, plan, seed), 2, 4, 2)
    assert (found.first_seed, found.succeeded, found.num_actions) == (2, (False, False, True, True), (10, 10, 10, 8))
    assert [len(e.action) for e in kept] == [10, 10]
    assert "2 of 4 episodes succeeded, 50% (95 % interval 15% to 85%); a success took 9 actions" in found.describe()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Of a policy that Meta-World's robot could ask, with parameters drawn at random."""
    data = tmp_path_factory.mktemp("data") / "d"
    make(data, cameras={"observation.images.corner2": (16, 16)}, state_dim=4, action_dim=4)
    (data / "meta" / "scene.json").write_text(json.dumps(dataclasses.asdict(Scene(("corner2", "topview"), 16, hold=3))))
    config = small_robot()
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, path=str(data), workers=0, validation_fraction=0.0),
        model=dataclasses.replace(config.model, augment=False, max_prompt_len=48),
        parallel=dataclasses.replace(config.parallel, reduction="fast"),
    )  # fmt: skip
    return write_run(config, tmp_path_factory.mktemp("run") / "run", steps=(1,))


@pytest.fixture
def on_the_lane(monkeypatch):
    monkeypatch.setattr(metaworld, "open_world", lambda task, scene: (lane(scene), None))


def test_the_command_counts_and_draws(run, on_the_lane, capsys):
    asked = [
        str(run),
        "--sim",
        "metaworld",
        "--episodes",
        "3",
        "--max-steps",
        "4",
        "--json",
        "--seed",
        "1",
    ]
    assert commands.evaluate([*asked, "--replan-every", "3", "--video-episodes", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    (task,) = told["tasks"]
    assert task["prompt"] == "Reach the red target with the gripper."  # the dataset knows two tasks
    assert task["episodes"] == 3 and task["first_seed"] == 1 and len(task["succeeded"]) == 3
    assert (told["cameras"], told["replan_every"], told["blank_images"]) == (["corner2"], 3, False)
    # As the demonstrations were recorded, but for what was given.
    assert (told["image_size"], told["hold"], told["shadows"], told["max_steps"]) == (16, 3, False, 4)
    with Image.open(run / "figures" / "closed_loop.gif") as gif:
        shown_ms = sum(gif.seek(n) or gif.info["duration"] for n in range(gif.n_frames))  # equal pictures are one
        assert gif.size == (32, 32) and shown_ms == 2 * (3 * 100 + 1000) and task["num_actions"] == [4, 4, 4]


def open_it(path):
    return open_policy(
        find(path, None, None), ModelOptions(), RobotOptions(), SamplingOptions(), ParallelConfig(policy="dp"), None
    )


def test_what_is_evaluated_is_what_is_served(run):
    policy = open_it(run)
    assert cameras_of(policy) == ("corner2",)
    world = lane(Scene(image_size=16))
    observation, pictures = world.begin(3), world.see()
    request = {
        "observation.images.corner2": pictures["corner2"], "observation.state": observation[:4], "prompt": "Reach it."
    }  # fmt: skip
    (served,) = policy.act([policy.read(request)], 1)
    assert (plan_of_policy(policy, "Reach it.")(observation, pictures) == served).all() and served.shape == (8, 4)
    assert (plan_of_policy(policy, "Reach it.", blank_images=True)(observation, pictures) != served).any()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tasks", " , "], "--tasks"),
        (["--episodes", "0"], "--episodes is 0"),
        (["--replan-every", "9"], "--replan-every is 9, but must be at most 8"),
        (["--image-size", "15"], "--image-size is 15"),
        (["--sim", "isaac"], "metaworld"),
    ],
)
def test_wrong_arguments_are_one_message(run, on_the_lane, arguments, message, capsys):
    with pytest.raises((UserError, SystemExit)) as raised:
        commands.evaluate([str(run), *(["--sim", "metaworld"] if "--sim" not in arguments else []), *arguments])
    assert message in str(raised.value) + capsys.readouterr().err


def test_what_was_recorded_otherwise_is_played_otherwise_and_said(run, on_the_lane, capsys):
    assert commands.evaluate([str(run), "--sim", "metaworld", "--episodes", "1", "--hold", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hold"] == 1


def test_a_damaged_scene_is_named(tmp_path):
    assert metaworld.read_scene(tmp_path) == metaworld.read_scene(None) == Scene()
    for damaged in ("{", '{"cameras": ["corner2"], "zoom": 2}', "{}"):
        (tmp_path / "scene.json").write_text(damaged)
        with pytest.raises(UserError, match="scene.json cannot be read: .*Restore it from the dataset's meta"):
            metaworld.read_scene(tmp_path)


def stand_in(cameras, state=("observation.state",), state_dim=4, num_actions=4):
    request = SimpleNamespace(cameras=dict(enumerate(cameras)), state=state)
    return SimpleNamespace(robot=SimpleNamespace(request=request), state_dim=state_dim, num_actions=num_actions)


@pytest.mark.parametrize(
    "policy, message",
    [
        (stand_in(["observation.images.top"]), "looks through 'observation.images.top'.* it has observation.images.corner,"),
        (stand_in(["observation.images.corner2"], state_dim=14), "takes 14 numbers of observation.state"),
        (stand_in(["observation.images.corner2"], num_actions=7), "gives 7 numbers, but Meta-World's robot takes 4"),
    ],
)
def test_a_policy_of_another_robot_is_refused(policy, message):
    with pytest.raises(UserError, match=message):
        cameras_of(policy)


def test_without_the_simulator_one_line_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "metaworld", None)
    with pytest.raises(UserError, match=r"install sharder-jax\[sim\]"):
        commands.evaluate([str(run), "--sim", "metaworld"])


def test_the_expert_succeeds_in_the_same_loop():
    pytest.importorskip("metaworld")
    from sharder.sim.episode import plan_of_expert

    world, make_expert = metaworld.open_world("reach-v3", Scene(image_size=16))
    found, _ = tally("reach-v3", lambda seed: play(world, plan_of_expert(make_expert), seed), 100_000, 3, 0)
    world.close()
    assert found.succeeded == (True,) * 3

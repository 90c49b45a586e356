"""A served policy gives what the model's sampler gives on the same example of the training pipeline, in the robot's units."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from datasets import make

from sharder.checkpoint.restore import restore_numpy
from sharder.config import ParallelConfig, RobotConfig, UserError
from sharder.data.assets import usage_of
from sharder.data.chunks import chunk_rows
from sharder.data.open import open_datasets
from sharder.models.build import declare, unflatten
from sharder.serve.options import SamplingOptions
from sharder.serve.policy import Policy


def observe(dataset, columns, pictures, frame: int) -> dict:
    """What a robot would send in a recorded frame."""
    numbers = {name: columns[name][frame] for name in dataset.numbers.robot.request.state}
    prompt = dataset.numbers.source.prompts(np.array([frame]))[0]
    return numbers | {camera: frames[frame] for camera, frames in pictures.items()} | {"prompt": prompt}


def sampled_directly(config, run_dir, step, batch, noise) -> np.ndarray:
    from flax import nnx

    saved = restore_numpy(run_dir, step)
    params = unflatten({path.removeprefix("params/"): x for path, x in saved.items() if path.startswith("params/")})
    graphdef = declare(config.model).graphdef
    return np.asarray(
        jax.jit(lambda *arguments: nnx.merge(graphdef, arguments[0]).sample(*arguments[1:]))(params, batch, noise)
    )


def test_actions_are_those_of_the_sampler_on_the_example_of_the_training_pipeline(tmp_path, robot_config, robot_run, policy):
    columns, pictures = make(tmp_path / "d")
    dataset, _ = open_datasets(robot_config)
    frames = np.array([3, 20, 40])
    batch = dataset.read(np.searchsorted(dataset.frames, frames))
    examples = [policy.read(observe(dataset, columns, pictures, int(f))) for f in frames]
    for name, rows in batch.items():
        if not name.startswith("action"):
            assert np.array_equal(np.stack([e.batch[name] for e in examples]), rows), name
    sampled = sampled_directly(
        robot_config,
        robot_run,
        2,
        {k: x for k, x in batch.items() if "action" not in k},
        np.stack([e.noise_TA for e in examples]),
    )
    stats = dataset.norm_stats["actions"]
    expected = sampled[:, :, :2] * (stats.std + 1e-6) + stats.mean
    expected[:, :, 0] += columns["observation.state"][frames, 0][:, None]  # the first is relative, the second is not
    np.testing.assert_allclose(np.stack(policy.act(examples, 4)), expected, rtol=1e-4, atol=1e-5)


def test_the_prompt_of_pi05_has_the_state_of_the_request(tmp_path, robot_config, policy):
    columns, pictures = make(tmp_path / "d")
    model = replace(robot_config.model, variant="pi05", max_prompt_len=80)
    dataset, _ = open_datasets(replace(robot_config, model=model))
    usage = usage_of(dataset)
    served = Policy(model, usage, usage.robot(), dataset.scaling, dataset.encode_prompts, policy.sample)
    row = int(np.searchsorted(dataset.frames, 20))
    expected, found = dataset.read(np.array([row])), served.read(observe(dataset, columns, pictures, 20)).batch
    assert usage.normalization == "quantile" and all(np.array_equal(found[name], expected[name][0]) for name in found)


@pytest.mark.parametrize(
    "robot, normalization, state_dim, action_dim",
    [
        (RobotConfig(relative=(1, -1)), "z_score", 3, 2),
        (RobotConfig(relative=(2,), least_range=10.0), "quantile", 3, 2),
        (RobotConfig(), "none", 2, 3),
    ],
)
def test_what_training_does_to_actions_is_undone(tmp_path, robot_config, policy, robot, normalization, state_dim, action_dim):
    check_round_trip(tmp_path, robot_config, policy, robot, normalization, state_dim, action_dim)


def test_what_training_does_to_those_of_aloha_is_undone(tmp_path, robot_config, policy):
    check_round_trip(
        tmp_path,
        robot_config,
        policy,
        RobotConfig(policy="aloha", cameras=("base_0_rgb=observation.images.top",)),
        "quantile",
        14,
        14,
    )


def check_round_trip(tmp_path, config, policy, robot, normalization, state_dim, action_dim):
    columns, _ = make(tmp_path / "d", state_dim=state_dim, action_dim=action_dim)
    config = replace(
        config, model=replace(config.model, action_dim=16), data=replace(config.data, path=str(tmp_path / "d")),
        robot=replace(robot, normalization=normalization),
    )  # fmt: skip
    dataset, _ = open_datasets(config)
    usage = usage_of(dataset)
    served = Policy(config.model, usage, usage.robot(), dataset.scaling, dataset.encode_prompts, policy.sample)
    ids = np.array([5, 30])
    normalised, source = dataset.read(ids)["actions"], dataset.numbers.source
    rows, _ = chunk_rows(dataset.frames[ids], config.model.action_horizon, source.starts, source.lengths)
    for actions, row, frame in zip(normalised, rows, dataset.frames[ids]):
        state = usage.robot().encode_state(columns["observation.state"][frame])
        np.testing.assert_allclose(served.decode(actions, state), columns["action"][row], atol=2e-5)


def test_noise_is_of_the_observation_and_the_seed(robot_run, policy, observation):
    again, other = policy.read(observation), policy.read(observation | {"prompt": "do task 1"})
    noise = policy.read(observation).noise_TA
    assert np.array_equal(noise, again.noise_TA) and not np.array_equal(noise, other.noise_TA)
    assert not np.array_equal(noise, replace(policy, seed=1).read(observation).noise_TA)


def test_an_example_in_a_batch_is_the_example_alone(policy, observation):
    examples = [policy.read(observation | {"observation.state": np.full(3, x)}) for x in (0.1, 0.2, 0.3)]
    together = policy.act(examples, 4)
    for example, actions in zip(examples, together):
        np.testing.assert_allclose(policy.act([example], 1)[0], actions, rtol=1e-4, atol=1e-5)
    assert np.abs(together[0] - together[1]).max() > 1e-3


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(policy="dp", tensor=2),
        pytest.param(ParallelConfig(policy="fsdp", fsdp=2, replicate=("action_out/bias",)), marks=pytest.mark.slow),
    ],
    ids=["tensor", "fsdp"],
)
def test_several_devices_give_the_same_actions(opened, robot_run, policy, observation, parallel):
    divided = opened(robot_run, parallel=parallel)
    example = policy.read(observation)
    np.testing.assert_allclose(divided.act([example], 1)[0], policy.act([example], 1)[0], rtol=1e-4, atol=1e-5)


def test_the_average_of_the_parameters_gives_others(opened, robot_run, policy, observation):
    example = policy.read(observation)
    averaged = opened(robot_run, sampling=SamplingOptions(average=True)).act([example], 1)[0]
    assert np.abs(averaged - policy.act([example], 1)[0]).max() > 1e-6


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"observation.state": np.zeros(4)}, "observation.state has 4 numbers, but this policy takes 3"),
        ({"observation.state": np.zeros((3, 1))}, r"observation.state has shape \(3, 1\)"),
        ({"observation.state": np.array([1, np.nan, 2])}, "observation.state .* finite"),
        ({"observation.state": "text"}, "observation.state is no array of numbers"),
        ({"observation.images.top": np.zeros((24, 40), np.uint8)}, r"observation.images.top has shape \(24, 40\)"),
        ({"observation.images.top": np.zeros((24, 0, 3), np.uint8)}, "observation.images.top .* 1 to 8192 pixels"),
        ({"observation.images.top": np.zeros((1, 9000, 3), np.uint8)}, "observation.images.top .* 1 to 8192 pixels"),
        ({"observation.images.top": np.full((24, 40, 3), np.nan)}, "observation.images.top holds a number that is not finite"),
        ({"observation.images.top": np.zeros((24, 40, 3), np.int32)}, "observation.images.top is of dtype int32"),
        ({"observation.images.wrist": [[1], [2, 3]]}, "observation.images.wrist is no picture"),
        ({"prompt": 7}, "prompt is of type int"),
        ({"prompt": "x" * 10_001}, "prompt has 10001 characters"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_wrong_field_is_named(policy, observation, changed, message):
    with pytest.raises(UserError, match=message):
        policy.read(observation | changed)


@pytest.mark.parametrize("key", ["observation.state", "observation.images.top", "prompt"])
def test_a_missing_field_is_named(policy, observation, key):
    del observation[key]
    with pytest.raises(UserError, match=f"has no '{key}'"):
        policy.read(observation)


def test_a_prompt_may_be_an_array_of_numpy(policy, observation):
    found = policy.read(observation | {"prompt": np.array("do task 0")})
    assert np.array_equal(found.batch["tokens"], policy.read(observation).batch["tokens"])

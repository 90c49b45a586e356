"""Examples of a robot dataset against what they should be, taken apart by hand."""

import dataclasses

import numpy as np
import pytest
from datasets import FOLDER, make

from sharder.config import UserError
from sharder.data.lerobot.inspect import read_pictures
from sharder.data.lerobot.source import open_lerobot
from sharder.data.normalize import normalize
from sharder.data.pictures import Pictures
from sharder.data.resize import resize_with_padding
from sharder.data.robot_dataset import Numbers, RobotDataset, Scaling, Shapes, frames_of, held_out_episodes
from sharder.data.robots import generic

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
SHAPES = Shapes(CAMERAS, (28, 28), action_dim=6, action_horizon=5)


def encode(prompts, state):
    """Tokens that show what they were made of."""
    tokens = np.array([[len(p), *p.encode()[:3]] for p in prompts], np.int32)
    return tokens, np.ones(tokens.shape, bool)


def open_dataset(root, relative=(), how="z_score", num_workers=0, shapes=SHAPES, **changes) -> RobotDataset:
    source = open_lerobot(root)
    robot = dataclasses.replace(generic(source.cameras, ("observation.state",), "action"), relative=relative)
    numbers = Numbers(source, robot, shapes.action_horizon).check()
    everything = np.arange(len(source.lengths))
    scaling = Scaling(numbers.statistics(everything), how)
    return RobotDataset(
        numbers, frames_of(source, everything), shapes, scaling, Pictures(shapes.height_width, num_workers), encode, **changes
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made") / "d"
    make(root)
    return root


@pytest.mark.parametrize("how", ["z_score", "quantile"])
@pytest.mark.parametrize("relative", [(), (True, False)], ids=["absolute", "relative"])
def test_states_and_actions_are_normalised_by_their_own_statistics(made, how, relative):
    dataset = open_dataset(made, relative, how)
    source, ids = dataset.numbers.source, np.array([40, 3, 8, 51])
    batch = dataset.read(ids)
    state, action = source.columns["observation.state"], source.columns["action"]
    chunks, pads = [], []
    for frame in range(source.num_frames):
        e = int(source.episode_of(np.array([frame]))[0])
        last = source.starts[e] + source.lengths[e] - 1
        rows = [min(frame + h, last) for h in range(5)]
        chunk = action[rows].copy()
        if relative:
            chunk[:, 0] -= state[frame, 0]
        chunks.append(chunk)
        pads.append([frame + h > last for h in range(5)])
    chunks, pads = np.stack(chunks), np.array(pads)
    flat = chunks.reshape(-1, 2).astype(np.float64)
    stats = dataset.scaling.stats["actions"]
    assert np.allclose(stats.mean, flat.mean(0), atol=1e-12) and np.allclose(stats.std, flat.std(0), atol=1e-10)
    assert np.allclose([stats.q01, stats.q99], np.quantile(flat, (0.01, 0.99), axis=0), atol=1e-12)
    assert np.allclose(dataset.scaling.stats["state"].mean, state.mean(0, dtype=np.float64), atol=1e-12)
    assert np.array_equal(batch["actions"][..., :2], normalize(chunks[ids], stats, how))
    assert np.array_equal(batch["state"][:, :3], normalize(state[ids], dataset.scaling.stats["state"], how))
    assert np.array_equal(batch["action_is_pad"], pads[ids])


def test_what_is_filled_up_is_zero_and_flagged(made):
    batch = open_dataset(made).read(np.array([5, 0]))
    assert (batch["actions"][..., 2:] == 0).all() and (batch["state"][:, 3:] == 0).all()
    assert batch["action_dim_mask"].tolist() == [[True, True, False, False, False, False]] * 2
    assert batch["image_mask/right_wrist_0_rgb"].tolist() == [False, False] and batch["image_mask/base_0_rgb"].all()
    assert (batch["image/right_wrist_0_rgb"] == 0).all()


def test_pictures_are_those_of_their_frames_resized(made):
    dataset, ids = open_dataset(made), np.array([11, 47, 11, 2])
    batch = dataset.read(ids)
    for camera, place in (("observation.images.top", "base_0_rgb"), ("observation.images.wrist", "left_wrist_0_rgb")):
        for found, raw in zip(batch[f"image/{place}"], read_pictures(dataset.numbers.source, camera, ids), strict=True):
            assert np.array_equal(found, resize_with_padding(raw, 28, 28))


def test_prompts_are_the_tasks_unless_one_is_given(made):
    ids = np.array([0, 10])  # of the first and of the second episode
    tasks = ["do task 0", "do task 1"]
    assert np.array_equal(open_dataset(made).read(ids)["tokens"], encode(tasks, None)[0])
    assert np.array_equal(open_dataset(made, prompt="fold").read(ids)["tokens"], encode(["fold"] * 2, None)[0])


def test_an_example_does_not_depend_on_its_batch(made):
    dataset, ids = open_dataset(made, (True, True)), np.array([30, 1, 44, 30, 12])
    whole = dataset.read(ids)
    for at, i in enumerate(ids):
        alone = dataset.read(np.array([i]))
        assert all(np.array_equal(alone[key][0], whole[key][at]) for key in whole)


def test_workers_change_nothing():
    ids = np.random.default_rng(0).integers(0, 417, 24)
    alone, pooled = (open_dataset(FOLDER / "v3_video", num_workers=n) for n in (0, 2))
    a, b = alone.read(ids), pooled.read(ids)
    pooled.close()
    assert all(np.array_equal(a[key], b[key]) for key in a)


def test_the_fingerprint_names_everything_that_decides_an_example(made):
    small = dataclasses.replace(SHAPES, action_horizon=4)
    ways = [{}, {"relative": (True,)}, {"how": "quantile"}, {"prompt": "x"}, {"shapes": small}, {"name_of_prompts": "other"}]
    prints = [open_dataset(made, **way).fingerprint for way in ways]
    assert len(set(prints)) == len(ways) and open_dataset(made).fingerprint == prints[0]
    dataset = open_dataset(made)
    assert dataset.with_frames(dataset.frames[1:]).fingerprint != dataset.fingerprint


def test_a_model_that_is_too_small_is_named(made):
    with pytest.raises(UserError, match="action-dim is 2. Raise it to 3"):
        open_dataset(made, shapes=dataclasses.replace(SHAPES, action_dim=2))


def test_a_number_that_is_not_finite_is_named(made):
    source = open_lerobot(made)
    source.columns["action"][25, 1] = np.nan
    with pytest.raises(UserError, match="column action, frame 2 of episode 2"):
        Numbers(source, generic(source.cameras, ("observation.state",), "action"), 5).check()


@pytest.mark.parametrize(
    "change, message", [({"state": ("x",)}, "no column 'x'"), ({"cameras": {"base_0_rgb": "y"}}, "no camera 'y'")]
)
def test_a_key_that_is_not_there_is_named(made, change, message):
    source = open_lerobot(made)
    robot = generic(source.cameras, ("observation.state",), "action")
    robot = dataclasses.replace(robot, dataset=dataclasses.replace(robot.dataset, **change))
    with pytest.raises(UserError, match=message):
        Numbers(source, robot, 5).check()


def test_held_out_episodes_hardly_change_when_episodes_are_added():
    before, after = (held_out_episodes(np.arange(n), 0.1) for n in (200, 220))
    assert before.sum() == 20 and after.sum() == 22
    assert (before & ~after[:200]).sum() <= 4


@pytest.mark.parametrize("count, fraction, expected", [(12, 0.05, 1), (12, 0.0, 0), (1, 0.5, 0), (2, 0.99, 1), (4, 0.5, 2)])
def test_at_least_one_episode_is_held_out_and_not_all(count, fraction, expected):
    assert held_out_episodes(np.arange(count), fraction).sum() == expected

"""From a configuration to examples."""

import dataclasses

import numpy as np
import pytest
from datasets import FOLDER, NAMES, make
from rlds import make_rlds

from sharder.config import DataConfig, MixturePart, RobotConfig, UserError
from sharder.data.mixture import Mixture
from sharder.data.normalize import read_norm_stats
from sharder.data.open import open_datasets, open_order, write_assets
from sharder.data.open_robot import choose_episodes, make_robot, open_source
from sharder.recipes import load_recipe


def config(recipe: str = "pi0_tiny", robot=RobotConfig(), **data):
    base = load_recipe(recipe)
    data = {"workers": 0, "validation_fraction": 0.25, **data}
    return dataclasses.replace(base, data=dataclasses.replace(base.data, **data), robot=robot)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made") / "d"
    make(root)
    return root


@pytest.mark.parametrize("recipe", ["pi0_tiny", "pi05_tiny"])
@pytest.mark.parametrize("name", NAMES)
def test_every_dataset_gives_batches_of_the_model_s_shapes(recipe, name):
    settings = config(recipe, path=str(FOLDER / name))
    training, validation = open_datasets(settings)
    batch, model = training.read(np.array([0, 60])), settings.model
    synthetic = open_datasets(config(recipe))[0].read(np.array([0, 60]))
    assert {k: (x.shape, x.dtype) for k, x in batch.items()} == {k: (x.shape, x.dtype) for k, x in synthetic.items()}
    assert np.abs(batch["state"]).max() < 10 and batch["token_mask"].any(1).all()
    frames = np.concatenate([training.frames, validation.frames])
    assert sorted(frames.tolist()) == list(range(training.numbers.source.num_frames)) and model.cameras[0] == "base_0_rgb"


def test_held_out_episodes_are_whole(made):
    training, validation = open_datasets(config(path=str(made)))
    episode_of = training.numbers.source.episode_of
    assert not set(episode_of(training.frames).tolist()) & set(episode_of(validation.frames).tolist())


def test_pi0_takes_z_scores_and_pi05_quantiles(made):
    hows = [open_datasets(config(recipe, path=str(made)))[0].scaling.how for recipe in ("pi0_tiny", "pi05_tiny")]
    assert hows == ["z_score", "quantile"]


def test_statistics_come_from_a_file_if_one_is_named(made, tmp_path):
    training, _ = open_datasets(config(path=str(made)))
    write_assets(tmp_path / "assets", training)
    stats = read_norm_stats(tmp_path / "assets")
    assert np.array_equal(stats["actions"].q99, training.norm_stats["actions"].q99)
    other, _ = open_datasets(config(path=str(made), robot=RobotConfig(norm_stats=str(tmp_path / "assets"))))
    assert other.fingerprint == training.fingerprint


def test_rlds_shards_are_found_by_themselves(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    columns, pictures = make_rlds(tmp_path / "demo")
    training, _ = open_datasets(config(path=str(tmp_path / "demo")))
    ids = np.array([3, 20])
    batch, frames = training.read(ids), training.frames[ids]
    stats = training.norm_stats["state"]
    wanted = (columns["observation/state"][frames] - stats.mean) / (stats.std + 1e-6)
    assert np.allclose(batch["state"][:, :3], wanted, atol=1e-5)
    assert (
        np.abs(batch["image/base_0_rgb"].mean((1, 2, 3)) * 40 / 24 - pictures[frames].mean((1, 2, 3))).max() < 12
    )  # black above and below


def test_a_mixture_has_its_own_transforms_and_statistics_for_each_part(made, tmp_path):
    make(tmp_path / "b", seed=5, lengths=(8, 9, 10))
    parts = (
        MixturePart(str(made), 3.0),
        MixturePart(str(tmp_path / "b"), 1.0, robot=RobotConfig(relative=(2,), prompt="other")),
    )
    settings = config(mixture=parts)
    training, validation = open_datasets(settings)
    assert isinstance(training, Mixture) and len(validation.parts) == 2
    a, b = training.parts
    assert not np.array_equal(a.norm_stats["actions"].mean, b.norm_stats["actions"].mean)
    order = open_order(settings, training)
    ids = np.concatenate([order.ids(step) for step in range(40)])
    assert abs((ids >= len(a)).mean() - 0.25) < 0.06
    batch, place = training.read(np.array([len(a) + 2, 1])), 0
    assert np.array_equal(batch["actions"][place], b.read(np.array([2]))["actions"][0])
    write_assets(tmp_path / "assets", training)
    assert np.array_equal(read_norm_stats(tmp_path / "assets" / "1")["state"].std, b.norm_stats["state"].std)


@pytest.mark.parametrize("text, chosen", [(None, [0, 1, 2, 3, 4]), ("0:2,4", [0, 1, 4]), ("3", [3]), (" 1 : 3 ", [1, 2])])
def test_episodes_are_chosen_by_ranges(made, text, chosen):
    assert choose_episodes(text, open_source(str(made))).tolist() == chosen


@pytest.mark.parametrize("text", ["5", "0:6", "a", "2:2", "0:2,,", "-1"])
def test_a_wrong_range_of_episodes_is_named(made, text):
    with pytest.raises(UserError, match="is no range of episodes 0 to 4"):
        choose_episodes(text, open_source(str(made)))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"path": "nowhere"}, "there is no folder nowhere"),
        ({"path": str(FOLDER.parent)}, "neither a LeRobot dataset"),
        ({"path": "hf://only-a-name"}, "hf://OWNER/NAME"),
        ({"source": "lerobot"}, "--data.path, which names the folder, is missing"),
    ],
)
def test_a_wrong_path_is_one_message(settings, message):
    with pytest.raises(UserError, match=message):
        open_datasets(config(**settings))


def test_a_language_model_reads_no_robot_data():
    base = load_recipe("tiny_lm")
    with pytest.raises(UserError, match="only robot policies"):
        open_datasets(dataclasses.replace(base, data=DataConfig(source="lerobot", path="x")))


def test_keys_of_the_configuration_take_precedence(made):
    source = open_source(str(made))
    given = RobotConfig(cameras=("base_0_rgb=observation.images.wrist",), relative=(1, -1))
    robot = make_robot(given, source, ("base_0_rgb", "left_wrist_0_rgb"))
    assert robot.dataset.cameras == {"base_0_rgb": "observation.images.wrist"} and robot.relative == (True, False)
    assert robot.request == robot.dataset


def test_a_request_has_the_places_that_were_not_masked_in_training(made):
    given = RobotConfig(policy="aloha", cameras=("base_0_rgb=observation.images.wrist",), action="action")
    robot = make_robot(given, open_source(str(made)), ("base_0_rgb", "left_wrist_0_rgb"))
    assert robot.request.cameras == {"base_0_rgb": "images/cam_high"} and robot.request.state == ("state",)


@pytest.mark.parametrize(
    "cameras, message",
    [(("x=observation.images.top",), "names 'x', but --model.cameras are"), (("base_0_rgb=y",), "no camera 'y'")],
)
def test_a_wrong_camera_is_named(made, cameras, message):
    with pytest.raises(UserError, match=message):
        open_datasets(config(path=str(made), robot=RobotConfig(cameras=cameras)))

"""Recording with the simulator, where it is installed; what needs none of it always."""

import numpy as np
import pytest
from lane import Expert, lane
from small import sharder

from sharder.config import UserError
from sharder.data.lerobot.inspect import read_pictures
from sharder.data.lerobot.lints import lint_duplicates
from sharder.data.lerobot.source import open_lerobot
from sharder.sim.commands import record as command
from sharder.sim.episode import plan_of_expert, play
from sharder.sim.metaworld import Scene, read_scene, sentence
from sharder.sim.record import wander


def demonstrate(scene: Scene = Scene(), seed: int = 1):
    return play(lane(scene), plan_of_expert(Expert), seed)


def test_an_episode_is_what_the_robot_saw_before_each_action():
    found = demonstrate(Scene(hold=2, max_steps=50))
    assert found.succeeded and found.state[:, 0].tolist() == pytest.approx([0.1, 0.35, 0.6, 0.85])
    assert (found.action == [1, 0, 0, 0]).all() and found.action.dtype == np.float32


def test_pictures_are_the_right_way_up():
    picture = demonstrate().pictures["corner2"][0]
    assert picture[-1, :, 0].min() == 200 and picture[:-1, :, 0].max() == 0
    assert picture[-1, -1, 2] == 100 and picture[-1, :-1, 2].min() == 200  # turned, not mirrored


def test_every_camera_sees_for_itself():
    pictures = demonstrate(Scene(cameras=("corner2", "topview"))).pictures
    assert list(pictures) == ["corner2", "topview"]
    assert pictures["topview"][0, 0, :, 0].min() == 200  # it does not hang upside down


def test_an_episode_without_success_is_given_up():
    found = demonstrate(Scene(max_steps=2))
    assert not found.succeeded and len(found.action) == 2


def test_a_demonstration_may_begin_elsewhere_and_does_not_tell_how_it_came_there():
    before = wander(10, seed=2)
    assert 1 <= len(before) <= 10 and before.shape[1] == 4 and (before == before[0]).all()
    lengths = [len(wander(3, seed)) for seed in range(40)]
    assert set(lengths) == {0, 1, 2, 3} and len(wander(0, 0)) == 0
    moved = play(lane(Scene(hold=1)), plan_of_expert(Expert), seed=1, before=np.full((2, 4), 0.4, np.float32))
    assert moved.state[0, 0] == pytest.approx(0.2) and (moved.action == [1, 0, 0, 0]).all()


def test_tasks_have_sentences():
    assert sentence("reach-v3") == "Reach the red target with the gripper." and sentence("door-lock-v3") == "Door lock."


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name of a simulator"),
        (["metaworld", "--out", "x", "--episodes", "0"], "episodes"),
        (["metaworld", "--out", "x", "--cameras", "front"], "corner2"),
    ],
)
def test_wrong_arguments_are_one_message(arguments, message, capsys):
    with pytest.raises((UserError, SystemExit)) as raised:
        command(arguments)
    assert message in str(raised.value) + capsys.readouterr().err


@pytest.mark.slow
def test_recorded_demonstrations_are_a_dataset(tmp_path):
    pytest.importorskip("metaworld")
    out = tmp_path / "d"
    done = sharder(
        "data", "record", "metaworld", "--tasks", "reach-v3", "--episodes", "2", "--image-size", "32", "--cameras", "corner2", "topview",
        "--out", out, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read_scene(out / "meta") == Scene(("corner2", "topview"), 32)
    source = open_lerobot(out)
    assert not lint_duplicates(source, ["observation.state"])
    assert len(source.lengths) == 2 and source.tasks == {0: "Reach the red target with the gripper."}
    assert source.columns["action"].shape == (source.num_frames, 4) and np.abs(source.columns["action"]).max() <= 1
    ends = np.array([0, source.lengths[0] - 1])
    first, last = read_pictures(source, "observation.images.corner2", ends)
    assert np.abs(first.astype(int) - last).mean() > 1
    assert np.abs(first.astype(int) - read_pictures(source, "observation.images.topview", ends)[0]).mean() > 10

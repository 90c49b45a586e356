"""Recording with the simulator, where it is installed; what needs none of it always."""

import numpy as np
import pytest
from small import sharder

from sharder.config import UserError
from sharder.data.lerobot.inspect import read_pictures
from sharder.data.lerobot.lints import lint_duplicates
from sharder.data.lerobot.source import open_lerobot
from sharder.sim.commands import record as command
from sharder.sim.metaworld import Recording, demonstrate, sentence


class Lane:
    """An environment that succeeds where its one joint has come to 1; its camera hangs upside down."""

    def seed(self, seed: int) -> None:
        self.start = np.float64(seed / 10)

    def reset(self):
        self.x = self.start
        return np.full(39, self.x), {}

    def render(self) -> np.ndarray:
        upside_down = np.zeros((16, 16, 3), np.uint8)
        upside_down[0] = 200  # the floor
        upside_down[0, 0, 2] = 100  # a mark at its right end
        return upside_down

    def step(self, action):
        self.x += action[0] / 8
        return np.full(39, self.x), 0.0, False, False, {"success": self.x >= 1}


class Expert:
    def get_action(self, observation):
        return np.array([5.0, 0, 0, 0])


def test_an_episode_is_what_the_robot_saw_before_each_action():
    found = demonstrate(Lane(), Expert, Recording(hold=2, max_steps=50), seed=1)
    assert found["state"][:, 0].tolist() == pytest.approx([0.1, 0.35, 0.6, 0.85])
    assert (found["action"] == [1, 0, 0, 0]).all() and found["action"].dtype == np.float32


def test_pictures_are_the_right_way_up():
    picture = demonstrate(Lane(), Expert, Recording(), seed=1)["picture"][0]
    assert picture[-1, :, 0].min() == 200 and picture[:-1].max() == 0
    assert picture[-1, -1, 2] == 100 and picture[-1, :-1, 2].min() == 200  # turned, not mirrored


def test_an_episode_without_success_is_given_up():
    assert demonstrate(Lane(), Expert, Recording(max_steps=2), seed=1) is None


def test_tasks_have_sentences():
    assert sentence("reach-v3") == "Reach the red target with the gripper." and sentence("door-lock-v3") == "Door lock."


@pytest.mark.parametrize(
    "arguments, message", [([], "name of a simulator"), (["metaworld", "--out", "x", "--episodes", "0"], "episodes")]
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
        "data", "record", "metaworld", "--tasks", "reach-v3", "--episodes", "2", "--image-size", "32", "--out", out, timeout=900
    )
    assert done.returncode == 0, done.stderr
    source = open_lerobot(out)
    assert not lint_duplicates(source, ["observation.state"])
    assert len(source.lengths) == 2 and source.tasks == {0: "Reach the red target with the gripper."}
    assert source.columns["action"].shape == (source.num_frames, 4) and np.abs(source.columns["action"]).max() <= 1
    first, last = read_pictures(source, "observation.images.corner2", np.array([0, source.lengths[0] - 1]))
    assert np.abs(first.astype(int) - last).mean() > 1

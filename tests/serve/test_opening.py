"""What may be served: runs, their checkpoints, imported and exported weights, checkpoints of openpi; and what is missing there."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from written_run import write_run

from sharder.config import UserError
from sharder.data.assets import read_usage
from sharder.data.normalize import NormStats, write_norm_stats
from sharder.serve.opening import differences, find, use
from sharder.serve.options import ModelOptions, RobotOptions
from sharder.weights.convert import export_weights, import_weights

OPENPI = Path(__file__).parents[1] / "data" / "openpi_checkpoint"


@pytest.fixture
def openpi(tmp_path):
    """openpi's own checkpoint, with statistics of LIBERO."""
    folder = Path(shutil.copytree(OPENPI, tmp_path / "openpi"))
    ones = lambda n: NormStats(np.zeros(n), 2 * np.ones(n), -np.ones(n), np.ones(n))  # noqa: E731
    write_norm_stats(folder / "assets" / "someone" / "libero", {"state": ones(8), "actions": ones(7)})
    return folder


def test_the_newest_checkpoint_is_served_or_the_one_that_is_asked_for(opened, robot_run, policy, observation):
    example = policy.read(observation)
    newest, older = (opened(robot_run, step).act([example], 1)[0] for step in (None, 1))
    below = opened(robot_run / "checkpoints" / "1").act([example], 1)[0]
    assert (
        np.array_equal(newest, policy.act([example], 1)[0])
        and np.array_equal(older, below)
        and not np.array_equal(newest, older)
    )


def test_a_run_says_how_it_is_asked(robot_run, policy):
    usage = read_usage(robot_run / "assets")
    assert policy.describe() == {
        "model": "pi0", "robot": "generic", "cameras": ["observation.images.top", "observation.images.wrist"], "state": ["observation.state"],
        "state_dim": 3, "prompt": None, "num_actions": 2, "action_horizon": 8, "normalization": "z_score", "relative": [1, -1],
    }  # fmt: skip
    assert usage.max_prompt_len == 16 and usage.model_cameras == ("base_0_rgb", "left_wrist_0_rgb")


def test_a_dataset_far_from_what_the_policy_knows_is_said_by_dimension(robot_run, robot_config, tmp_path):
    found = find(robot_run, None)
    asked = (ModelOptions(), RobotOptions())
    assert differences(found, *asked, robot_config.data.path) == []
    wider = Path(shutil.copytree(robot_config.data.path, tmp_path / "wider"))
    for path in wider.glob("data/*/*.parquet"):
        table = parquet.read_table(path)
        states = [[10 * a, b, c] for a, b, c in table["observation.state"].to_pylist()]
        at = table.column_names.index("observation.state")
        parquet.write_table(table.set_column(at, "observation.state", pa.array(states, table.schema.field(at).type)), path)
    [state, *actions] = differences(found, *asked, str(wider))
    assert state.startswith("state, dimension 0: mean ") and "with std 10" in state
    # The first action is relative to that state.
    assert [line.split(":")[0] for line in actions] == ["actions, dimension 0"]


def test_a_policy_without_statistics_has_nothing_to_compare(openpi):
    with pytest.raises(UserError, match="--dataset has nothing to be compared with"):
        differences(find(openpi, None), ModelOptions(), RobotOptions(normalization="none"), "anywhere")


def test_other_names_of_a_request_may_be_given(opened, robot_run, policy, observation):
    renamed = opened(
        robot_run,
        robot=RobotOptions(cameras=("base_0_rgb=a/top", "left_wrist_0_rgb=a/wrist"), state=("joints",), prompt="do task 0"),
    )
    pictures = {"top": observation["observation.images.top"], "wrist": observation["observation.images.wrist"]}
    found = renamed.read({"a": pictures, "joints": observation["observation.state"]})
    assert np.array_equal(found.noise_TA, policy.read(observation).noise_TA)


def test_what_is_exported_gives_the_same_actions_with_the_statistics_that_were_carried(
    tmp_path, opened, robot_run, policy, observation
):
    export_weights(robot_run, tmp_path / "out", asset_id="me/arm")
    assert (tmp_path / "out" / "assets" / "me" / "arm" / "norm_stats.json").is_file()
    exported = opened(tmp_path / "out", model=ModelOptions(compute_dtype="float32"))
    example = policy.read(observation)
    assert np.array_equal(exported.read(observation).noise_TA, example.noise_TA)
    np.testing.assert_allclose(exported.act([example], 1)[0], policy.act([example], 1)[0], rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_openpi_is_asked_as_its_robot_is(opened, openpi):
    found = opened(openpi, model=ModelOptions(action_horizon=6), robot=RobotOptions(policy="libero"))
    assert found.describe() | {"cameras": 0} == {
        "model": "pi0", "robot": "libero", "cameras": 0, "state": ["observation/state"], "state_dim": None, "prompt": None, "num_actions": 7,
        "action_horizon": 6, "normalization": "z_score", "relative": [],
    }  # fmt: skip
    observation = {"observation/image": np.zeros((9, 9, 3), np.uint8), "observation/state": np.ones(8), "prompt": "x"}
    example = found.read(observation)
    assert [bool(example.batch[f"image_mask/{c}"]) for c in found.model.cameras] == [True, False, False]
    np.testing.assert_allclose(example.batch["state"], 0.5, rtol=1e-5)
    np.testing.assert_allclose(found.decode(np.ones((6, 8)), example.state_S), 2 * np.ones((6, 7)), rtol=1e-5)


def test_imported_weights_bring_the_statistics_along(tmp_path, openpi):
    import_weights(openpi, tmp_path / "ours")
    found = find(tmp_path / "ours", None)
    assert found.assets == (tmp_path / "ours" / "assets" / "someone" / "libero").resolve()
    assert find(tmp_path / "ours", None, openpi / "assets").assets == openpi / "assets" / "someone" / "libero"


def test_a_folder_of_lerobot_is_no_run_though_it_has_a_config(tmp_path, openpi):
    export_weights(openpi, tmp_path / "lerobot", format="lerobot", asset_id="arm")
    (tmp_path / "lerobot" / "config.json").write_text('{"type": "pi0"}')
    found = find(tmp_path / "lerobot", None)
    assert (found.model.variant, found.model.action_dim) == ("pi0", 8)
    assert found.assets == (tmp_path / "lerobot" / "assets" / "arm").resolve()


def test_several_robots_statistics_are_chosen_from(openpi):
    shutil.copytree(openpi / "assets" / "someone", openpi / "assets" / "other")
    with pytest.raises(
        UserError, match="statistics of several robots: choose one of .*other/libero, .*someone/libero with --assets"
    ):
        find(openpi, None)


def test_missing_statistics_are_said_before_weights_are_read(opened, openpi):
    shutil.rmtree(openpi / "assets")
    with pytest.raises(UserError, match="has no assets/.../norm_stats.json"):
        opened(openpi, robot=RobotOptions(policy="libero"))
    assert find(openpi, None).assets is None


def test_statistics_without_quantiles_are_said(opened, openpi):
    path = openpi / "assets" / "someone" / "libero" / "norm_stats.json"
    stats = json.loads(path.read_text())
    stats["norm_stats"]["actions"]["q01"] = None
    path.write_text(json.dumps(stats))
    with pytest.raises(UserError, match="actions, has no q01 and q99"):
        opened(openpi, robot=RobotOptions(policy="libero", normalization="quantile"))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"robot": RobotOptions(cameras=("x=y",))}, "--robot.cameras names 'x', but the model's cameras are base_0_rgb"),
        (
            {"robot": RobotOptions(policy="aloha")},
            "--robot.policy aloha has 14 numbers, but the model's states and actions have 8",
        ),
        ({"model": ModelOptions(state_in_prompt=True)}, "--model.state-in-prompt is of pi0.5"),
    ],
    ids=["camera", "robot", "prompt"],
)
def test_options_that_do_not_fit_are_named(opened, robot_run, options, message):
    with pytest.raises(UserError, match=message):
        opened(robot_run, **options)


def test_a_damaged_robot_json_is_named(tmp_path, robot_run):
    run_dir = Path(shutil.copytree(robot_run, tmp_path / "run"))
    (run_dir / "assets" / "robot.json").write_text(json.dumps({"policy": "generic", "wheels": 4}))
    with pytest.raises(UserError, match="robot.json cannot be read: it has 'wheels'"):
        read_usage(find(run_dir, None).assets)


def test_a_run_that_does_not_say_how_it_is_asked_is_not_guessed_at(tmp_path, opened, robot_run):
    run_dir = Path(shutil.copytree(robot_run, tmp_path / "run"))
    (run_dir / "assets" / "robot.json").unlink()
    with pytest.raises(UserError, match="has no assets/robot.json, which says how it is asked: resume the run"):
        opened(run_dir)
    given = RobotOptions(policy="generic", cameras=("base_0_rgb=top",), state=("joints",), relative=(1, -1))
    found = opened(run_dir, robot=given).describe()
    assert (found["state_dim"], found["num_actions"], found["normalization"]) == (3, 2, "z_score")


def test_another_robot_than_the_recorded_one_has_its_own_names_and_units(robot_run):
    found = find(robot_run, None)
    usage = use(found, found.model, RobotOptions(policy="aloha"))
    assert usage.adapt_to_pi and usage.state == ("state",) and usage.relative == (6, -1, 6, -1)
    assert usage.cameras == ("base_0_rgb=images/cam_high", "left_wrist_0_rgb=images/cam_left_wrist")


def test_a_damaged_checkpoint_is_not_served(tmp_path, opened, robot_run):
    run_dir = Path(shutil.copytree(robot_run, tmp_path / "run"))
    for file in (run_dir / "checkpoints" / "2" / "params").rglob("d/*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with pytest.raises(UserError, match="is damaged|cannot be read"):
        opened(run_dir)


def test_a_run_on_made_up_examples_is_served_without_statistics(tmp_path, opened, robot_config, policy):
    config = dataclasses.replace(
        robot_config, data=dataclasses.replace(robot_config.data, path=None, source="synthetic", num_examples=8)
    )
    found = opened(write_run(config, tmp_path / "run", (1,)))
    assert found.describe() | {"cameras": 0} == policy.describe() | {
        "cameras": 0, "state": ["state"], "state_dim": None, "num_actions": 8, "normalization": "none", "relative": [],
    }  # fmt: skip


def test_a_language_model_is_no_policy(tmp_path):
    from small import small

    from sharder.config import to_dict

    (tmp_path / "config.json").write_text(json.dumps({"config": to_dict(small())}))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="holds no checkpoint"):
        find(tmp_path, None)
    with pytest.raises(UserError, match="is a run of TransformerConfig; only pi0 and pi0.5 are served"):
        find(tmp_path / "checkpoints" / "1", None)

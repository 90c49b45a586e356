import json

import pytest

from sharder.config import MlpConfig, RunConfig, UserError, to_dict
from sharder.facts import read_config

CONFIG = to_dict(RunConfig(model=MlpConfig()))


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "cannot be read"),
        ('{"config": {"model"', "cannot be read"),
        ("\x00\xff", "cannot be read"),
        ("[]", "is damaged: it holds no configuration"),
        ('{"config": null}', "is damaged: it holds no configuration"),
        (json.dumps({"config": CONFIG | {"train": None}}), "section train is None"),
        (json.dumps({"config": CONFIG | {"train": CONFIG["train"] | {"steps": -1}}}), "--train.steps is -1"),
        (json.dumps({"config": CONFIG}).replace("0.001", "Infinity"), "Infinity is not JSON"),
    ],
)
def test_a_damaged_config_is_named_with_a_way_out(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=f"config.json.*{message}.*Restore it from a copy"):
        read_config(tmp_path)


def test_a_folder_in_place_of_config_json_is_named(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UserError, match="config.json cannot be read"):
        read_config(tmp_path)

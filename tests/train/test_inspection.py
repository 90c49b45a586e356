import dataclasses

import pytest
from small import small

from sharder.config import DataConfig
from sharder.data.open import count_examples, open_datasets
from sharder.finding import applied
from sharder.sharding.divisible import Machine
from sharder.train.inspection import free_bytes, inspect, predictor

EIGHT = Machine(8, 8)


def reading(**data):
    return dataclasses.replace(small(), data=DataConfig(seq_len=32, **data))


def test_memory_beyond_the_devices_is_found_and_mended_by_prediction(tmp_path):
    config, predict = (
        dataclasses.replace(small(), train=dataclasses.replace(small().train, global_batch_size=512)),
        predictor(EIGHT, "cpu"),
    )
    limit = predict(config) * 2 // 3
    [finding] = inspect(config, EIGHT, "cpu", limit, predict=True).findings
    assert finding.rule == "memory" and predict(applied(config, finding.nearest)) <= limit
    assert inspect(applied(config, finding.nearest), EIGHT, "cpu", limit, predict=True).findings == ()


def test_what_no_option_can_fit_says_so():
    [finding] = inspect(small(), EIGHT, "cpu", 1, predict=True).findings
    assert finding.rule == "memory" and finding.nearest == {} and "use more devices" in finding.message


def test_shapes_alone_need_no_data():
    assert inspect(reading(path="nowhere"), EIGHT, "cpu", None).findings == ()


def test_data_that_is_not_there_is_a_finding_beside_others(tmp_path):
    config = applied(reading(path=str(tmp_path / "nothing.txt")), {"--train.global-batch-size": 20})
    assert {f.rule for f in inspect(config, EIGHT, "cpu", None, tmp_path).findings} == {"batch", "data"}


@pytest.mark.parametrize(
    "data", [{"source": "synthetic", "num_examples": 7}, {"validation_fraction": 0.2}, {"validation_split": "range"}]
)
def test_examples_are_counted_as_they_are_read(data):
    assert count_examples(reading(**data)) == len(open_datasets(reading(**data))[0])


def test_tokens_are_not_counted():
    assert count_examples(reading(tokenizer="any.json")) is None


def test_the_disk_of_a_folder_that_will_be_made_is_that_of_its_parent(tmp_path):
    assert abs(free_bytes(tmp_path / "a" / "b") - free_bytes(tmp_path)) < 1 << 30


def test_the_plan_of_a_mesh_that_cannot_be_has_no_bytes_in_json():
    config = applied(small(), {"--parallel.data": 3})
    printed = inspect(config, EIGHT, "cpu", None).to_json()
    assert printed["findings"][0]["rule"] == "mesh" and printed["plan"] is None and printed["accounting"] is None

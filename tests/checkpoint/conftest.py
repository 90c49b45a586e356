"""A run whose checkpoints may be damaged."""

import shutil

import pytest
from small import small

from sharder.stop import StopRequest
from sharder.train.loop import train


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run") / "run"
    train(small(), run_dir, "auto", StopRequest())
    return run_dir


@pytest.fixture
def run_dir(original, tmp_path):
    """A run of 12 steps with checkpoints 10 and 12, to be damaged at will."""
    return shutil.copytree(original, tmp_path / "run")

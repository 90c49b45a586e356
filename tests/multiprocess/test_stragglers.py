"""A process that reads slowly is named by the ledgers of a real run of two."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from small import sharder, small

from sharder.config import RunConfig
from sharder.report.ledgers import read_ledgers

RECIPE = f"{__file__}:slow_reader"


def slow_reader() -> RunConfig:
    """The small recipe, which reads slowly in process 1."""
    from sharder.data.synthetic import SyntheticTokens

    if os.environ.get("JAX_PROCESS_ID") == "1":
        read = SyntheticTokens.read
        SyntheticTokens.read = lambda self, ids: time.sleep(1.0) or read(self, ids)
    config = small()
    return replace(config, train=replace(config.train, steps=40), checkpoint=replace(config.checkpoint, every=0))


@pytest.mark.slow
def test_the_process_that_the_others_wait_for_is_named(tmp_path):
    command = ("launch", "--processes", "2", "--devices-per-process", "1", "--", "train", RECIPE, "--run-dir", tmp_path / "run")
    done = sharder(*command, PYTHONPATH=str(Path(__file__).parents[1]))
    assert done.returncode == 0, done.stderr
    found = read_ledgers(tmp_path / "run")
    assert (found.slowest, found.stragglers) == (1, [1])
    waited = {p.process: p.parts for p in found.processes}
    assert waited[1]["data_wait"] > 5 * waited[0]["data_wait"] and waited[0]["device"] > waited[1]["device"]
    assert all(sum(p.parts.values()) == pytest.approx(p.wall_s, rel=0.02) for p in found.processes)

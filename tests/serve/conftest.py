"""A run of a robot policy and its server, made once for all tests of this folder."""

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from datasets import make
from small import small_robot
from written_run import write_run

from sharder.config import ParallelConfig, RobotConfig
from sharder.serve.opening import find, open_policy
from sharder.serve.options import ModelOptions, RobotOptions, SamplingOptions, ServerOptions
from sharder.serve.policy import Policy
from sharder.serve.server import PolicyServer, bind

TOP, WRIST = "observation.images.top", "observation.images.wrist"


@pytest.fixture(scope="session")
def robot_config(tmp_path_factory):
    """Two cameras of other shapes than the model's, relative actions, and an average of the parameters."""
    data = tmp_path_factory.mktemp("data") / "d"
    make(data)
    config = small_robot()
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, cameras=("base_0_rgb", "left_wrist_0_rgb"), augment=False, max_prompt_len=16),
        data=dataclasses.replace(config.data, path=str(data), workers=0, validation_fraction=0.0), robot=RobotConfig(relative=(1, -1)),
        train=dataclasses.replace(config.train, ema_decay=0.5), parallel=dataclasses.replace(config.parallel, reduction="fast"),
    )  # fmt: skip


@pytest.fixture(scope="session")
def robot_run(tmp_path_factory, robot_config) -> Path:
    """Checkpoints of steps 1 and 2."""
    return write_run(robot_config, tmp_path_factory.mktemp("run") / "run")


def open_it(
    path,
    step=None,
    assets=None,
    *,
    model=ModelOptions(),
    robot=RobotOptions(),
    sampling=SamplingOptions(),
    parallel=ParallelConfig(policy="dp"),
):
    return open_policy(find(path, step, assets), model, robot, sampling, parallel, None)


@pytest.fixture(scope="session")
def opened():
    return open_it


@pytest.fixture(scope="session")
def policy(robot_run) -> Policy:
    return open_it(robot_run)


@contextmanager
def listening(policy: Policy, api_key: str | None = None, warm: bool = True, **options) -> Iterator[int]:
    """A server in a thread; yields its port."""
    options = ServerOptions(port=0, **options)
    server, sock = PolicyServer(policy, options, policy.describe(), api_key), bind(options.host, 0)
    if warm:
        server.warm_up()
    loop, ready, failed = asyncio.new_event_loop(), threading.Event(), []
    stop = asyncio.Event()

    def work():
        try:
            loop.run_until_complete(server.run(sock, stop, ready.set))
        except BaseException as error:  # noqa: BLE001  raised below
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    try:
        yield sock.getsockname()[1]
    finally:
        if not failed:
            loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
        if failed:
            raise failed[0]


@pytest.fixture(scope="session")
def serving():
    return listening


@pytest.fixture
def observation():
    """One that the policy takes, as a robot would send it."""
    rng = np.random.default_rng(0)
    pictures = {TOP: (24, 40, 3), WRIST: (32, 24, 3)}
    return {k: rng.integers(0, 256, shape, np.uint8) for k, shape in pictures.items()} | {
        "observation.state": rng.standard_normal(3), "prompt": "do task 0"
    }  # fmt: skip

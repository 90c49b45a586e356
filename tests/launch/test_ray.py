"""Three Ray nodes on this machine, one of which is killed (extra `ray`)."""

import os
import signal
import subprocess
import sys
import time

import pytest
from small import RECIPE, environment, needs_tested_jax

from sharder.events import read_json_lines

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, needs_tested_jax]


@pytest.fixture
def cluster(monkeypatch):
    from ray.cluster_utils import Cluster

    from sharder.launch.ray_engine import HEALTH

    for name, value in HEALTH.items():
        monkeypatch.setenv(name, value)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [made.add_node(num_cpus=1) for _ in range(2)]
    yield made, nodes
    made.shutdown()


def metrics(run_dir):
    return read_json_lines(run_dir / "metrics.jsonl")[0]


def wait_for(condition, driver, timeout_s=240):
    deadline = time.monotonic() + timeout_s
    while not condition() and driver.poll() is None:
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.1)


def test_a_lost_host_is_left_out_and_a_new_one_taken_in_with_the_same_bits(cluster, tmp_path):
    made, nodes = cluster
    run_dir = tmp_path / "run"
    options = (
        "--parallel.reduction",
        "exact",
        "--parallel.virtual-workers",
        "4",
        "--cluster.cpu-devices",
        "1",
        "--train.steps",
        "600",
    )
    command = ["launch", "--engine", "ray", "--ray-address", made.address, "--processes", "2", "--min-processes", "1", "--"]
    command += ["train", RECIPE, "--run-dir", str(run_dir), *options]
    driver = subprocess.Popen([sys.executable, "-m", "sharder", *command], env=environment(), stderr=subprocess.PIPE, text=True)

    def events(kind):
        return [e for e in read_json_lines(run_dir / "events.jsonl")[0] if e["kind"] == kind]

    wait_for(lambda: len(metrics(run_dir)) >= 15, driver)
    killed_s = time.time()
    os.kill(nodes[1].all_processes["raylet"][0].process.pid, signal.SIGKILL)
    wait_for(lambda: any(e["time_s"] > killed_s for e in events("new_step")), driver)
    made.add_node(num_cpus=1)
    _, errors = driver.communicate(timeout=300)
    assert driver.returncode == 0, errors
    again = [e for e in events("new_step") if e["time_s"] > killed_s]
    assert [e["processes"] for e in events("spawn")] == [2, 1, 2], errors
    print(f"first new step {again[0]['time_s'] - killed_s:.1f} s after the kill")
    records = metrics(run_dir)
    alone = tmp_path / "alone"
    subprocess.run(
        [sys.executable, "-m", "sharder", "train", RECIPE, "--run-dir", str(alone), *options], env=environment(), check=True
    )
    expected = {r["step"]: r["fingerprint"] for r in metrics(alone)}
    assert {r["step"]: r["fingerprint"] for r in records} == expected

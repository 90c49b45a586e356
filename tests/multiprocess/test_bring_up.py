"""Bring-up of real processes: what is wrong in one ends all, with the process and both values."""

import pytest
from started import ended, started, train


def test_two_settings_end_both_processes_with_both_values(tmp_path):
    run_dir = tmp_path / "run"
    with started([train(run_dir), train(run_dir, "--train.seed", 7, "--train.global-batch-size", 32)]) as processes:
        for code, output in ended(processes):
            assert code == 2, output
            assert "--train.seed is 0 in process 0, but 7 in process 1" in output and "Traceback" not in output
            assert "--train.global-batch-size is 16 in process 0, but 32 in process 1" in output
    assert not run_dir.exists()


def test_other_data_ends_both_processes_with_both_fingerprints(tmp_path):
    for name, text in (("a", "some text " * 2000), ("b", "other text" * 2000)):
        (tmp_path / name).write_text(text)
    options = [("--data.source", "text", "--data.path", tmp_path / name) for name in ("a", "b")]
    with started([train(tmp_path / "run", *o) for o in options]) as processes:
        for code, output in ended(processes):
            assert code == 2 and "the SHA-256 of the training data is '" in output and "in process 1" in output, output


SCRIPT = """
import time
from sharder import cluster
from sharder.config import ClusterConfig
from sharder.ending import end_with
{change}
def run():
    cluster.initialize(ClusterConfig(bringup_timeout_s={timeout}, cpu_devices=1), facts={facts})
    {then}
    return 0
end_with(run)
"""


def script(change="", facts="{}", then="cluster.shutdown()", timeout=100):
    return SCRIPT.format(change=change, facts=facts, then=then, timeout=timeout)


def test_other_packages_end_both_processes_with_both_versions():
    other = "cluster.package_versions = lambda: {'the version of jax': '0.0.1'}"
    with started([script("cluster.package_versions = lambda: {'the version of jax': '0.0.2'}"), script(other)]) as processes:
        for code, output in ended(processes):
            assert code == 2 and "the version of jax is '0.0.2' in process 0, but '0.0.1' in process 1" in output, output


def test_a_process_that_does_not_answer_is_named():
    """It has joined, and then sleeps."""
    scripts = [script(timeout=15), script("cluster.self_test = lambda *_: time.sleep(1000)", timeout=15)]
    with started(scripts) as processes:
        (zero, output), (one, told) = ended(processes)
    assert zero == 2 and "the first collective took more than 15 s" in output and "no answer from process 1 of 2" in output, (
        output
    )
    assert one == 2 and "process 0 ended with code 2" in told, told


def test_a_failure_after_bring_up_ends_the_others_without_a_barrier():
    with started([script(then="time.sleep(1000)"), script(then="raise ValueError('not mine')")]) as processes:
        (zero, output), (one, told) = ended(processes)
    assert one == 1 and "ValueError: not mine" in told, told
    assert zero == -6 and "process 1 ended with code 1: ValueError: not mine" in output, output


def test_success_is_a_barrier_and_who_does_not_come_is_named():
    change = "cluster.SHUTDOWN_TIMEOUT_S = 3"
    with started([script(change), script(change, then="time.sleep(1000)")]) as processes:
        (zero, output), (one, told) = ended(processes)
    assert zero == 2 and "process 0 waited 3 s at the barrier 'end' for process 1 of 2" in output, output
    assert one == 2, told


def test_all_leave_after_success():
    with started([script()] * 3) as processes:
        assert [code for code, _ in ended(processes)] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_process_ends_the_others_at_once(who):
    """While they wait in Python, where no collective would notice."""
    then = "print('up', flush=True); time.sleep(1000)"
    with started([script(then=then)] * 3) as processes:
        for process in processes:
            assert any(line.startswith("up") for line in process.stdout)
        processes[who].kill()
        found = ended(processes)
    for index, (code, output) in enumerate(found):
        assert code == (-9 if index == who else -6), output
        # Where process 0 is gone, jax may be the first to say so.
        assert who == 0 or index == who or f"process {who} was killed" in output, output

"""What would be submitted to SLURM and Kubernetes."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from small import sharder

from sharder.config import UserError
from sharder.launch import jobset, slurm
from sharder.launch.command import Elsewhere, launch_elsewhere
from sharder.launch.supervisor import Options

ARGUMENTS = ("train", "tiny_lm", "--run-dir", "/shared/a run", "--data.path", "it's here")


@pytest.fixture
def cluster(tmp_path):
    """Stand-ins for SLURM's commands, and for sharder, on a PATH; `srun` runs the command for each of two nodes."""
    programs = {
        "scontrol": 'if [ "$1" = show ]; then printf "n0\\nn1\\n"; else echo "$@" >> requeued; fi',
        "srun": 'for a in "$@"; do case $a in --*) shift;; esac; done; for n in 0 1; do SLURM_NODEID=$n "$@" || code=$?; done; exit ${code:-0}',
        "sharder": 'echo "$JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID" >> started; for a in "$@"; do echo "$a" >> arguments_$JAX_PROCESS_ID; done; exit ${CODE:-0}',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755 | stat.S_IXUSR)

    def run(code=0, restarts=0):
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "41", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[0-1]",
            "SLURM_RESTART_COUNT": str(restarts), "CODE": str(code),
        }  # fmt: skip
        text = slurm.script(slurm.Job(2, ARGUMENTS, Path("/shared/a run"), "60"))
        done = subprocess.run(["sh"], input=text, text=True, env=environment, cwd=tmp_path, capture_output=True)
        requeued = (tmp_path / "requeued").read_text().split() if (tmp_path / "requeued").exists() else []
        return done.returncode, requeued

    return run, tmp_path


def test_the_script_starts_one_process_for_each_node_with_whole_arguments(cluster):
    run, folder = cluster
    assert run() == (0, [])
    assert (folder / "started").read_text().splitlines() == ["n0:20041 2 0", "n0:20041 2 1"]
    assert (folder / "arguments_1").read_text().splitlines() == list(ARGUMENTS)


@pytest.mark.parametrize("code, again", [(75, ["requeue", "41"]), (137, ["requeue", "41"]), (2, [])])
def test_a_stop_or_a_failure_puts_the_job_into_the_queue_again(cluster, code, again):
    run, _ = cluster
    assert run(code) == (code, again)


def test_a_restarted_job_has_a_port_of_its_own(cluster):
    run, folder = cluster
    run(restarts=3)
    assert (folder / "started").read_text().startswith("n0:20044 ")


def test_the_signal_comes_before_the_time_limit():
    text = slurm.script(slurm.Job(2, ARGUMENTS, Path("a"), "60", grace_s=90))
    assert "#SBATCH --time=60" in text and "#SBATCH --signal=TERM@90" in text and "#SBATCH --requeue" in text


def test_a_jobset_has_a_pod_for_each_host_and_finds_process_0_by_name():
    made = jobset.manifest(
        jobset.Job(4, ARGUMENTS, Path("a"), "image", max_restarts=7, grace_s=90, accelerators=(("nvidia.com/gpu", 8),))
    )
    job = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"] == 4
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    environment = {e["name"]: e for e in container["env"]}
    assert environment["JAX_COORDINATOR_ADDRESS"]["value"] == "sharder-workers-0-0.sharder:8476"
    assert "job-completion-index" in environment["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert container["command"] == ["sharder", *ARGUMENTS] and container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] == 90
    assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"
    assert made["spec"]["failurePolicy"]["maxRestarts"] == 7
    # Exit code 2 alone ends the set.
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    assert made["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]


def lost(ours, known, path=""):
    """What of `ours` is not in `known`."""
    if isinstance(ours, dict) and isinstance(known, dict):
        return [
            p
            for key, value in ours.items()
            for p in (lost(value, known[key], f"{path}.{key}") if key in known else [f"{path}.{key}"])
        ]
    if isinstance(ours, list) and isinstance(known, list) and len(ours) == len(known):
        return [p for i, (a, b) in enumerate(zip(ours, known)) for p in lost(a, b, f"{path}[{i}]")]
    return [] if ours == known else [path]


def test_the_api_knows_every_field_of_a_jobset():
    """By the models that Kubeflow generates from the schema of JobSet and of Kubernetes; they drop what they do not know."""
    made = jobset.manifest(jobset.Job(4, ARGUMENTS, Path("a"), "image", accelerators=(("nvidia.com/gpu", 8),)))
    assert lost(made, JobsetV1alpha2JobSet.from_dict(json.loads(json.dumps(made))).to_dict()) == []
    pod = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["graceSeconds"] = pod.pop("terminationGracePeriodSeconds")
    assert [
        p.rpartition(".")[2] for p in lost(made, JobsetV1alpha2JobSet.from_dict(json.loads(json.dumps(made))).to_dict())
    ] == ["graceSeconds"]


def test_engines_print_by_default():
    result = sharder("launch", "--engine", "jobset", "--processes", "2", "--", "train", "tiny_lm", "--run-dir", "/shared/a")
    assert result.returncode == 0 and json.loads(result.stdout)["kind"] == "JobSet"


@pytest.mark.parametrize("engine, tool", [("slurm", "sbatch"), ("jobset", "kubectl")])
def test_a_missing_tool_is_named(engine, tool, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=f"there is no {tool}"):
        launch_elsewhere(engine, list(ARGUMENTS), Options(2), Elsewhere(submit=True))


def test_a_command_that_cannot_be_resumed_is_refused():
    with pytest.raises(UserError, match="give the command a --run-dir"):
        launch_elsewhere("slurm", ["train", "tiny_lm"], Options(2), Elsewhere())

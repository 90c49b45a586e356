"""`sharder launch --engine jobset`: a Kubernetes JobSet with one pod for each host. By default it is only printed.

Kubernetes restarts the whole set when a pod fails, up to a limit; the same command then resumes. The headless service of the
set gives process 0 a name, and an indexed job gives every pod its number.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from sharder.config import UserError

PORT = 8476


@dataclass(frozen=True)
class Job:
    """What is asked of Kubernetes."""

    hosts: int
    arguments: tuple[str, ...]
    run_dir: Path
    image: str
    name: str = "sharder"
    max_restarts: int = 10
    grace_s: int = 120
    shared_memory: str = "16Gi"
    """Limit of /dev/shm, where snapshots lie."""
    accelerators: tuple[tuple[str, int], ...] = ()
    """Resource and number for each host, as nvidia.com/gpu."""


def manifest(job: Job) -> dict:
    """The JobSet (jobset.x-k8s.io/v1alpha2)."""
    environment = [
        {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{job.name}-workers-0-0.{job.name}:{PORT}"},
        {"name": "JAX_NUM_PROCESSES", "value": str(job.hosts)},
        {
            "name": "JAX_PROCESS_ID",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}},
        },
    ]
    container = {
        "name": "sharder", "image": job.image, "command": ["sharder", *job.arguments], "env": environment,
        "ports": [{"containerPort": PORT}], "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        "resources": {"limits": dict(job.accelerators)},
    }  # fmt: skip
    pod = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": job.grace_s, "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shared_memory}}],
    }  # fmt: skip
    # What the user has to mend (2) ends the set; everything else, a preemption (75) too, starts it again.
    rules = [{"action": "FailJob", "onExitCodes": {"containerName": "sharder", "operator": "In", "values": [2]}}]
    template = {
        "spec": {
            "completionMode": "Indexed", "parallelism": job.hosts, "completions": job.hosts, "backoffLimit": 0,
            "podFailurePolicy": {"rules": rules}, "template": {"spec": pod},
        }
    }  # fmt: skip
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "failurePolicy": {
                "maxRestarts": job.max_restarts,
                "rules": [{"name": "to-mend", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": template}],
        },
    }


def launch(job: Job, submit: bool) -> int:
    """Prints the manifest (JSON, which kubectl takes as it takes YAML), or applies it. Raises UserError where there is no kubectl."""
    text = json.dumps(manifest(job), indent=2)
    if not submit:
        print(text)
        return 0
    if shutil.which("kubectl") is None:
        raise UserError("there is no kubectl on this machine: install it, or leave out --submit to see the manifest.")
    return subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True).returncode

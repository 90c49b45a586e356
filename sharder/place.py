"""Which process of a run this is: from the command line, the environment, or what JAX detects of a cluster."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sharder.config import ClusterConfig, UserError
from sharder.rendezvous import parse_address

OPTIONS = {
    "coordinator_address": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
"""Fields of ClusterConfig, and the variables that stand for them."""
CLUSTER_COUNTS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
CLUSTER_SIGNS = ("JOB_COMPLETION_INDEX", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "MEGASCALE_NUM_SLICES")


@dataclass(frozen=True)
class Place:
    """One process among those of a run."""

    address: str
    """Where process 0 listens, host:port."""
    count: int
    index: int
    local_device_ids: tuple[int, ...] | None = None
    """The devices of this host that are this process's; None: all."""


def _option(field: str) -> str:
    return f"--cluster.{field.replace('_', '-')}"


def without_place(config: ClusterConfig) -> ClusterConfig:
    """The configuration without what only this process was told."""
    return replace(config, **dict.fromkeys(OPTIONS))


def expects_others(config: ClusterConfig, environ: Mapping[str, str]) -> bool:
    """Whether this looks like one of several processes; known before jax is imported, and never wrong about a single one
    that no cluster started."""
    counts = [config.num_processes, environ.get("JAX_NUM_PROCESSES"), *(environ.get(name) for name in CLUSTER_COUNTS)]
    given = next((str(count) for count in counts if count), "1")
    return given != "1" or any(environ.get(name) for name in CLUSTER_SIGNS)


def given_place(config: ClusterConfig, environ: Mapping[str, str]) -> Place | None:
    """The place that the options of `config` and, for those unset, the variables name; None where none of them is set, or the
    number of processes is 1.

    Raises UserError for a partial or unusable setting: a process that missed a variable would otherwise train alone.
    """
    found = {field: (_option(field), getattr(config, field)) for field in OPTIONS if getattr(config, field) is not None}
    for field, variable in OPTIONS.items():
        if field not in found and environ.get(variable):
            found[field] = (variable, environ[variable])
    if not found:
        return None
    numbers = {field: _integer(*found[field]) for field in ("num_processes", "process_id") if field in found}
    if numbers.get("num_processes") == 1 and numbers.get("process_id", 0) == 0:
        return None
    missing = [f"{variable} (or {_option(field)})" for field, variable in OPTIONS.items() if field not in found]
    if missing:
        names = [name for name, _ in found.values()]
        raise UserError(
            f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} set but {', '.join(missing)} not:"
            " set all three for a run of several processes, or none for a single one."
        )
    (source, address), count, index = found["coordinator_address"], numbers["num_processes"], numbers["process_id"]
    parse_address(str(address), source)
    if count < 1:
        raise UserError(f"{found['num_processes'][0]} is {count}, but must be at least 1.")
    if not 0 <= index < count:
        raise UserError(
            f"{found['process_id'][0]} is {index}, but must be in 0 .. {count - 1}: {found['num_processes'][0]} is {count}."
        )
    ids = environ.get("JAX_LOCAL_DEVICE_IDS")
    return Place(
        str(address), count, index, tuple(_integer("JAX_LOCAL_DEVICE_IDS", i) for i in ids.split(",")) if ids else None
    )


def _integer(name: str, value: object) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UserError(f"{name} is {value!r}, but must be an integer.") from None


def detected_place(environ: Mapping[str, str], timeout_s: int) -> Place | None:
    """The place that JAX finds for itself under SLURM, Open MPI, Kubernetes (an indexed job, alone or of a JobSet) or on TPU;
    None where there is no such cluster, or one process only. Imports jax.

    Raises UserError where the cluster is there but cannot be asked.
    """
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        _need_kubernetes()
    from jax._src import clusters  # a public name is missing

    try:
        # A pod that belongs to no indexed job is one process, whatever jax makes of it.
        kinds = [
            k
            for k in clusters.ClusterEnv._cluster_types
            if "JOB_COMPLETION_INDEX" in environ or not k.__name__.startswith("K8s")
        ]
        kind = next((k for k in kinds if not k.opt_in_only_method and k.is_env_present()), None)
        if kind is None or kind.get_process_count() == 1:
            return None
        address = kind.get_coordinator_address(
            timeout_secs=timeout_s, override_coordinator_port=environ.get("JAX_COORDINATOR_PORT")
        )
        local = None if _on_tpu() else kind.get_local_process_id()
        return Place(address, kind.get_process_count(), kind.get_process_id(), None if local is None else (local,))
    except Exception as error:  # of jax, of the cluster's own interface, of the network
        raise UserError(
            f"the cluster that started this process does not say which of how many it is: {error}. Set"
            f" {', '.join(OPTIONS.values())}; for a single process JAX_NUM_PROCESSES=1 alone."
        ) from error


def _on_tpu() -> bool:
    from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm

    return running_in_cloud_tpu_vm


def _need_kubernetes() -> None:
    try:
        import kubernetes  # noqa: F401
    except ImportError:
        raise UserError(
            "this is a pod of an indexed Kubernetes job, but the package kubernetes, by which JAX finds the other pods, is not"
            f" installed: pip install 'jax[k8s]', or set {', '.join(OPTIONS.values())}; for a single pod JAX_NUM_PROCESSES=1 alone."
        ) from None


def find_place(config: ClusterConfig, timeout_s: int, environ: Mapping[str, str] = os.environ) -> Place | None:
    """Which process this is; None for a single one. What is given goes before what is detected. Raises UserError."""
    place = given_place(config, environ)
    if place is not None or any(getattr(config, f) is not None or environ.get(v) for f, v in OPTIONS.items()):
        return place
    return detected_place(environ, timeout_s)

"""Which process this is: given, or detected by JAX from the variables of a cluster."""

import sys
import types

import pytest
from jax._src.clusters import cloud_tpu_cluster

from sharder.config import ClusterConfig, UserError
from sharder.place import OPTIONS, Place, detected_place, expects_others, find_place, given_place, without_place

FULL = dict(zip(OPTIONS.values(), ("127.0.0.1:1234", "4", "2")))
NOTHING = ClusterConfig()


def test_nothing_set_is_a_single_process():
    assert find_place(NOTHING, 1, {"PATH": "x"}) is None and not expects_others(NOTHING, {"PATH": "x"})


def test_a_full_setting_is_read():
    assert given_place(NOTHING, FULL) == Place("127.0.0.1:1234", 4, 2) and expects_others(NOTHING, FULL)


def test_options_go_before_variables():
    config = ClusterConfig(coordinator_address="host:99", num_processes=3, process_id=1)
    assert given_place(config, {}) == given_place(config, FULL) == Place("host:99", 3, 1)
    assert given_place(ClusterConfig(process_id=3), FULL) == Place("127.0.0.1:1234", 4, 3)
    assert without_place(config) == NOTHING


def test_one_process_needs_no_address():
    assert find_place(NOTHING, 1, {"JAX_NUM_PROCESSES": "1", "SLURM_NTASKS": "4"}) is None
    assert find_place(ClusterConfig(num_processes=1), 1, {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}) is None


def test_the_devices_of_a_process_are_read():
    assert given_place(NOTHING, FULL | {"JAX_LOCAL_DEVICE_IDS": "0,3"}).local_device_ids == (0, 3)


@pytest.mark.parametrize("field, missing", OPTIONS.items())
def test_a_partial_setting_names_what_is_missing(field, missing):
    with pytest.raises(UserError, match=f"but {missing} \\(or --cluster.{field.replace('_', '-')}\\) not"):
        given_place(NOTHING, {k: v for k, v in FULL.items() if k != missing})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID is 4, but must be in 0 .. 3: JAX_NUM_PROCESSES is 4"),
        ({"JAX_PROCESS_ID": "-1"}, "must be in 0 .. 3"),
        ({"JAX_NUM_PROCESSES": "0"}, "must be at least 1"),
        ({"JAX_NUM_PROCESSES": "many"}, "JAX_NUM_PROCESSES is 'many', but must be an integer"),
        ({"JAX_COORDINATOR_ADDRESS": "localhost"}, "JAX_COORDINATOR_ADDRESS is 'localhost', but must be host:port"),
        ({"JAX_LOCAL_DEVICE_IDS": "a"}, "must be an integer"),
    ],
)
def test_an_unusable_setting_is_refused_with_the_numbers(change, message):
    with pytest.raises(UserError, match=message):
        given_place(NOTHING, FULL | change)


SLURM = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_NODELIST": "node[007-009],big1",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    "environ, place",
    [
        (SLURM, Place("node007:61445", 8, 5, (1,))),
        (SLURM | {"SLURM_STEP_NODELIST": "a1,b2", "JAX_COORDINATOR_PORT": "77"}, Place("a1:77", 8, 5, (1,))),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        (OPEN_MPI, Place("10.96.0.1:62624", 2, 1, (1,))),
    ],
    ids=["slurm", "slurm with a port", "one task", "open mpi"],
)
def test_jax_detects_the_queue(monkeypatch, environ, place):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert expects_others(NOTHING, environ) == (place is not None)
    assert find_place(NOTHING, 1, environ) == place


def test_what_is_given_goes_before_what_a_queue_says(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert find_place(NOTHING, 1, SLURM | FULL) == Place("127.0.0.1:1234", 4, 2)


def kubernetes(parallelism, jobset):
    """A stand-in for the package: a pod of an indexed job, alone with a headless service, or of a JobSet."""
    labels = {"jobset.sigs.k8s.io/jobset-name": "set"} if jobset else {}
    object_ = types.SimpleNamespace
    pod = object_(
        metadata=object_(name="train-1", labels={"job-name": "train"}, owner_references=[object_(controller=True, kind="Job")]),
        spec=object_(subdomain=None if jobset else "pods"),
    )
    job = object_(metadata=object_(name="train", labels=labels), spec=object_(parallelism=parallelism))
    core = object_(list_namespaced_pod=lambda **_: object_(items=[pod]))
    batch = object_(read_namespaced_job=lambda **_: job)
    client = object_(CoreV1Api=lambda: core, BatchV1Api=lambda: batch, exceptions=object_(ApiException=KeyError))
    return types.SimpleNamespace(config=object_(load_incluster_config=lambda: None), client=client)


POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3", "HOSTNAME": "train-3"}


@pytest.fixture
def pod(monkeypatch):
    from jax._src.clusters import k8s_cluster

    for name, value in POD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(k8s_cluster.socket, "gethostbyname", lambda host: "10.0.0.2")
    monkeypatch.setattr(k8s_cluster.K8sCluster, "_namespace", classmethod(lambda cls: "default"))
    for cached in ("_pod", "_job", "_headless_svc", "_controller"):
        getattr(k8s_cluster.K8sCluster, cached).__func__.cache_clear()
    yield
    for cached in ("_pod", "_job", "_headless_svc", "_controller"):
        getattr(k8s_cluster.K8sCluster, cached).__func__.cache_clear()


@pytest.mark.parametrize("jobset, host", [(False, "train-0.pods"), (True, "train-0.set")])
def test_jax_detects_an_indexed_job(monkeypatch, pod, jobset, host):
    monkeypatch.setitem(sys.modules, "kubernetes", kubernetes(4, jobset))
    assert expects_others(NOTHING, POD) and find_place(NOTHING, 1, POD) == Place(f"{host}:55527", 4, 3)


def test_a_pod_of_an_indexed_job_never_trains_alone_for_want_of_a_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(UserError, match="package kubernetes"):
        detected_place(POD, 1)


def test_a_pod_without_an_index_is_one_process(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setitem(sys.modules, "kubernetes", types.SimpleNamespace())  # jax would fail to use it
    assert find_place(NOTHING, 1, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None


def test_jax_detects_a_slice_of_tpus(monkeypatch):
    environ = {"TPU_WORKER_HOSTNAMES": "tpu-a,tpu-b", "TPU_WORKER_ID": "1", "TPU_SKIP_MDS_QUERY": "1"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr("sharder.place._on_tpu", lambda: True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_tpu_env_value", lambda name: None)
    monkeypatch.setattr(cloud_tpu_cluster.socket, "gethostbyname", lambda host: "10.0.0.2")
    assert expects_others(NOTHING, environ) and find_place(NOTHING, 1, environ) == Place("tpu-a:8482", 2, 1)


def test_a_cluster_that_cannot_be_asked_is_an_error_with_a_way_out(monkeypatch):
    environ = SLURM | {"SLURM_PROCID": "five"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="does not say which of how many it is.*JAX_NUM_PROCESSES=1 alone"):
        find_place(NOTHING, 1, environ)

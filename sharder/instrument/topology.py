"""Accelerators that are not there: their devices, to compile for on this CPU without a driver.

CUDA: the plugin's compiler takes a description of the target, which is written here from public specifications (the CUDA C++
programming guide's table of compute capabilities; core counts, caches and clocks of the datasheets in
`sharder.instrument.hardware`; memory and limits as published with openxla/xla). TPU: libtpu knows its own chips.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util

import jax

from sharder.backends import quiet_stderr
from sharder.config import UserError
from sharder.instrument.hardware import ACCELERATORS, Accelerator

GPUS = ("a100", "h100", "h200", "b200")
TPUS = ("v4", "v5e", "v5p", "v6e")
TPU_CHIPS_PER_HOST = {"v4": 4, "v5e": 8, "v5p": 4, "v6e": 8}
"""Cloud TPU documentation; v5e and v6e hosts have 1, 4 or 8 chips."""


@dataclass(frozen=True)
class Topology:
    """A machine by name: `h100:32x8` is 32 hosts of 8 GPUs, `v5e:16x16` a slice of 256 chips."""

    accelerator: Accelerator
    shape: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        count = 1
        for n in self.shape:
            count *= n
        return count

    @property
    def devices_per_host(self) -> int:
        if not self.accelerator.is_tpu:
            return self.shape[-1]
        return min(self.num_devices, TPU_CHIPS_PER_HOST[self.accelerator.name])

    def __str__(self) -> str:
        return f"{self.accelerator.name}:{'x'.join(map(str, self.shape))}"


def parse_topology(text: str) -> Topology:
    """Raises UserError for an accelerator that is not known or a shape that it does not come in."""
    name, _, shape = text.partition(":")
    if name not in ACCELERATORS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise UserError(
            f"--topology is {text!r}, but must be ACCELERATOR:SHAPE: hosts x GPUs for {', '.join(GPUS)} (h100:32x8),"
            f" or the slice for {', '.join(TPUS)} (v5e:16x16, v5p:4x4x4)."
        )
    dims = tuple(map(int, shape.split("x")))
    needed = 2 if name in (*GPUS, "v5e", "v6e") else 3
    if len(dims) != needed:
        what = "hosts x GPUs" if name in GPUS else f"a slice of {needed} dimensions"
        raise UserError(f"--topology is {text!r}, but {name} needs {what}: {name}:{'x'.join(['4'] * needed)} for example.")
    return Topology(ACCELERATORS[name], dims)


def open_devices(topology: Topology) -> list[jax.Device]:
    """Its devices, to compile for and not to run on; numbers of processes are those of hosts.

    Raises UserError where its compiler does not have such a slice. That it is there, `missing_compiler` says before.
    """
    return _tpu_devices(topology) if topology.accelerator.is_tpu else _cuda_devices(topology)


def missing_compiler(topology: Topology) -> str | None:
    """What has to be installed to compile for this machine; None where everything is."""
    if topology.accelerator.is_tpu:
        return None if util.find_spec("libtpu") else "libtpu (but no TPU): pip install 'sharder-jax[plan-tpu]'"
    if util.find_spec("jax_plugins") and any(util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13)):
        return None
    return "the CUDA plugin (but no driver): pip install 'sharder-jax[plan-cuda]'"


def hosts(topology: Topology, devices: list[jax.Device]) -> list[int]:
    """Between which devices traffic leaves the fast links: the host of a GPU; a TPU slice is one network."""
    return [0 if topology.accelerator.is_tpu else d.process_index for d in devices]


def _cuda_devices(topology: Topology) -> list[jax.Device]:
    from jax.experimental import topologies

    shape = "1x" + "x".join(map(str, topology.shape))  # slices x hosts x GPUs
    with quiet_stderr():
        description = topologies.get_topology_desc(
            topology_name=shape, platform="cuda", topology=shape, target_config=cuda_target(topology.accelerator)
        )
    return list(description.devices)


def _tpu_devices(topology: Topology) -> list[jax.Device]:
    # Or libtpu asks the cloud's metadata server who it is, writes to standard error and takes a lock for the machine.
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():  # fmt: skip
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    name = f"{topology.accelerator.name}:{'x'.join(map(str, topology.shape))}"
    # v4 otherwise shows its two cores as two devices.
    options = {"chip_config_name": "megacore"} if topology.accelerator.name == "v4" else {}
    try:
        with quiet_stderr():
            return list(topologies.get_topology_desc(topology_name=name, platform="tpu", **options).devices)
    except Exception as error:  # jax raises errors of the backend's own
        raise UserError(
            f"--topology {name}: libtpu {metadata.version('libtpu')} refuses it: {str(error).splitlines()[0]}"
        ) from error


def compile_options(topology: Topology) -> dict[str, bool | str]:
    """For TPU: gathers are left as instructions of their own, so that they can be counted. Overlap is thereby switched off:
    the program is not the one that would run, but it moves the same bytes."""
    if not topology.accelerator.is_tpu:
        return {"xla_gpu_enable_triton_gemm": False}
    return {"xla_tpu_enable_async_collective_fusion": "false", "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """A program too large for a TPU is refused by its compiler: the same thing to the user as one that is too large afterwards."""
    try:
        yield
    except Exception as error:  # jax raises errors of the backend's own
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message:
            raise
        found = re.search(
            r"(?:[Uu]sed|total memory required[^(]*\()\s*([\d.]+[KMG]) ?(?:of|\) exceeds[^(]*\()\s*([\d.]+[KMG])", message
        )
        numbers = f"it needs {found.group(1)} and there are {found.group(2)}" if found else message.splitlines()[0]
        raise UserError(f"the step does not fit: {numbers}. --find says what would.") from error


@dataclass(frozen=True)
class _Gpu:
    """What the compiler asks of a GPU beyond `Accelerator`."""

    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    clock_ghz: float
    l2_bytes: int
    shared_per_core: int
    shared_per_block: int
    """The most that a kernel may opt in to."""
    pcie_bytes_per_s: int


# Datasheets and white papers (NVIDIA A100, H100, Blackwell architecture); limits: CUDA C++ programming guide, "Compute
# capabilities" (8.0: 164 KB shared memory per multiprocessor, 163 per block; 9.0 and 10.0: 228 and 227).
_HOPPER = _Gpu((9, 0), 132, 128, 1.98, 50 << 20, 228 << 10, 227 << 10, 32 << 30)
_GPUS = {
    "a100": _Gpu((8, 0), 108, 64, 1.41, 40 << 20, 164 << 10, 163 << 10, 32 << 30),
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": _Gpu((10, 0), 148, 128, 1.965, 126 << 20, 228 << 10, 227 << 10, 64 << 30),
}


def cuda_target(accelerator: Accelerator) -> str:
    """The target description (openxla/xla, GpuTargetConfigProto in text form)."""
    gpu = _GPUS[accelerator.name]
    major, minor = gpu.capability
    features = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    kind = accelerator.device_kinds[-1]
    return f"""gpu_device_info {{
  name: "{kind}" device_vendor: "NVIDIA Corporation" device_address_bits: 64
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  platform_version: "Compute Capability {major}.{minor}{"a" if features else ""}"
  core_count: {gpu.cores} fpus_per_core: {gpu.fpus_per_core} clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {accelerator.memory_bytes} memory_bandwidth: {int(accelerator.memory_bytes_per_s)}
  l2_cache_size: {gpu.l2_bytes} pcie_bandwidth: {gpu.pcie_bytes_per_s}
  shared_memory_per_core: {gpu.shared_per_core} shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared_per_block}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  driver_version: "13.0.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{kind}"
"""

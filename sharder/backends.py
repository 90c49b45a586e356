"""Which accelerators jax may find on this machine, and what it need not say where there are none."""

import contextlib
import ctypes.util
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from sharder.config import ClusterConfig


def may_have_gpu(config: ClusterConfig) -> bool:
    """Asked before jax looks for devices. Elsewhere a flag for GPUs would only change the keys of kept programs."""
    if config.cpu_devices is not None or os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    return bool(metadata.entry_points(group="jax_plugins")) and not has_compilers_only()


DEVICE_FILES = ("nvidia*", "nvhost*", "nvgpu*", "dxg", "accel*", "vfio/*")
"""Of GPUs and TPUs, below /dev."""


def has_compilers_only(devices: Path = Path("/dev")) -> bool:
    """Whether all that jax could load beside the CPU are the compilers that plans need, and no accelerator of theirs is here."""
    plugins = {e.name for e in metadata.entry_points(group="jax_plugins")}
    known = plugins | ({"libtpu"} if importlib.util.find_spec("libtpu") else set())
    if not known or not all(name.startswith("xla_cuda") or name == "libtpu" for name in known) or "JAX_PLATFORMS" in os.environ:
        return False
    found = any(next(devices.glob(name), None) for name in DEVICE_FILES) or ctypes.util.find_library("cuda")
    return sys.platform == "linux" and not found


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Compilers and their plugins write to file descriptor 2 that there is no driver and that memory is short; both are known here."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def load_jax() -> None:
    """Imports jax; where it has compilers but no accelerators, without their complaints, of which some come with the import."""
    with quiet_stderr() if has_compilers_only() else contextlib.nullcontext():
        importlib.import_module("jax")

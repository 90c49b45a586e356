"""The processes and devices of a run: bring-up and shutdown of jax.distributed, and settings of the backend."""

import atexit
import ctypes
import os
import platform
import sys
import threading
from importlib import metadata
from pathlib import Path

from sharder import __version__
from sharder.agreement import agree, store
from sharder.backends import has_compilers_only, load_jax, may_have_gpu, quiet_stderr
from sharder.channel import Channel
from sharder.compile_cache import write_in_every_process
from sharder.config import ClusterConfig, UserError
from sharder.exactness import CPU_THREADS_VARIABLE, cpu_threads, with_gpu_flags
from sharder.place import Place, find_place
from sharder.rendezvous import Facts, Stopped, meet, parse_address
from sharder.stop import PREEMPTED, StopRequest

SHUTDOWN_TIMEOUT_S = 300
"""How long processes wait for one another at the end: process 0 may still be cleaning up checkpoints."""


def compile_cache_dir(setting: str | None) -> str | None:
    if setting == "off":
        return None
    return setting or str(Path.home() / ".cache" / "sharder" / "compiled")


# Parameters of glibc's mallopt (malloc.h), and the largest value that it takes.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX, LARGEST_INT = -1, -2, -4, -8, 2**31 - 1


def keep_freed_memory() -> bool:
    """Makes the C library keep the memory that programs on the CPU free; returns whether it could.

    Every execution of a program takes its scratch memory and its results from malloc. By default glibc gives large blocks back
    to the kernel, and the next execution waits for fresh zeroed pages: 100,000 page faults in each step of tiny_lm. XLA
    allocates in any of its threads, each of which has an arena of at most 64 MB: with one arena for all, large results are
    kept too. gpt in exact mode, whose workers return gradients of 0.5 GB, takes 7.7 s a step in place of 9.3 (2 cores, one
    device, 8 x 64 tokens), in 7.0 GB at most in place of 5.2. Fast mode pays for it on several devices (docs/exact.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    settings = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, LARGEST_INT), (M_TOP_PAD, 256 << 20))
    return all(mallopt(*setting) for setting in settings)


def device_memory_bytes() -> int | None:
    """Memory of one device; simulated devices of all processes share the machine's. None where it is not known."""
    import jax

    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.device_count()
    return (device.memory_stats() or {}).get("bytes_limit")


def fix_cpu_threads(count: int) -> None:
    """In every mode: a run of mode auto does not know yet what it becomes, and its next attempt does."""
    wanted = str(count)
    if os.environ.get(CPU_THREADS_VARIABLE) != wanted and _cpu_client_exists():
        print(
            f"note: jax was in use before this run began, with other threads on CPU than the {wanted} of a run: its bits are those of"
            f" runs in this process alone. Set {CPU_THREADS_VARIABLE}={wanted} in the environment, or begin with the run.",
            file=sys.stderr,
            flush=True,
        )
        return
    os.environ[CPU_THREADS_VARIABLE] = wanted


def _cpu_client_exists() -> bool:
    """Without making one."""
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge  # whether backends exist has no public name

    return xla_bridge.backends_are_initialized() and sys.modules["jax"].default_backend() == "cpu"


_CHANNEL: Channel | None = None
"""To the other processes of this one's run."""


def initialize(config: ClusterConfig, exact: bool = False, facts: Facts | None = None, stop: StopRequest | None = None) -> None:
    """Sets up the backend and, where this is one of several processes, joins them. Call it once, first.

    `exact`: with the compiler's settings of exact mode. `facts`: what must be the same in all processes, beside packages.

    Raises UserError where processes do not find one another within `bringup_timeout_s`, or disagree; ends the process with 75
    where one of them was asked to stop meanwhile.
    """
    if stop is not None:
        stop.grace_s = config.grace_s
    keep_freed_memory()
    if exact and may_have_gpu(config):
        os.environ["XLA_FLAGS"] = with_gpu_flags(os.environ.get("XLA_FLAGS", ""))
    fix_cpu_threads(cpu_threads(config.cpu_devices))
    place = find_place(config, config.bringup_timeout_s)
    if place is not None:
        _meet(place, config, facts or {}, stop)
    elif stop is not None:
        stop.found_others(lambda code, text: None)
    load_jax()
    import jax

    compilers_only = has_compilers_only()
    if config.cpu_devices is not None or compilers_only:
        jax.config.update("jax_platforms", "cpu")
    if config.cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    cache = compile_cache_dir(config.compile_cache)
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if config.cpu_devices is not None or compilers_only or os.environ.get("JAX_PLATFORMS") == "cpu":
        write_in_every_process()
    if place is None and compilers_only:
        with quiet_stderr():
            jax.devices()
    if place is not None:
        _connect(place, config.bringup_timeout_s)
        self_test(place.index, place.count, config.bringup_timeout_s)


def package_versions() -> Facts:
    """What computes, and the settings that its numbers hang on."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    versions = {f"the version of {name}": metadata.version(name) for name in names}
    settings = {name: os.environ.get(name) for name in ("XLA_FLAGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")}
    return {
        "the version of sharder": __version__,
        "the version of Python": ".".join(platform.python_version_tuple()[:2]),
        **versions,
        **settings,
    }


def _meet(place: Place, config: ClusterConfig, facts: Facts, stop: StopRequest | None) -> None:
    global _CHANNEL
    asked = (lambda: stop.reason if stop.requested else "") if stop is not None else (lambda: "")
    try:
        channel = meet(place.address, place.count, place.index, package_versions() | facts, config.bringup_timeout_s, asked)
    except Stopped as reason:
        print(f"{reason}, before the first step; nothing is lost. Resume with the same command.", file=sys.stderr, flush=True)
        os._exit(PREEMPTED)
    _CHANNEL = channel.listen()
    # A process that ends without an error and without `shutdown`, as commands beside train do, is no loss either.
    atexit.register(channel.close)
    if stop is not None:
        stop.found_others(channel.tell_end)


def _connect(place: Place, timeout_s: int) -> None:
    import jax

    _keep_stdout_clean()
    if any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy") for name in os.environ):
        os.environ.setdefault("no_grpc_proxy", parse_address(place.address)[0])
    # Ours listens to the signals (sharder.stop).
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            place.address, place.count, place.index, place.local_device_ids, cluster_detection_method="deactivate",
            initialization_timeout=timeout_s, shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
        )  # fmt: skip
    except Exception as error:  # jax raises RuntimeError and backend errors of its own
        raise UserError(
            f"process {place.index} of {place.count} could not join the others at {place.address} within {timeout_s} s"
            f" (--cluster.bringup-timeout-s): {str(error).splitlines()[0]}"
        ) from error


def _sum_over_devices() -> tuple[int, int]:
    """A sum over all devices of all processes, and what it should be; the backends of all processes meet here first."""
    import jax
    import numpy as np

    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), "all")
    over, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("all",), ()))
    numbers = jax.make_array_from_process_local_data(over, np.full(jax.local_device_count(), 1 + jax.process_index(), np.int32))
    total = jax.jit(lambda x: x.sum(), out_shardings=whole)(numbers)
    return int(total), sum(1 + d.process_index for d in devices)


def self_test(index: int, count: int, timeout_s: float) -> None:
    """The first collective over all devices. Raises UserError naming who did not take part within `timeout_s`, or a wrong sum."""
    client = store()
    results: list = []

    def run() -> None:
        try:
            results.append(_sum_over_devices())
        except Exception as error:  # noqa: BLE001  handed to the caller's thread
            results.append(error)

    client.key_value_set(f"sharder/self-test/begun/{index}", "")
    thread = threading.Thread(target=run, name="self-test", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not results:
        begun, ended = (
            {int(key.rsplit("/", 1)[1]) for key, _ in client.key_value_dir_get(f"sharder/self-test/{x}/")}
            for x in ("begun", "ended")
        )
        silent = sorted(set(range(count)) - begun) or sorted(set(range(count)) - ended)
        raise UserError(
            f"the first collective took more than {timeout_s:g} s (--cluster.bringup-timeout-s) in process {index}: no answer from"
            f" process {', '.join(map(str, silent))} of {count}. Look at those, and at the network between the hosts."
        )
    client.key_value_set(f"sharder/self-test/ended/{index}", "")
    if isinstance(results[0], Exception):
        raise UserError(
            f"the first collective failed in process {index} of {count}: {str(results[0]).splitlines()[0]}"
        ) from results[0]
    found, expected = results[0]
    if found != expected:
        raise UserError(
            f"the first collective gave {found} in process {index} of {count}, but {expected} is right: the network or a device errs."
        )


def _keep_stdout_clean() -> None:
    """The CPU collectives print to file descriptor 1; send that to standard error, and keep Python's stdout."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(kept, "w", buffering=1)


def tell_end(code: int, text: str) -> None:
    """Lets the other processes know that this one ends before its time; where another has ended before, ends as its peer."""
    if _CHANNEL is None:
        return
    if _CHANNEL.heard is not None:
        _CHANNEL.follow(_CHANNEL.heard)
    _CHANNEL.tell_end(code, text)


def shutdown() -> None:
    """Leaves the group when all processes have arrived. After a failure do not call it: exit.

    Raises UserError naming who did not arrive.
    """
    import jax

    if jax.process_count() > 1:
        agree("end", {}, SHUTDOWN_TIMEOUT_S)
        jax.distributed.shutdown()
        if _CHANNEL is not None:
            _CHANNEL.close()

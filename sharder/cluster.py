"""The processes and devices of a run: bring-up and shutdown of jax.distributed, and settings of the backend."""

import ctypes
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sharder.config import ClusterConfig, UserError
from sharder.exactness import with_gpu_flags
from sharder.rendezvous import meet, parse_address

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def process_environment(environ: dict[str, str]) -> tuple[str, int, int] | None:
    """(coordinator address, number of processes, index of this one), or None where none of the variables is set.

    Raises UserError for a partial or unusable setting: a process that missed a variable would otherwise train alone.
    """
    given = {name: environ[name] for name in VARIABLES if environ.get(name)}
    if not given:
        return None
    missing = [name for name in VARIABLES if name not in given]
    if missing:
        raise UserError(
            f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} set but {', '.join(missing)} not:"
            " set all three for a run of several processes, or none for a single one."
        )
    address = given["JAX_COORDINATOR_ADDRESS"]
    parse_address(address)
    try:
        count, index = int(given["JAX_NUM_PROCESSES"]), int(given["JAX_PROCESS_ID"])
    except ValueError:
        raise UserError(
            f"JAX_NUM_PROCESSES is {given['JAX_NUM_PROCESSES']!r} and JAX_PROCESS_ID {given['JAX_PROCESS_ID']!r}:"
            " both must be integers."
        ) from None
    if not 0 <= index < count:
        raise UserError(f"JAX_PROCESS_ID is {index}, but must be in 0 .. {count - 1}: JAX_NUM_PROCESSES is {count}.")
    return address, count, index


def compile_cache_dir(setting: str | None) -> str | None:
    if setting == "off":
        return None
    return setting or str(Path.home() / ".cache" / "sharder" / "compiled")


# Parameters of glibc's mallopt (malloc.h), and the largest value that it takes.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, LARGEST_INT = -1, -2, -4, 2**31 - 1


def keep_freed_memory() -> bool:
    """Makes the C library keep the memory that programs on the CPU free; returns whether it could.

    Every execution of a program takes its scratch memory from malloc and frees it again. By default glibc gives large
    blocks back to the kernel, and the next execution waits for fresh zeroed pages: 100,000 page faults in each step of
    tiny_lm, 0.2 of its 1.5 s of CPU time, and more the more programs a step consists of.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    return all(mallopt(*setting) for setting in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, LARGEST_INT), (M_TOP_PAD, 256 << 20)))


def device_memory_bytes() -> int | None:
    """Memory of one device; simulated devices of all processes share the machine's. None where it is not known."""
    import jax

    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.device_count()
    return (device.memory_stats() or {}).get("bytes_limit")


def initialize(config: ClusterConfig, exact: bool = False) -> None:
    """Sets up the backend and, where the environment names several processes, joins them. Call it once, first.

    `exact`: with the compiler's settings of exact mode.

    Raises UserError where processes do not find one another within `bringup_timeout_s`.
    """
    environment = process_environment(dict(os.environ))
    keep_freed_memory()
    if exact:
        os.environ["XLA_FLAGS"] = with_gpu_flags(os.environ.get("XLA_FLAGS", ""))
    import jax

    if config.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    cache = compile_cache_dir(config.compile_cache)
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if environment is None:
        return
    address, count, index = environment
    _keep_stdout_clean()
    # Ours listens to the signals (sharder.stop).
    jax.config.update("jax_enable_preemption_service", False)
    meet(address, count, index, config.bringup_timeout_s)
    try:
        jax.distributed.initialize(address, count, index, initialization_timeout=config.bringup_timeout_s)
    except Exception as error:  # jax raises RuntimeError and backend errors of its own
        raise UserError(
            f"process {index} of {count} could not join the others at {address} within {config.bringup_timeout_s} s"
            f" (--cluster.bringup-timeout-s): {str(error).splitlines()[0]}"
        ) from error


def _keep_stdout_clean() -> None:
    """The CPU collectives print to file descriptor 1; send that to standard error, and keep Python's stdout."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(kept, "w", buffering=1)


_DECISIONS = itertools.count()
"""Numbers the decisions of this process; all processes take the same ones in the same order."""


def decide(choose: Callable[[], dict], timeout_s: int = 60) -> dict:
    """What `choose` returns in process 0, in every process; JSON values only. Its UserError is raised in all of them.

    For decisions from files that process 0 may be writing already while another process looks at them, and for numbers that must
    have the same bits everywhere.
    """
    import jax

    if jax.process_count() == 1:
        return choose()
    from jax._src import distributed  # the key-value store has no public name

    client, key = distributed.global_state.client, f"sharder/decide/{next(_DECISIONS)}/{choose.__module__}.{choose.__qualname__}"
    if jax.process_index() == 0:
        try:
            decision = {"value": choose()}
        except UserError as error:
            decision = {"error": str(error)}
        client.key_value_set(key, json.dumps(decision))
    else:
        decision = json.loads(client.blocking_key_value_get(key, timeout_s * 1000))
    if "error" in decision:
        raise UserError(decision["error"])
    return decision["value"]


class PeerLost(Exception):
    """Another process of the run did not answer: it is gone, or stuck."""


def exchange(name: str, value: object, timeout_s: float = 300) -> list:
    """What every process gives under this name, by index; JSON values only. A name is used once; any thread may call.

    Raises PeerLost naming the process that has not given its value within `timeout_s`.
    """
    import jax

    if jax.process_count() == 1:
        return [value]
    from jax._src import distributed  # as above

    client, deadline, values = distributed.global_state.client, time.monotonic() + timeout_s, []
    prefix = f"sharder/exchange/{name}"
    for index in range(-1, jax.process_count()):
        try:
            if index < 0:
                client.key_value_set(f"{prefix}/{jax.process_index()}", json.dumps(value))
            else:
                left_ms = max(int(1000 * (deadline - time.monotonic())), 1)
                values.append(json.loads(client.blocking_key_value_get(f"{prefix}/{index}", left_ms)))
        except Exception as error:  # jax raises errors of the backend
            who = "process 0 cannot be reached" if index < 0 else f"process {index} did not answer within {timeout_s:g} s"
            raise PeerLost(f"{who} ({name}): {str(error).splitlines()[0][:200]}") from error
    return values


def shutdown() -> None:
    """Leaves the group after success, when all processes have arrived. After a failure do not call it: exit."""
    import jax

    if jax.process_count() > 1:
        jax.distributed.shutdown()

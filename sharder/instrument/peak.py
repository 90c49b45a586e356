"""The ceilings that a step is measured against: from a datasheet where one gives them, else measured here.

A measured ceiling is what a large matrix product, or a large copy, reaches on all devices of this process at once: simulated
devices share the cores, so each gets its share of them. It is measured in the dtype of computation, once per process.
"""

import time
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharder.instrument.hardware import find_accelerator, peak_flops

SMALL, LARGE = 512, 4096
"""Rows of the measured product on CPU and on accelerators, whose rate needs larger ones."""
BUDGET_S, FEWEST = 0.05, 4
"""Long enough for a good run among others on a busy machine, short enough for every start of a run. Where others leave this process
nothing at all for as long, the ceiling is too low, and utilisation can come out above 100 %."""


@dataclass(frozen=True)
class Ceiling:
    """Per device; None where nothing is known."""

    value: float | None
    source: str | None
    """datasheet or measured."""


@lru_cache
def matrix_ceiling(compute_dtype: str) -> Ceiling:
    """FLOP/s of matrix products in this dtype."""
    listed = peak_flops(jax.devices()[0].device_kind, compute_dtype)
    return Ceiling(measure_matrix_rate(compute_dtype), "measured") if listed is None else Ceiling(listed, "datasheet")


@lru_cache
def memory_ceiling() -> Ceiling:
    """Bytes/s between a device and its memory, reads and writes together."""
    accelerator = find_accelerator(jax.devices()[0].device_kind)
    if accelerator is not None and accelerator.memory_bytes_per_s:
        return Ceiling(accelerator.memory_bytes_per_s, "datasheet")
    return Ceiling(measure_copy_rate(), "measured")


def _on_all_devices(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """One array of this shape on each device of the process."""
    mesh = Mesh(np.array(jax.local_devices()), "device")
    sharding = NamedSharding(mesh, PartitionSpec("device"))
    make = partial(jnp.full, (len(mesh.devices), *shape), 0.5, jnp.dtype(dtype))
    return jax.jit(make, out_shardings=sharding)()


def _least_seconds(program, arguments, budget_s: float) -> float:
    """Of one call: the first is left out, then as many as fit the budget, FEWEST at least."""
    jax.block_until_ready(program(*arguments))
    seconds, began = [], time.perf_counter()
    while time.perf_counter() - began < budget_s or len(seconds) < FEWEST:
        started = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def measure_matrix_rate(dtype: str, budget_s: float = BUDGET_S) -> float:
    """FLOP/s per device of a square matrix product on all devices of this process at once."""
    n = SMALL if jax.default_backend() == "cpu" else LARGE
    x = _on_all_devices((n, n), dtype)
    program = jax.jit(lambda x: jnp.einsum("dij,djk->dik", x, x)).lower(x).compile()
    return 2.0 * n**3 / _least_seconds(program, (x,), budget_s)


def measure_copy_rate(budget_s: float = BUDGET_S) -> float:
    """Bytes/s per device, read and written, of a scaled copy on all devices of this process at once."""
    rows = 4096 if jax.default_backend() == "cpu" else 1 << 18
    x = _on_all_devices((rows, 1024), "float32")
    program = jax.jit(lambda x: x * 1.5).lower(x).compile()
    return 2.0 * 4 * rows * 1024 / _least_seconds(program, (x,), budget_s)

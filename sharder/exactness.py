"""What exact mode promises where: what it refuses, what it cannot vouch for, and the compiler's settings that it needs.

On GPU two things beside the order of additions decide the bits: kernels that add in the order in which their threads happen to
arrive, and the algorithm that autotuning happens to find fastest. `GPU_FLAGS` excludes the first. The second is kept:
what was compiled lies in the compile cache (`--cluster.compile-cache`), and with it jax's folder of autotuning results; on a
new machine, or in another container, copy that folder along with the run. On TPU nothing needs to be set.

On CPU a matrix product with a long inner dimension is cut into as many pieces as the process has threads, and the pieces are
added up. XLA takes a thread for every core, and no fewer than one for every device, so that other machines and other numbers of
devices in a process would have other bits; their number is fixed, in every mode.
"""

import re

from sharder.config import RunConfig, UserError
from sharder.finding import Finding

TESTED_JAX = "0.10."
"""The jax that exact mode is tested with. As 0.12 compiles a moving average, shards of 8 contiguous elements have other bits on
CPU, and so has the lean variant on a mesh 2 x 4 as against 1 x 2."""

GPU_FLAGS = {
    "--xla_gpu_exclude_nondeterministic_ops=true": "sums of threads in an order of their own (scatter by atomics) are compiled in another way",
    "--xla_gpu_enable_scatter_determinism_expander=true": "the faster of the other ways for scatter, the gradient of an embedding",
}
"""What exact mode adds to XLA_FLAGS on GPU, and why. Options of XLA (xla.proto, DebugOptions)."""

CPU_THREADS = 16
"""Threads of a process's matrix products on CPU, however many cores it has."""
THREADS_PER_CPU_DEVICE = 2
"""A simulated device can wait in two collectives at once, one in a loop and one outside, each holding a thread: where all are
held, the program hangs (seen with 8 threads for 8 devices on busy cores)."""
CPU_THREADS_VARIABLE = "PJRT_NPROC"
"""XLA's CPU client reads the number of its threads there."""

UNORDERED_OPTIMIZERS = {"adafactor": "means over rows and columns", "muon": "matrix products"}
"""Optimizers that are not elementwise, and what they add up."""

KERNELS = {
    "scatter": "the gradient of a look-up, added up by atomics",
    "cudnn_attention_backward": "cuDNN's attention, whose backward pass adds up in an order of its own",
}
"""Kernels known to give other bits from run to run on GPU, by the name that --parallel.allow-nondeterministic takes."""


def with_gpu_flags(flags: str) -> str:
    """XLA_FLAGS with those of `GPU_FLAGS` that the user has not set otherwise."""
    missing = [flag for flag in GPU_FLAGS if flag.split("=")[0] + "=" not in flags]
    return " ".join([flags, *missing]).strip()


def nondeterministic_kernels(program: str, platform: str, flags: str) -> list[str]:
    """Names of KERNELS that this lowered program (StableHLO text) would run."""
    if platform != "gpu":
        return []
    excluded = all(flag in flags for flag in GPU_FLAGS)
    scatter = re.search(r'"stablehlo\.scatter"[^\n]*unique_indices = false', program)
    attention = re.search(r"__cudnn\$fmha\w*Backward(?![^\n]*force_deterministic[^\n,}]*true)", program)
    return [*(["scatter"] if scatter and not excluded else []), *(["cudnn_attention_backward"] if attention else [])]


def check_kernels(config: RunConfig, program: str, platform: str, flags: str) -> None:
    """Raises UserError where exact mode would run kernels whose bits change from run to run, unless allowed by name."""
    found = [
        name
        for name in nondeterministic_kernels(program, platform, flags)
        if name not in config.parallel.allow_nondeterministic
    ]
    if found:
        listed = "".join(f"\n- {name}: {KERNELS[name]}" for name in found)
        raise UserError(
            f"exact mode would use kernels that give other bits from run to run:{listed}\nLeave XLA_FLAGS and the attention to their"
            f" defaults, or accept them with --parallel.allow-nondeterministic {' '.join(found)}."
        )


def cpu_threads(cpu_devices: int | None) -> int:
    """Threads of a process that simulates so many devices, in every mode."""
    return max(CPU_THREADS, THREADS_PER_CPU_DEVICE * (cpu_devices or 1))


def refusals(config: RunConfig, num_replicas: int, jax_version: str) -> list[Finding]:
    """Why exact mode cannot keep its promise for this configuration, each with the way out; empty in fast mode."""
    if config.parallel.reduction != "exact":
        return []
    found, fast = [], {"--parallel.reduction": "fast"}
    if config.train.ema_decay is not None and not jax_version.startswith(TESTED_JAX):
        message = (
            f"--train.ema-decay is {config.train.ema_decay} in exact mode, but with jax {jax_version} a moving average has other bits on"
            f" other numbers of devices: leave it out, use jax {TESTED_JAX}x, or --parallel.reduction fast."
        )
        found.append(Finding("exact", message, fast, "--train.ema-decay"))
    if cpu_threads(config.cluster.cpu_devices) > CPU_THREADS:
        most = CPU_THREADS // THREADS_PER_CPU_DEVICE
        message = (
            f"--cluster.cpu-devices is {config.cluster.cpu_devices} in exact mode, which fixes the threads of a process to {CPU_THREADS},"
            f" {THREADS_PER_CPU_DEVICE} for each device at least: simulate up to {most} in a process (sharder launch starts several), or"
            " --parallel.reduction fast."
        )
        found.append(Finding("exact", message, fast, "--cluster.cpu-devices"))
    if config.optimizer.name in UNORDERED_OPTIMIZERS:
        message = (
            f"--optimizer.name is {config.optimizer.name} in exact mode, but its {UNORDERED_OPTIMIZERS[config.optimizer.name]} add up over"
            " divided dimensions, in an order that depends on the devices: use adamw, or --parallel.reduction fast."
        )
        found.append(Finding("exact", message, fast, "--optimizer.name"))
    if config.parallel.exact_memory == "lean":
        found += _lean_refusals(config, num_replicas, jax_version)
    return found


def _lean_refusals(config: RunConfig, num_replicas: int, jax_version: str) -> list[Finding]:
    lean, copy, found = "--parallel.exact-memory lean", {"--parallel.exact-memory": "copy"}, []
    if not jax_version.startswith(TESTED_JAX):
        message = f"{lean} has other bits on other meshes with jax {jax_version}: use jax {TESTED_JAX}x, or --parallel.exact-memory copy."
        found.append(Finding("exact", message, copy, "--parallel.exact-memory"))
    if config.parallel.policy != "fsdp":
        message = (
            f"{lean} gathers weights block by block, but policy {config.parallel.policy} keeps them whole: use --parallel.policy fsdp, or"
            " --parallel.exact-memory copy."
        )
        found.append(Finding("exact", message, copy, "--parallel.exact-memory"))
    if num_replicas == 1:
        message = (
            f"{lean} needs at least 2 replicas, but there is 1: a program for a single device is compiled in another way and has"
            " other bits. Use --parallel.exact-memory copy in a run of its own, or more devices."
        )
        found.append(Finding("exact", message, copy, "--parallel.exact-memory"))
    if config.train.microbatch_size is not None:
        message = (
            f"{lean} does not accumulate inside a virtual worker, but --train.microbatch-size is {config.train.microbatch_size}: leave it"
            " out, and use more virtual workers (--parallel.virtual-workers) for smaller batches."
        )
        found.append(Finding("exact", message, {"--train.microbatch-size": None}, "--train.microbatch-size"))
    return found


def untested(config: RunConfig, platform: str, jax_version: str) -> str | None:
    """What a run in exact mode has to say once where its promise is not tested, or None."""
    if config.parallel.reduction == "fast" or (platform == "cpu" and jax_version.startswith(TESTED_JAX)):
        return None
    return (
        f"exact mode is tested on CPU with jax {TESTED_JAX}x; on {platform} with jax {jax_version} compare two runs with sharder verify"
        " before you rely on it"
    )

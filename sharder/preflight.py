"""Every reason why a run would fail, found over abstract shapes and told all at once, before anything is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata

import numpy as np

from sharder.config import LANGUAGE_MODELS, Pi0Config, RunConfig, UserError
from sharder.data.open import open_datasets, open_order
from sharder.exactness import refusals, untested
from sharder.sharding.plan import Indivisible, Plan


@dataclass(frozen=True)
class Accounting:
    """How a global batch is made up: slots x replicas x microbatch_size."""

    num_replicas: int
    microbatch_size: int
    num_slots: int

    @property
    def global_batch_size(self) -> int:
        return self.num_replicas * self.microbatch_size * self.num_slots

    @property
    def slot_size(self) -> int:
        return self.num_replicas * self.microbatch_size

    def __str__(self) -> str:
        return (
            f"{self.microbatch_size} examples per replica and slot x {self.num_replicas} replicas x {self.num_slots} slots"
            f" = {self.global_batch_size} examples per step"
        )


def account_batch(config: RunConfig, num_replicas: int) -> Accounting:
    """Raises UserError where the global batch does not divide, naming the nearest that do."""
    batch, micro = config.train.global_batch_size, config.train.microbatch_size
    unit = num_replicas * (micro or 1)
    if batch % unit:
        below, above = batch // unit * unit, -(-batch // unit) * unit
        nearest = " or ".join(str(n) for n in (below, above) if n)
        per_replica = f" x --train.microbatch-size {micro}" if micro else ""
        raise UserError(
            f"--train.global-batch-size is {batch}, which does not divide over {num_replicas} replicas{per_replica}: use {nearest}."
        )
    return Accounting(num_replicas, micro or batch // num_replicas, 1 if micro is None else batch // unit)


@dataclass(frozen=True)
class WorkerAccounting(Accounting):
    """How a global batch is made up in exact mode: every slot is one virtual worker on each replica."""

    num_microbatches: int
    """Accumulation slots inside a worker."""

    @property
    def global_batch_size(self) -> int:
        return self.num_microbatches * super().global_batch_size

    @property
    def slot_size(self) -> int:
        return self.num_microbatches * super().slot_size

    def __str__(self) -> str:
        inside = f" x {self.num_microbatches} microbatches" if self.num_microbatches > 1 else ""
        return (
            f"exact: {self.num_replicas * self.num_slots} virtual workers of {self.microbatch_size}{inside} examples, {self.num_slots}"
            f" on each of {self.num_replicas} replicas = {self.global_batch_size} examples per step"
        )


def account_workers(config: RunConfig, num_replicas: int) -> WorkerAccounting:
    """Raises UserError where virtual workers do not fit the replicas or the batch, naming what would."""
    batch, workers, micro = config.train.global_batch_size, config.parallel.virtual_workers, config.train.microbatch_size
    if workers % num_replicas:
        if num_replicas & (num_replicas - 1):
            fits = [1 << i for i in range(num_replicas.bit_length())]
            raise UserError(f"exact mode needs a power of two of replicas, but there are {num_replicas}: use one of {fits}.")
        raise UserError(
            f"--parallel.virtual-workers is {workers}, which does not divide over {num_replicas} replicas: a run of {workers} virtual"
            f" workers cannot grow beyond {workers} replicas. Use {num_replicas} or more in a new run, or fewer replicas."
        )
    if batch % workers:
        nearest = " or ".join(str(n) for n in (batch // workers * workers, -(-batch // workers) * workers) if n)
        raise UserError(f"--train.global-batch-size is {batch}, which does not divide into {workers} virtual workers: use {nearest}.")
    size = batch // workers
    if micro and size % micro:
        fits = [m for m in range(1, size + 1) if size % m == 0]
        raise UserError(
            f"--train.microbatch-size is {micro}, which does not divide the {size} examples of a virtual worker: use one of {fits}."
        )
    return WorkerAccounting(num_replicas, micro or size, workers // num_replicas, size // (micro or size))


def account(config: RunConfig, num_replicas: int) -> Accounting:
    """The accounting of the run's mode."""
    return (account_workers if config.parallel.reduction == "exact" else account_batch)(config, num_replicas)


def settle_reduction(config: RunConfig, plan: Plan, platform: str, memory_bytes: int | None) -> tuple[RunConfig, str | None]:
    """The configuration with `--parallel.reduction auto` decided, and where it became fast, why.

    Exact where its promise is tested, virtual workers fit, and the whole copy that it needs under fsdp is known to fit into
    `memory_bytes` of a device.
    """
    if config.parallel.reduction != "auto":
        return config, None
    exact = with_reduction(config, "exact")
    reasons = [untested(exact, platform, metadata.version("jax")), *refusals(exact, plan.mesh.num_replicas, metadata.version("jax"))]
    try:
        account_workers(exact, plan.mesh.num_replicas)
    except UserError as error:
        reasons.append(str(error))
    if plan.policy == "fsdp" and plan.mesh.fsdp > 1:
        reasons.append(_copy_does_not_fit(plan, memory_bytes))
    why = next((reason for reason in reasons if reason), None)
    return (exact, None) if why is None else (with_reduction(config, "fast"), why)


def with_reduction(config: RunConfig, reduction: str) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, reduction=reduction))


def _copy_does_not_fit(plan: Plan, memory_bytes: int | None) -> str | None:
    """Why the whole copy of exact mode is not shown to fit, or None. Half of the memory is left to activations."""
    if memory_bytes is None:
        return "exact mode needs a whole copy of the parameters on every device, and how much memory a device has is not known"
    whole = plan.param_bytes_per_device("compute")
    # Under fsdp: parameters, and moments and a moving average in float32, divided; a copy, and two gradients in float32, whole.
    elements = whole // np.dtype(next(iter(plan.leaves.values())).decl.dtype).itemsize
    needed = plan.param_bytes_per_device("storage") + 12 * elements // plan.mesh.fsdp + whole + 8 * elements
    if 2 * needed <= memory_bytes:
        return None
    return (
        f"exact mode would need {needed / 1e9:.1f} GB beside the activations, more than half of a device's {memory_bytes / 1e9:.1f} GB:"
        " try --parallel.reduction exact --parallel.exact-memory lean"
    )


def indivisible_dimensions(plan: Plan) -> list[str]:
    """One finding for each logical axis that does not divide, naming the parameters that have it."""
    groups: dict[tuple, list[Indivisible]] = {}
    for item in plan.indivisible():
        groups.setdefault((item.axis, item.dim_size, item.factor), []).append(item)
    found = []
    for (axis, size, factor), items in groups.items():
        first, paths = items[0], list(dict.fromkeys(item.path for item in items))
        nearest = " or ".join(str(n) for n in (size // factor * factor, -(-size // factor) * factor) if n)
        found.append(
            f"{axis} is {size}, which does not divide into {factor}: {len(paths)} parameter(s) have it, the first is {first.path},"
            f" shape {first.shape}, layout {tuple(first.spec)}. Make it {nearest}, or {_other_degrees(plan, size, first)}"
            + (f", or accept whole copies with --parallel.replicate {' '.join(paths)}" if first.by_fsdp else "")
        )
    return found


def _other_degrees(plan: Plan, size: int, item: Indivisible) -> str:
    """The degrees of the mesh axis at fault that would divide a dimension of this size."""
    if not item.by_fsdp:
        fits = [d for d in range(1, plan.mesh.tensor + 1) if plan.mesh.tensor % d == 0 and size % d == 0]
        return f"--parallel.tensor one of {fits}"
    tensor = item.factor // plan.mesh.fsdp
    fits = [d for d in range(1, plan.mesh.num_replicas + 1) if plan.mesh.num_replicas % d == 0 and size % (d * tensor) == 0]
    return f"--parallel.fsdp one of {fits}"


def findings(config: RunConfig, plan: Plan) -> list[str]:
    """What stands between this configuration and a run, each with the numbers and the way out."""
    found = indivisible_dimensions(plan)
    found += [
        f"{path}: shape {plan.leaves[path].decl.shape}, axes {plan.leaves[path].decl.axes}: would be whole on every device although"
        f" the policy is {plan.policy}; accept that with --parallel.replicate {path}"
        for path in plan.undivided()
        if path not in config.parallel.replicate
    ]
    found += [
        f"--parallel.replicate {path}: the model has no such parameter; it has {', '.join(plan.leaves)}"
        for path in config.parallel.replicate
        if path not in plan.leaves
    ]
    if plan.mesh.tensor > 1 and not plan.rules.tensor:
        found.append(
            f"--parallel.tensor is {plan.mesh.tensor}, but this model has no axis that tensor parallelism divides: every group"
            " would compute the same thing. Make it 1."
        )
    found += refusals(config, plan.mesh.num_replicas, metadata.version("jax"))
    try:
        account(config, plan.mesh.num_replicas)
    except UserError as error:
        found.append(str(error))
    return found + config_findings(config)


def config_findings(config: RunConfig) -> list[str]:
    """What can be said without a mesh."""
    if not isinstance(config.model, LANGUAGE_MODELS) or config.data.seq_len <= config.model.max_seq_len:
        return []
    return [
        f"--data.seq-len is {config.data.seq_len}, more than the {config.model.max_seq_len} positions of"
        " --model.max-seq-len: raise the one or lower the other."
    ]


def data_findings(config: RunConfig) -> list[str]:
    """Why the data cannot be trained on, if so; they are opened for it, but for robots' (`sharder data inspect` does that)."""
    if isinstance(config.model, Pi0Config):
        return []
    try:
        training, _ = open_datasets(config)
        open_order(config, training)
    except UserError as error:
        return [str(error)]
    return []


def check(config: RunConfig, plan: Plan, others: Sequence[str] = ()) -> None:
    """Raises one UserError with all findings, and with `others` where there are any."""
    found = findings(config, plan)
    tell([*found, *others] if found else [])


def tell(found: list[str]) -> None:
    """Raises one UserError with all findings, where there are any."""
    if found:
        counted = "1 reason why" if len(found) == 1 else f"{len(found)} reasons why"
        raise UserError(f"{counted} this run cannot start:\n" + "\n".join(f"- {x}" for x in found))

"""Every reason why a run would fail, found over abstract shapes and told all at once, before anything is allocated."""

from dataclasses import dataclass

from sharder.config import MlpConfig, RunConfig, UserError
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
    try:
        account_batch(config, plan.mesh.num_replicas)
    except UserError as error:
        found.append(str(error))
    if not isinstance(config.model, MlpConfig) and config.data.seq_len > config.model.max_seq_len:
        found.append(
            f"--data.seq-len is {config.data.seq_len}, more than the {config.model.max_seq_len} positions of"
            " --model.max-seq-len: raise the one or lower the other."
        )
    return found


def check(config: RunConfig, plan: Plan) -> None:
    """Raises one UserError with all findings."""
    found = findings(config, plan)
    if found:
        counted = "1 reason why" if len(found) == 1 else f"{len(found)} reasons why"
        raise UserError(f"{counted} this run cannot start:\n" + "\n".join(f"- {x}" for x in found))

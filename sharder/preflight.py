"""Every reason why a run would fail, found over abstract shapes and told all at once, before anything is allocated."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata

from sharder.accounting import account_workers, batch_findings
from sharder.config import LANGUAGE_MODELS, MOMENT_BYTES, RunConfig, UserError
from sharder.exactness import refusals, untested
from sharder.finding import Finding, Refused, applied, as_arguments
from sharder.models.build import declare
from sharder.sharding.blocks import cut_blocks
from sharder.sharding.divisible import Machine, Remedies, divisors, parameter_findings
from sharder.sharding.mesh import MeshShape, resolve_mesh_shape
from sharder.sharding.plan import Plan


@dataclass(frozen=True)
class Surroundings:
    """What is known of the machine and the data; what is None is not known and not checked."""

    machine: Machine | None = None
    platform: str | None = None
    mesh_error: str | None = None
    """Why the degrees do not fit the devices; the plan is then that of the degrees asked for."""
    data_error: str | None = None
    """Why the dataset cannot be read."""
    num_examples: int | None = None
    """Of the training split."""
    state_bytes: int | None = None
    """Of the whole state, undivided, as a checkpoint holds it."""
    free_bytes: int | None = None
    """Of the disk that checkpoints go to."""
    num_saved: int = 0
    """Checkpoints that lie there already."""
    predict_bytes: Callable[[RunConfig], int | None] | None = None
    """Memory of a device that a step would need; None where the configuration does not work on these devices."""
    memory_bytes: int | None = None
    """Of a device."""


def settle_mesh(config: RunConfig, num_devices: int, num_local: int) -> tuple[MeshShape, str | None]:
    """The mesh, or the one that was asked for and why these devices cannot form it."""
    try:
        return resolve_mesh_shape(config.parallel, num_devices, num_local), None
    except UserError as error:
        asked = config.parallel
        return MeshShape(asked.data or 1, asked.fsdp or 1, asked.tensor), str(error)


def settle_reduction(config: RunConfig, plan: Plan, platform: str, memory_bytes: int | None) -> tuple[RunConfig, str | None]:
    """The configuration with `--parallel.reduction auto` decided, and where it became fast, why.

    Exact where its promise is tested, virtual workers fit, and the whole copy that it needs under fsdp is known to fit into
    `memory_bytes` of a device.
    """
    if config.parallel.reduction != "auto":
        return config, None
    exact, version = with_reduction(config, "exact"), metadata.version("jax")
    reasons = [untested(exact, platform, version), *(f.message for f in refusals(exact, plan.mesh.num_replicas, version))]
    try:
        account_workers(exact, plan.mesh.num_replicas)
    except UserError as error:
        reasons.append(str(error))
    if plan.policy == "fsdp" and plan.mesh.fsdp > 1:
        reasons.append(_copy_does_not_fit(plan, memory_bytes, config))
    why = next((reason for reason in reasons if reason), None)
    return (exact, None) if why is None else (with_reduction(config, "fast"), why)


def with_reduction(config: RunConfig, reduction: str) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, reduction=reduction))


def _copy_does_not_fit(plan: Plan, memory_bytes: int | None, config: RunConfig) -> str | None:
    """Why the whole copy of exact mode is not shown to fit, or None. Half of the memory is left to activations."""
    if memory_bytes is None:
        return "exact mode needs a whole copy of the parameters on every device, and how much memory a device has is not known"
    # Under fsdp: parameters, and of what is trained moments and a moving average in float32, divided; a copy, and two gradients
    # in float32, whole.
    elements = plan.param_bytes_per_device("compute", declare(config.model).frozen, "int8")
    copies = sum(plan.param_bytes_per_device(layout) for layout in ("storage", "compute"))
    divided = 4 + MOMENT_BYTES[config.optimizer.moments]
    needed = copies + divided * elements // plan.mesh.fsdp + 8 * elements
    if 2 * needed <= memory_bytes:
        return None
    return (
        f"exact mode would need {needed / 1e9:.1f} GB beside the activations, more than half of a device's {memory_bytes / 1e9:.1f} GB:"
        " try --parallel.reduction exact --parallel.exact-memory lean"
    )


def findings(config: RunConfig, plan: Plan, known: Surroundings = Surroundings()) -> list[Finding]:
    """What stands between this configuration and a run."""
    found = []
    if known.mesh_error is not None:
        found.append(Finding("mesh", known.mesh_error, Remedies(config, plan, known.machine).degrees, "--parallel"))
    found += parameter_findings(config, plan, known.machine)
    found += refusals(config, plan.mesh.num_replicas, metadata.version("jax"))
    # How many replicas there will be is open where the mesh is.
    found += batch_findings(config, plan.mesh.num_replicas, known.num_examples) if known.mesh_error is None else []
    found += _sequence(config) + _offload(config, known) + _best(config) + _moments(config, plan)
    if known.data_error is not None:
        found.append(Finding("data", known.data_error, set_at="--data"))
    sound = known.mesh_error is None and not plan.indivisible()
    return found + _disk(config, known) + (_memory(config, plan, known) if sound else [])


def check(config: RunConfig, plan: Plan, known: Surroundings = Surroundings()) -> None:
    """Raises one UserError with all findings."""
    found = findings(config, plan, known)
    if found:
        raise Refused(found)


def _sequence(config: RunConfig) -> list[Finding]:
    if not isinstance(config.model, LANGUAGE_MODELS) or config.data.seq_len <= config.model.max_seq_len:
        return []
    message = (
        f"--data.seq-len is {config.data.seq_len}, more than the {config.model.max_seq_len} positions of"
        " --model.max-seq-len: raise the one or lower the other."
    )
    return [
        Finding(
            "sequence", message, {"--data.seq-len": config.model.max_seq_len}, "--data.seq-len", factor=config.model.max_seq_len
        )
    ]


def _offload(config: RunConfig, known: Surroundings) -> list[Finding]:
    if config.model.remat != "offload" or known.platform != "cpu":
        return []
    message = "--model.remat is offload, but a CPU has no second memory to keep activations in: use --model.remat block."
    return [Finding("remat", message, {"--model.remat": "block"}, "--model.remat")]


def _best(config: RunConfig) -> list[Finding]:
    """A metric that is not measured where checkpoints are saved would keep none."""
    every, validate = config.checkpoint.every, config.train.validate_every
    if config.checkpoint.best != "validation_loss" or every == 0 or (validate and every % validate == 0):
        return []
    message = (
        f"--checkpoint.best is validation_loss, but with --checkpoint.every {every} and --train.validate-every {validate} checkpoints"
        " are saved where nothing was evaluated: make the first a multiple of the second."
    )
    nearest = (
        {"--train.validate-every": every}
        if not validate or validate > every
        else {"--checkpoint.every": every // validate * validate}
    )
    return [Finding("best", message, nearest, "--checkpoint.best")]


def _moments(config: RunConfig, plan: Plan) -> list[Finding]:
    """Blocks of narrow moments that tensor parallelism would cut: the first, which stands for all."""
    if config.optimizer.moments == "float32":
        return []
    declared = declare(config.model)
    for path, (block, held) in cut_blocks(plan, declared.rules).items():
        if path not in declared.frozen:
            decl = declared.params[path]
            message = (
                f"--optimizer.moments is {config.optimizer.moments}, whose blocks of {path} are {block.size} elements along"
                f" {decl.axes[block.dim]}, but with --parallel.tensor {plan.mesh.tensor} a device holds {held} of its {decl.shape[block.dim]}:"
                " use --optimizer.moments float32, or a tensor degree that cuts no block."
            )
            return [Finding("moments", message, {"--optimizer.moments": "float32"}, "--optimizer.moments")]
    return []


def num_retained(config: RunConfig) -> int:
    """The most checkpoints that lie on disk at once: those kept, and one that is being written."""
    keep, steps = config.checkpoint, config.train.steps
    num_saves = steps // keep.every + 1 if keep.every else 1
    return min(num_saves, keep.keep_last + 1 + (keep.best is not None) + (steps // keep.keep_every if keep.keep_every else 0))


def _disk(config: RunConfig, known: Surroundings) -> list[Finding]:
    """Checkpoints that would not fit. What is there already occupies its place, and is replaced by what is kept."""
    if known.state_bytes is None or known.free_bytes is None:
        return []
    room = known.free_bytes // known.state_bytes + known.num_saved
    if num_retained(config) <= room:
        return []
    keep, gigabyte = config.checkpoint, 1e9
    message = (
        f"up to {num_retained(config)} checkpoints of {known.state_bytes / gigabyte:.3f} GB would lie on disk at once, but there are"
        f" {known.free_bytes / gigabyte:.3f} GB free beside {known.num_saved} saved: "
    )
    if room < 2:
        return [Finding("disk", message + "choose another --run-dir, or free space there.", set_at="--run-dir")]
    nearest: dict[str, int | None] = {"--checkpoint.keep-last": min(keep.keep_last, room - 1)}
    if keep.keep_every:
        left = room - 1 - nearest["--checkpoint.keep-last"]
        nearest["--checkpoint.keep-every"] = config.train.steps // (left + 1) + 1 if left else None
    return [
        Finding(
            "disk", f"{message}use {' '.join(as_arguments(nearest))}, or another --run-dir.", nearest, next(reversed(nearest))
        )
    ]


def _memory(config: RunConfig, plan: Plan, known: Surroundings) -> list[Finding]:
    """A prediction beyond the memory of a device, and the least change that would fit by the same prediction."""
    if known.predict_bytes is None or known.memory_bytes is None:
        return []
    needed = known.predict_bytes(config)
    if needed is None or needed <= known.memory_bytes:
        return []
    mesh, share = plan.mesh, config.train.global_batch_size // _num_shares(config, plan)
    message = (
        f"a device would need {needed / 1e9:.3f} GB by prediction, but has {known.memory_bytes / 1e9:.3f} GB: policy {plan.policy},"
        f" mesh data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}, microbatches of {config.train.microbatch_size or share}."
    )
    for change in _savings(config, plan, share):
        size = known.predict_bytes(applied(config, change))
        if size is not None and size <= known.memory_bytes:
            return [
                Finding(
                    "memory",
                    f"{message} Use {' '.join(as_arguments(change))}: {size / 1e9:.3f} GB.",
                    change,
                    "--parallel.policy",
                )
            ]
    way = " No policy, remat policy or microbatch brings that down far enough: use more devices."
    return [Finding("memory", message + way, set_at="--parallel.policy")]


def _num_shares(config: RunConfig, plan: Plan) -> int:
    """How many parts the global batch is in before it is divided into microbatches."""
    return config.parallel.virtual_workers if config.parallel.reduction == "exact" else plan.mesh.num_replicas


def _savings(config: RunConfig, plan: Plan, share: int) -> Iterator[dict[str, object]]:
    """Changes that save memory, the least first: more microbatches, remat, policies, all of these."""
    micro = config.train.microbatch_size or share
    smaller = [m for m in divisors(share) if m < micro]
    yield from ({"--train.microbatch-size": m} for m in reversed(smaller[-3:]))
    replicas = plan.mesh.num_replicas
    divided = [
        {"--parallel.data": replicas // fsdp, "--parallel.fsdp": fsdp, "--parallel.tensor": plan.mesh.tensor}
        for fsdp in divisors(replicas)
        if fsdp > plan.mesh.fsdp or (fsdp == replicas and plan.policy == "dp")
    ]
    policies = [{"--parallel.policy": "zero"}, {"--parallel.policy": "fsdp"}]
    policies += [{"--parallel.policy": "fsdp", **degrees} for degrees in divided]
    least = ({"--train.microbatch-size": 1} if smaller else {}) | (
        {} if config.model.remat == "block" else {"--model.remat": "block"}
    )
    yield {"--model.remat": "block"}
    yield from policies
    yield least
    yield from (policy | least for policy in policies)
    if config.parallel.reduction == "exact":
        yield policies[-1] | least | {"--parallel.reduction": "fast"}

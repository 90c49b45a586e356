"""Everything about a run that is known before anything is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharder.cluster import decide, device_memory_bytes
from sharder.config import RunConfig, UserError
from sharder.data.loader import BatchLayout, WorkerLayout
from sharder.models.build import Declared, declare
from sharder.preflight import WorkerAccounting, account, check, config_findings, settle_reduction, tell
from sharder.sharding.mesh import make_mesh, resolve_mesh_shape
from sharder.sharding.plan import Plan, make_plan
from sharder.train.state import TrainState, shardings, state_specs


@dataclass(frozen=True)
class Setup:
    """What both engines and the evaluation need to know of a run."""

    config: RunConfig
    declared: Declared
    plan: Plan
    mesh: Mesh
    batch: BatchLayout
    """Of the declarative step and of evaluations."""
    workers: WorkerLayout | None
    """Of the exact step; None in fast mode."""
    state_shardings: TrainState
    why_fast: str | None
    """Why `--parallel.reduction auto` became fast."""

    @property
    def train_batch(self) -> BatchLayout:
        """Of the run's own step."""
        return self.workers or self.batch

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


def prepare(config: RunConfig, devices: Sequence[jax.Device] | None = None, others: Sequence[str] = ()) -> Setup:
    """Mesh over `devices` (default: all; they need not be there), declared parameters, plan, the mode settled, and preflight.
    Raises UserError with all findings, and with `others` where there are any."""
    devices = devices or jax.devices()
    num_local = sum(d.process_index == devices[0].process_index for d in devices)
    try:
        shape = resolve_mesh_shape(config.parallel, len(devices), num_local)
    except UserError as error:
        tell([str(error), *config_findings(config), *others])
    declared = declare(config.model)
    plan = make_plan(declared.params, declared.rules, config.parallel, shape)
    # One answer for all processes, whose machines may differ.
    memory_bytes = decide(lambda: {"bytes": device_memory_bytes()})["bytes"]
    config, why_fast = settle_reduction(config, plan, devices[0].platform, memory_bytes)
    check(config, plan, others)
    if config.model.remat == "offload" and devices[0].platform == "cpu":
        raise UserError("--model.remat is offload, but a CPU has no second memory to keep activations in: use block.")
    mesh = make_mesh(shape, devices)
    accounting, workers = account(config, shape.num_replicas), None
    batch = BatchLayout(mesh, accounting.num_slots, accounting.slot_size)
    if isinstance(accounting, WorkerAccounting):
        workers = WorkerLayout(mesh, accounting.num_slots, accounting.slot_size, accounting.num_microbatches)
    state_shardings = shardings(state_specs(config, declared, plan), mesh)
    return Setup(config, declared, plan, mesh, batch, workers, state_shardings, why_fast)

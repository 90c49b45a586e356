"""Everything about a run that is known before anything is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharder.accounting import WorkerAccounting, account
from sharder.agreement import decide
from sharder.cluster import device_memory_bytes
from sharder.config import RunConfig
from sharder.data.loader import BatchLayout, WorkerLayout
from sharder.finding import Refused
from sharder.models.build import Declared, unflatten
from sharder.sharding.divisible import Machine
from sharder.sharding.mesh import make_mesh
from sharder.sharding.plan import LeafPlan, Plan
from sharder.sharding.policy import Layout
from sharder.train.inspection import Inspection, inspect
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

    @property
    def trained_leaves(self) -> list[LeafPlan]:
        """Parameters that have gradients, by sorted path."""
        return [leaf for path, leaf in self.plan.leaves.items() if path not in self.declared.frozen]

    def gradient_shardings(self, layout: Layout) -> dict:
        """Of a tree of gradients."""
        return unflatten({leaf.path: NamedSharding(self.mesh, leaf.spec(layout)) for leaf in self.trained_leaves})

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


def prepare(
    config: RunConfig, devices: Sequence[jax.Device] | None = None, run_dir: Path | None = None, fitted: bool = False
) -> Setup:  # fmt: skip
    """Mesh over `devices` (default: all; they need not be there), declared parameters, plan, the mode settled, and preflight;
    with `run_dir`, disk, memory and data too, memory unless it is known that the run has `fitted`. Raises UserError with all
    findings."""
    devices = devices or jax.devices()
    num_local = sum(d.process_index == devices[0].process_index for d in devices)
    machine, predict = Machine(len(devices), num_local), run_dir is not None and not fitted
    # One answer for all processes, whose machines may differ.
    memory_bytes = decide(lambda: {"bytes": device_memory_bytes()})["bytes"]
    return set_up(inspect(config, machine, devices[0].platform, memory_bytes, run_dir, predict=predict), devices)


def set_up(inspection: Inspection, devices: Sequence[jax.Device]) -> Setup:
    """Raises UserError with all findings, where there are any."""
    if inspection.findings:
        raise Refused(inspection.findings)
    config, plan, declared = inspection.config, inspection.plan, inspection.declared
    mesh = make_mesh(plan.mesh, devices)
    accounting, workers = account(config, plan.mesh.num_replicas), None
    batch = BatchLayout(mesh, accounting.num_slots, accounting.slot_size)
    if isinstance(accounting, WorkerAccounting):
        workers = WorkerLayout(mesh, accounting.num_slots, accounting.slot_size, accounting.num_microbatches)
    state_shardings = shardings(state_specs(config, declared, plan), mesh)
    return Setup(config, declared, plan, mesh, batch, workers, state_shardings, inspection.why_fast)

"""A run looked at before it starts: plan, mode and every finding, from shapes and from what is known of machine and data."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax

from sharder import checkpoint, cluster
from sharder.accounting import Accounting, account
from sharder.agreement import decide
from sharder.config import RunConfig, UserError
from sharder.data.open import count_examples, open_examples
from sharder.finding import Finding
from sharder.instrument.machine import memory_of
from sharder.models.build import Declared, declare
from sharder.preflight import Surroundings, findings, settle_mesh, settle_reduction
from sharder.sharding.divisible import Machine
from sharder.sharding.plan import Plan, make_plan
from sharder.sharding.show import to_json, whole_bytes
from sharder.train.description import describe_step, state_leaves


@dataclass(frozen=True)
class Inspection:
    """Of a run that may not be able to start."""

    config: RunConfig
    """With the mode settled."""
    declared: Declared
    plan: Plan
    """Of the mesh that was asked for, where the devices cannot form it."""
    why_fast: str | None
    findings: tuple[Finding, ...]
    sound: bool
    """Whether the devices form the mesh and every dimension divides, so that the plan has bytes."""

    def accounting(self) -> Accounting | None:
        """How the batch is made up; None where it cannot be, which is a finding."""
        try:
            return account(self.config, self.plan.mesh.num_replicas)
        except UserError:
            return None

    def to_json(self) -> dict:
        """Findings; the plan, as in plan.json, where it is sound; how the batch is made up, where both can be told."""
        plan, accounting = None, self.accounting() if self.sound else None
        if self.sound:
            plan = to_json(self.plan, state_leaves(self.config, self.declared, self.plan))
        batch = accounting and {**asdict(accounting), "global_batch_size": accounting.global_batch_size}
        return {"findings": [f.to_json() for f in self.findings], "plan": plan, "accounting": batch}


def inspect(
    config: RunConfig, machine: Machine, platform: str, memory_bytes: int | None, run_dir: Path | None = None,
    predict: bool = False, opens: bool = False,
) -> Inspection:  # fmt: skip
    """`memory_bytes`: of a device, held against a prediction with `predict`. `run_dir`: where the run would write (it need not
    exist); with it the disk and the data of this machine are looked at too, and with `opens` the data are opened for it."""
    shape, mesh_error = settle_mesh(config, machine.num_devices, machine.num_local)
    declared = declare(config.model)
    plan = make_plan(declared.params, declared.rules, config.parallel, shape)
    config, why_fast = settle_reduction(config, plan, platform, memory_bytes)
    known = Surroundings(machine=machine, platform=platform, mesh_error=mesh_error)
    if predict:
        known = replace(known, memory_bytes=memory_bytes, predict_bytes=predictor(machine, platform))
    if run_dir is not None:
        known = look_around(known, config, run_dir, whole_bytes(state_leaves(config, declared, plan)), opens)
    sound = mesh_error is None and not plan.indivisible()
    return Inspection(config, declared, plan, why_fast, tuple(findings(config, plan, known)), sound)


def inspect_here(config: RunConfig, run_dir: Path) -> Inspection:
    """On all devices of this run, with its data opened."""
    machine = Machine(jax.device_count(), jax.local_device_count())
    return inspect(config, machine, jax.devices()[0].platform, cluster.device_memory_bytes(), run_dir, predict=True, opens=True)


def look_around(known: Surroundings, config: RunConfig, run_dir: Path, state_bytes: int, opens: bool) -> Surroundings:
    """What is `known`, and what the disk and the data tell."""
    num_examples, data_error = None, None
    try:
        num_examples = open_examples(config) if opens else count_examples(config)
    except UserError as error:
        data_error = str(error)
    # Process 0 decides for all: it writes, and another may see a checkpoint more or less.
    disk = decide(lambda: {"free": free_bytes(run_dir), "saved": len(checkpoint.list_steps(run_dir))})
    return replace(
        known,
        num_examples=num_examples,
        data_error=data_error,
        state_bytes=state_bytes,
        free_bytes=disk["free"],
        num_saved=disk["saved"],
    )


def free_bytes(folder: Path) -> int:
    """Of the disk that a folder lies on, or will lie on."""
    folder = folder.absolute()
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


def predictor(machine: Machine, platform: str) -> Callable[[RunConfig], int | None]:
    """Memory of a device by prediction; None where the configuration does not fit the devices."""

    def predict(config: RunConfig) -> int | None:
        try:
            return memory_of(describe_step(config, machine.num_devices, machine.num_local, platform)).total
        except UserError:
            return None

    return predict

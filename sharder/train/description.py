"""What a step is made of, in shapes: handed to the instruments, which know no trainer."""

from sharder.accounting import Accounting, WorkerAccounting, account
from sharder.config import RunConfig
from sharder.data.open import example_shapes
from sharder.instrument.machine import Step
from sharder.models.build import Declared, declare
from sharder.preflight import check, settle_reduction
from sharder.sharding.mesh import resolve_mesh_shape
from sharder.sharding.plan import Plan, make_plan
from sharder.sharding.show import StateLeaves
from sharder.train.state import by_path, declare_state, state_specs


def state_leaves(config: RunConfig, declared: Declared, plan: Plan) -> StateLeaves:
    specs = by_path(state_specs(config, declared, plan))
    return {p: (x.shape, str(x.dtype), specs[p]) for p, x in by_path(declare_state(config, declared)).items()}


def describe_step(config: RunConfig, num_devices: int, num_local: int, platform: str = "gpu") -> Step:
    """What a step of this run is made of on so many devices. Raises UserError with all findings.

    `--parallel.reduction auto` is fast on a machine that is not there: exact mode is not tested on such.
    """
    shape = resolve_mesh_shape(config.parallel, num_devices, num_local)
    declared = declare(config.model)
    plan = make_plan(declared.params, declared.rules, config.parallel, shape)
    config, _ = settle_reduction(config, plan, platform, None)
    check(config, plan)
    accounting: Accounting = account(config, shape.num_replicas)
    inside = accounting.num_microbatches if isinstance(accounting, WorkerAccounting) else 0
    state = state_leaves(config, declared, plan)
    return Step(config, declared, plan, state, example_shapes(config), accounting.microbatch_size, accounting.num_slots, inside)

"""What a step of exact mode communicates: several programs, each run so often, against the least that its fixed order needs.

With the letters of `sharder.instrument.bound`, G in float32 and V/n slots of one virtual worker on each replica:

    sums        the tree over the workers of a slot: all-to-all of the gradient, and a gather of what the update layout
                has whole                      V/n ((n-1)/n G + (d-1)/d G/f), whole gradients V/n 2 (n-1)/n G
    copy        the parameters gathered once under fsdp; under zero the new ones          (f-1)/f P
    lean        blocks gathered twice in every slot, the rest once, in the compute dtype  V/n (f-1)/f (2 blocks + rest)

Sums over slots are formed after those over replicas (the order of the tree), so that every slot pays. The pieces of an
all-to-all differ from device to device: of h hosts each device gets (h-1)/h G from others, where sums inside each host
first would leave each of its m members (h-1)/h G/m.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from sharder.instrument.bound import GATHER, OTHER, REDUCE, TENSOR, Bounds, lower_bounds
from sharder.instrument.collectives import Collective, Traffic, read_traffic
from sharder.sharding.mesh import AXES, REPLICA_AXES
from sharder.sharding.plan import Plan, bytes_per_device

Programs = Mapping[str, str]
"""Text of each compiled program by its name in `sharder.train.exact.ExactStep.programs`."""


def exact_bounds(
    plan: Plan, compute_dtype: str, num_slots: int, tokens_per_slot: int, lean: bool, frozen: Collection[str] = ()
) -> Bounds:
    """`tokens_per_slot`: of one virtual worker. `frozen`: parameters without gradients."""
    mesh = plan.mesh
    f, d, n = mesh.fsdp, mesh.data, mesh.num_replicas
    sums = copy = 0.0
    for path, leaf in plan.leaves.items():
        gradient, own = (bytes_per_device(leaf.decl.shape, t, leaf.compute, mesh) for t in ("float32", leaf.decl.dtype))
        gradient = 0 if path in frozen else gradient
        whole_again = (d - 1) / d * gradient / f if leaf.divided else (n - 1) / n * gradient
        sums += (n - 1) / n * gradient + whole_again
        moves = leaf.divided and (plan.policy == "fsdp" or path not in frozen)
        copy += (f - 1) / f * own if moves else 0
    fast = lower_bounds(plan, compute_dtype, num_slots, tokens_per_slot, frozen)
    gather = fast[GATHER, ("fsdp",)] if lean else copy
    tensor = (TENSOR, ("tensor",))
    return {(GATHER, ("fsdp",)): gather, (REDUCE, REPLICA_AXES): num_slots * sums, tensor: fast[tensor]}


def read_programs(programs: Programs, plan: Plan, num_slots: int, hosts: Sequence[int]) -> Traffic:
    """All collectives of a step, with the program in their scope. `hosts`: number of the host of each device, in mesh order."""
    times = {"worker": num_slots, "reduce": num_slots, "slot": num_slots, "add": num_slots - 1}
    mesh = {axis: plan.mesh.size(axis) for axis in AXES}
    found, unknown = [], []
    for name, text in programs.items():
        # A worker's program knows the devices of its replica only.
        alone = name == "worker"
        where = ({"tensor": plan.mesh.tensor}, hosts[: plan.mesh.tensor]) if alone else (mesh, hosts)
        traffic, runs = read_traffic(text, *where), times.get(name, 1)
        found += [replace(c, executions=c.executions * runs, scope=f"{name}: {c.scope}") for c in traffic.collectives]
        unknown += [f"{name}: {loop}" for loop in traffic.unknown_loops]
    return Traffic(tuple(sorted(found, key=lambda c: -c.received_bytes)), tuple(unknown))


def purpose_in_exact_mode(c: Collective) -> str:
    """Told by its program; a slot of `lean` gathers over fsdp, and what else it moves belongs to sums."""
    program = c.scope.partition(":")[0]
    if c.axes == ("tensor",):
        return TENSOR
    if program in ("gather", "finish") or (program == "slot" and c.kind == "all-gather" and c.axes == ("fsdp",)):
        return GATHER
    return REDUCE if program in ("reduce", "slot") else OTHER

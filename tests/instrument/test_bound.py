import dataclasses
import math

import pytest

from sharder.config import ParallelConfig, TransformerConfig
from sharder.instrument.bound import GATHER, REDUCE, TENSOR, compare, lower_bounds, warnings
from sharder.instrument.collectives import Collective, Traffic
from sharder.models.build import declare
from sharder.sharding.mesh import MeshShape
from sharder.sharding.plan import make_plan

MODEL = TransformerConfig(max_seq_len=16, embed_dim=64, num_heads=4, mlp_dim=128, num_layers=3)


def plan_of(policy, mesh, model=MODEL):
    declared = declare(model)
    return make_plan(declared.params, declared.rules, ParallelConfig(policy), mesh), declared.num_params


def by_purpose(plan, **kw):
    found = {GATHER: 0.0, REDUCE: 0.0, TENSOR: 0.0}
    for (name, _), size in lower_bounds(plan, "float32", **({"num_slots": 1, "tokens_per_slot": 16} | kw)).items():
        found[name] += size
    return found


@pytest.mark.parametrize("policy, reduce, gather", [("dp", 2 * 7 / 8, 0), ("zero", 7 / 8, 7 / 8)])
def test_the_least_of_a_layout_is_its_table(policy, reduce, gather):
    plan, num_params = plan_of(policy, MeshShape(1, 8, 1))
    found = by_purpose(plan)
    assert (found[REDUCE], found[GATHER]) == (reduce * 4 * num_params, gather * 4 * num_params)


def test_fsdp_gathers_blocks_twice_in_every_slot_and_the_rest_once():
    plan, num_params = plan_of("fsdp", MeshShape(1, 8, 1))
    blocks = sum(math.prod(x.decl.shape) for x in plan.leaves.values() if x.decl.axes[0] == "layers")
    assert by_purpose(plan, num_slots=3)[GATHER] == pytest.approx(3 * 7 / 8 * 4 * (2 * blocks + num_params - blocks))


def test_a_block_half_needs_an_all_reduce_forward_and_one_backward():
    plan, _ = plan_of("dp", MeshShape(1, 1, 2))
    # 3 layers x 2 halves x 2 passes, each 2 (2-1)/2 of 16 tokens of 64 numbers of 4 bytes.
    assert by_purpose(plan)[TENSOR] == 3 * 2 * 2 * 16 * 64 * 4


def test_gradients_of_bfloat16_parameters_are_summed_in_float32_and_frozen_ones_not_at_all():
    plan, num_params = plan_of("zero", MeshShape(1, 8, 1), dataclasses.replace(MODEL, param_dtype="bfloat16"))
    assert by_purpose(plan) == {GATHER: 7 / 8 * 2 * num_params, REDUCE: 7 / 8 * 4 * num_params, TENSOR: 0}
    assert by_purpose(plan, frozen=plan.leaves)[REDUCE] == by_purpose(plan, frozen=plan.leaves)[GATHER] == 0


def test_hybrid_sharding_sends_parts_of_gradients_across_hosts_and_no_weights():
    plan, num_params = plan_of("fsdp", MeshShape(2, 4, 1))
    found = {p.name: p for p in compare(Traffic((), ()), lower_bounds(plan, "float32", 1, 16), plan.mesh, 4)}
    assert found[GATHER].bound_bytes > 0 and found[GATHER].across_bound_bytes == 0
    # An all-reduce of each device's quarter between the two hosts.
    assert found[REDUCE].across_bound_bytes == 2 * 1 / 2 * 4 * num_params / 4


def collective(**changes):
    given = dict(name="ar.1", kind="all-reduce", axes=("fsdp",), group_size=8, num_hosts=1, dtypes=("f32",), num_arrays=1)
    return Collective(**(given | dict(bytes_each=1 << 24, executions=3, scope="mlp/dot") | changes))


def warned(plan, *collectives):
    return warnings(plan, compare(Traffic(collectives, ()), lower_bounds(plan, "float32", 1, 16), plan.mesh, 8))


def test_a_program_that_moves_more_is_warned_of_with_operation_and_scope():
    plan, _ = plan_of("zero", MeshShape(1, 8, 1))
    (line,) = warned(plan, collective())
    assert "all-reduce %ar.1 over fsdp, 3 x 16.0 MiB, in mlp/dot" in line and "formed no reduce-scatter" in line


def test_a_program_at_the_bound_is_not_warned_of():
    plan, num_params = plan_of("dp", MeshShape(1, 8, 1))
    assert warned(plan, collective(bytes_each=4 * num_params, executions=1)) == []


def test_the_operation_of_the_size_of_the_excess_is_named():
    plan, num_params = plan_of("dp", MeshShape(1, 8, 1))
    needed = collective(name="needed", bytes_each=4 * num_params, executions=1)
    (line,) = warned(plan, needed, collective(name="extra", bytes_each=3 * num_params, executions=1))
    assert "%extra" in line and "%needed" not in line

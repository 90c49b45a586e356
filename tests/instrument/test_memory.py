import jax
import jax.numpy as jnp
import pytest
from small import small

from sharder.config import ParallelConfig
from sharder.instrument.liveness import worst_moment
from sharder.instrument.memory import estimate_exact_memory, estimate_memory, largest_microbatch
from sharder.sharding.mesh import MeshShape

MIB = 1 << 20


def worst(fn, *shapes):
    return worst_moment(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).jaxpr).total_bytes


def test_what_is_elementwise_is_stored_only_as_a_result():
    assert worst(lambda x: jnp.sin(jnp.cos(x) * 2) + 1, (512, 512)) == MIB


def test_a_product_stores_its_result_and_a_computed_operand():
    assert worst(lambda x, w: (jnp.sin(x) @ w).sum(), (512, 512), (512, 512)) == pytest.approx(2 * MIB, abs=8)


def test_a_view_stores_nothing():
    assert worst(lambda x, w: x.T.reshape(512, 512) @ w, (512, 512), (512, 512)) == MIB


def test_a_loop_holds_its_stack_from_the_start():
    scanned = lambda x, w: jax.lax.scan(lambda x, _: (x @ w, x), x, None, length=6)[1].sum()  # noqa: E731
    assert worst(scanned, (512, 512), (512, 512)) >= 6 * MIB


def described(policy="zero", mesh=MeshShape(1, 8, 1), **model):
    import dataclasses

    from sharder.train.planning import describe_step

    config = dataclasses.replace(small(), parallel=ParallelConfig(policy, fsdp=mesh.fsdp, data=mesh.data, tensor=mesh.tensor))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
    return describe_step(config, mesh.num_devices, mesh.num_devices)


def test_bfloat16_parameters_with_adamw_are_two_and_two_and_eight_bytes():
    step = described("dp", MeshShape(1, 1, 1), param_dtype="bfloat16")
    memory = estimate_memory(step.declared, step.plan, step.state, step.batch, 1)
    n = step.declared.num_params
    # The two counters (of steps and of the schedule) are 4 bytes each.
    assert (
        memory.params == 2 * n
        and 8 * n < memory.opt_state <= 8 * n + 16
        and step.plan.param_bytes_per_device("update") == 2 * n
    )


def test_state_bytes_are_those_of_the_real_shards():
    from sharder.train.setup import prepare
    from sharder.train.state import create_state

    step = described("fsdp", MeshShape(2, 4, 1))
    setup = prepare(step.config)
    state = create_state(step.config, setup.declared, setup.state_shardings)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert estimate_memory(step.declared, step.plan, step.state, step.batch, 1).state == held


def test_recomputing_blocks_keeps_less_for_the_backward_pass():
    kept = {
        r: estimate_memory(s.declared, s.plan, s.state, s.batch, 1).activations
        for r in ("none", "dots", "block")
        for s in [described(remat=r)]
    }
    assert kept["block"] < kept["dots"] < kept["none"]


def test_exact_mode_holds_an_accumulator_for_each_level_of_its_tree():
    step = described("fsdp")
    totals = [estimate_exact_memory(step.declared, step.plan, step.state, step.batch, n, 1) for n in (1, 2, 8)]
    shard = 4 * step.declared.num_params // 8
    grown = [b.gradients - a.gradients for a, b in zip(totals, totals[1:])]
    assert grown == pytest.approx([shard, 2 * shard], rel=0.05)


@pytest.mark.parametrize("limit, fits", [(5, None), (14, 4), (26, 16), (1000, 64)])
def test_the_largest_microbatch_is_the_last_that_fits(limit, fits):
    assert largest_microbatch(lambda m: 10 + m, [1, 2, 4, 8, 16, 32, 64], limit) == fits


def test_offloading_is_refused_where_there_is_no_second_memory():
    import dataclasses

    from sharder.config import UserError
    from sharder.train.setup import prepare

    config = small()
    with pytest.raises(UserError, match="--model.remat is offload.*use --model.remat block"):
        prepare(dataclasses.replace(config, model=dataclasses.replace(config.model, remat="offload")))


@pytest.mark.slow
@pytest.mark.parametrize("policy, model", [("zero", {}), ("fsdp", {"remat": "block"}), ("dp", {"remat": "dots"})])
def test_the_total_on_cpu_is_within_a_quarter_of_the_compiled(policy, model):
    import dataclasses

    from sharder.instrument.machine import memory_of
    from sharder.instrument.memory import compiled_bytes
    from sharder.recipes import load_recipe
    from sharder.train.abstract import lower_abstract
    from sharder.train.planning import describe_step
    from sharder.train.setup import prepare

    recipe = load_recipe("tiny_lm")
    config = dataclasses.replace(
        recipe, parallel=ParallelConfig(policy, reduction="fast"), model=dataclasses.replace(recipe.model, **model)
    )
    compiled = compiled_bytes(lower_abstract(prepare(config)).compile())
    assert memory_of(describe_step(config, 8, 8)).total == pytest.approx(compiled, rel=0.25)


def test_a_constant_may_be_what_a_loop_or_a_product_takes():
    """Dropout draws its mask in a loop that begins with constants."""
    from sharder.instrument.machine import memory_of

    assert memory_of(described(dropout_rate=0.1)).total > memory_of(described()).total

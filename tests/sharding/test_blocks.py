import dataclasses
import math

import pytest
from small import small

from sharder.config import ParallelConfig
from sharder.models.build import declare
from sharder.recipes import RECIPES, load_recipe
from sharder.sharding.axes import ParamDecl
from sharder.sharding.blocks import block_of, cut_blocks
from sharder.sharding.mesh import MeshShape
from sharder.sharding.plan import make_plan

RULES = declare(small().model).rules


@pytest.mark.parametrize(
    "axes, shape, expected",
    [
        (("layers", "embed", "heads", "head_dim"), (2, 64, 32, 16), (3, 16)),  # not along heads, which tensor divides
        (("layers", "embed", "mlp"), (2, 64, 128), (2, 32)),  # embed is divided for storage: mlp is all there is
        (("vocab", "embed"), (256, 80), (1, 16)),
        (("layers", "embed", "heads", "head_dim"), (2, 64, 32, 12), (2, 32)),  # head_dim has too small a divisor
        (("layers", "embed"), (32, 64), None),  # never along layers
        (("layers", "mlp"), (2, 128), None),
    ],
)
def test_blocks_run_along_what_is_divided_least(axes, shape, expected):
    assert block_of(ParamDecl(shape, "float32", axes), RULES) == expected


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("policy", ["dp", "zero", "fsdp"])
def test_no_recipe_and_no_policy_cuts_a_block(recipe, policy):
    declared = declare(load_recipe(recipe).model)
    for mesh in (MeshShape(1, 8, 1), MeshShape(2, 4, 1), MeshShape(1, 64, 1)):
        plan = make_plan(declared.params, declared.rules, ParallelConfig(policy), mesh)
        assert cut_blocks(plan, declared.rules) == {}
        blocks = {p: block_of(d, declared.rules) for p, d in declared.params.items()}
        assert all("fsdp" not in (plan.leaves[p].update[b.dim] or ()) for p, b in blocks.items() if b is not None)


def test_blocks_are_where_the_parameters_are():
    """What stays float32, having no blocks, is little of every recipe."""
    for recipe in RECIPES:
        declared = declare(load_recipe(recipe).model)
        left = sum(math.prod(d.shape) for d in declared.params.values() if block_of(d, declared.rules) is None)
        assert left < 0.03 * declared.num_params, (recipe, left / declared.num_params)


def test_a_block_that_tensor_parallelism_cuts_is_found():
    config = small()
    model = dataclasses.replace(config.model, mlp_dim=144)
    declared = declare(model)
    plan = make_plan(declared.params, declared.rules, ParallelConfig("fsdp", tensor=2), MeshShape(1, 1, 2))
    found = cut_blocks(plan, declared.rules)
    assert {(p, b.size, held) for p, (b, held) in found.items()} == {(p, 16, 72) for p in ("blocks/mlp_in", "blocks/mlp_out")}

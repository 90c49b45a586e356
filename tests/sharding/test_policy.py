import pytest
from jax.sharding import PartitionSpec as P

from sharder.sharding.axes import AxisRules
from sharder.sharding.policy import LAYOUTS, partition, without_fsdp

RULES = AxisRules(
    names=frozenset({"layers", "embed", "heads", "head_dim", "mlp"}), tensor=("heads", "mlp"), storage=("embed", "mlp")
)
ONE, TWO, BOTH = ("embed", "head_dim"), ("layers", "mlp", "embed"), ("layers", "mlp")


def layouts(axes: tuple[str, ...], policy: str, rules: AxisRules = RULES) -> list[tuple]:
    """Storage, compute and update layout."""
    return [tuple(partition(axes, rules, policy, layout)) for layout in LAYOUTS]


@pytest.mark.parametrize(
    "policy, storage, compute, update",
    [
        ("dp", (None, None), (None, None), (None, None)),
        ("zero", (None, None), (None, None), ("fsdp", None)),
        ("fsdp", ("fsdp", None), (None, None), ("fsdp", None)),
    ],
)
def test_three_layouts_without_a_tensor_axis(policy, storage, compute, update):
    assert layouts(ONE, policy) == [storage, compute, update]


@pytest.mark.parametrize(
    "policy, storage, compute, update",
    [
        ("dp", (None, "tensor", None), (None, "tensor", None), (None, "tensor", None)),
        ("zero", (None, "tensor", None), (None, "tensor", None), (None, "tensor", "fsdp")),
        ("fsdp", (None, "tensor", "fsdp"), (None, "tensor", None), (None, "tensor", "fsdp")),
    ],
)
def test_tensor_divides_its_axis_in_all_three_layouts(policy, storage, compute, update):
    assert layouts(TWO, policy) == [storage, compute, update]


def test_one_dimension_may_be_divided_by_two_mesh_axes():
    assert layouts(BOTH, "fsdp") == [(None, ("tensor", "fsdp")), (None, "tensor"), (None, ("tensor", "fsdp"))]


def test_the_best_storage_axis_is_chosen_wherever_it_stands():
    assert partition(("mlp", "embed"), RULES, "fsdp", "storage") == P("tensor", "fsdp")


def test_tensor_axes_are_the_storage_axes_of_a_model_that_names_none():
    rules = AxisRules(RULES.names, tensor=("heads", "mlp"))
    assert partition(("embed", "mlp"), rules, "fsdp", "storage") == P(None, ("tensor", "fsdp"))


def test_parameter_without_a_storage_axis_stays_whole():
    assert layouts(("head_dim",), "fsdp") == [(None,)] * 3


def test_every_dimension_has_an_entry():
    assert all(len(spec) == 3 for policy in ("dp", "zero", "fsdp") for spec in layouts(("layers", "heads", "head_dim"), policy))


@pytest.mark.parametrize(
    "spec, left",
    [
        (P("fsdp", None), P(None, None)),
        (P(None, ("tensor", "fsdp")), P(None, "tensor")),
        (P("tensor", "fsdp"), P("tensor", None)),
        (P(("data", "fsdp", "tensor")), P(("data", "tensor"))),
    ],
    ids=str,
)
def test_without_fsdp_takes_away_fsdp_alone(spec, left):
    assert tuple(without_fsdp(spec)) == tuple(left)

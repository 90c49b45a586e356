import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharder.config import ParallelConfig
from sharder.ops.layout import SINGLE
from sharder.ops.summed import lookup, summed
from sharder.sharding.axes import AxisRules
from sharder.sharding.compute import ComputeLayout
from sharder.sharding.mesh import MeshShape, make_mesh
from sharder.sharding.plan import make_plan

V, D = 16, 8
IDS = np.random.default_rng(0).integers(0, V, (8, 6)).astype(np.int32)
TABLE = np.random.default_rng(1).standard_normal((V, D)).astype(np.float32)


def divided(tensor=("vocab",)) -> ComputeLayout:
    plan = make_plan(
        {},
        AxisRules(names=frozenset({"vocab", "embed"}), tensor=tensor, storage=("vocab",)),
        ParallelConfig(),
        MeshShape(2, 2, 2),
    )
    return ComputeLayout(make_mesh(MeshShape(2, 2, 2)), plan, "update")


LAYOUTS = {"one device": lambda: SINGLE, "replicas": lambda: divided(()), "vocabulary-parallel": divided}


def rows(table, layout):
    return lookup(summed(table, ("vocab", "embed"), layout), IDS, layout)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_and_their_gradients_are_those_of_indexing(name, strict_promotion):
    layout, weights = LAYOUTS[name](), np.random.default_rng(2).random((8, 6, D), np.float32)
    np.testing.assert_array_equal(jax.jit(lambda t: rows(t, layout))(TABLE), TABLE[IDS])
    found = jax.jit(jax.grad(lambda t: (rows(t, layout) * weights).sum()))(TABLE)
    np.testing.assert_allclose(found, jax.grad(lambda t: (t[IDS] * weights).sum())(TABLE), rtol=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_table_used_twice_has_the_sum_of_both_gradients(name):
    layout = LAYOUTS[name]()

    def twice(t):
        table = summed(t, ("vocab", "embed"), layout)
        return (lookup(table, IDS, layout) ** 2).sum() + 3 * (lookup(table.T.T, IDS[:4], layout)).sum() + (table.value**2).sum()

    plain = lambda t: (t[IDS] ** 2).sum() + 3 * t[IDS[:4]].sum() + (t**2).sum()  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(twice))(TABLE), jax.grad(plain)(TABLE), rtol=1e-5)


def test_gradients_of_a_bfloat16_table_are_summed_in_float32():
    # bfloat16 has no 257 .. 299: adding ones one by one stays at 256.
    ids = jnp.zeros((1, 300), jnp.int32)
    table = jnp.zeros((2, 3), jnp.bfloat16)
    found = jax.grad(lambda t: lookup(summed(t, ("vocab", "embed"), SINGLE), ids, SINGLE).astype(jnp.float32).sum())(table)
    assert found.dtype == jnp.bfloat16 and found[0].tolist() == [300.0] * 3


def test_two_uses_are_summed_over_replicas_once():
    layout = divided(())

    def twice(t, x):
        table = summed(t, ("vocab", "embed"), layout)
        return (lookup(table, IDS, layout) * x).sum() + (lookup(table, IDS[::-1], layout) * x).sum()

    x = layout.activation(jnp.ones((8, 6, D), jnp.bfloat16), ("batch", "seq", "embed"))
    text = jax.jit(jax.grad(twice)).lower(jnp.asarray(TABLE, jnp.bfloat16), x).compile().as_text()
    assert sum(" all-reduce(" in line for line in text.splitlines()) == 1

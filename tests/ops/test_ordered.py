"""Order-fixed sums: against exact rational arithmetic rounded at every addition, and over every factorisation of the mesh."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from sharder.ops.ordered import (
    LANES,
    Chunking,
    TreeAccumulator,
    chunk_rows,
    filled_pairwise_sum,
    lane_squares,
    num_chunks,
    ordered_sum,
    ordered_sums_of_squares,
    pairwise_sum,
)  # fmt: skip

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (8, 1), (1, 8)]


def terms(n, shape, seed):
    """Numbers of very different sizes, so that the order of additions shows in nearly every sum."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, *shape)) * 10.0 ** rng.integers(-4, 4, (n, *shape))).astype(np.float32)


def rounded(x: Fraction) -> np.float32:
    """The float32 nearest to a rational number: exact in float64 first, since sums of two float32 need not fit it."""
    return np.float32(float(x)) if Fraction(float(x)) == x else np.float32(x)


def tree(values: list[np.float32]) -> np.float32:
    """The balanced tree over adjacent pairs, every addition exact and then rounded once."""
    while len(values) > 1:
        values = [rounded(Fraction(float(a)) + Fraction(float(b))) for a, b in zip(values[0::2], values[1::2])]
    return values[0]


def mesh_of(data, fsdp):
    devices = np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp, 1)
    return Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_pairwise_sum_is_the_tree_in_rational_arithmetic(n):
    x = terms(n, (40,), n)
    expected = [tree(list(x[:, i])) for i in range(40)]
    assert np.asarray(jax.jit(pairwise_sum)(x)).tolist() == np.array(expected).tolist()


def test_another_order_would_be_seen():
    x = terms(8, (40,), 0)
    forward = np.array([np.cumsum(x[:, i], dtype=np.float32)[-1] for i in range(40)])
    assert (forward != np.asarray(pairwise_sum(jnp.asarray(x)))).any()


@pytest.mark.parametrize("slot_size", [1, 2, 4, 8])
def test_slots_continue_the_tree_of_their_members(slot_size):
    """Eight workers, one after the other or many at once."""
    x = terms(8, (64,), 1)
    accumulator = TreeAccumulator(lambda a, b: a + b)
    for slot in x.reshape(-1, slot_size, 64):
        accumulator.push(pairwise_sum(jnp.asarray(slot)))
        assert len(accumulator._blocks) <= 1 + np.log2(8 // slot_size)
    assert np.array_equal(accumulator.total(), pairwise_sum(jnp.asarray(x)))


@pytest.mark.parametrize("data, fsdp", MESHES)
@pytest.mark.parametrize("shape, dim", [((16, 6), 0), ((3, 16, 5), 1), ((3, 16), 1), ((7, 3), None), ((5,), None)])
@pytest.mark.parametrize("divided", [False, True])
def test_ordered_sum_over_every_factorisation(data, fsdp, shape, dim, divided):
    if divided and dim is None:
        return
    n = data * fsdp
    x = terms(8, shape, 2)
    mesh = mesh_of(data, fsdp)
    out = [None] * len(shape)
    if divided:
        out[dim] = "fsdp"

    def reduce(stacked):
        return ordered_sum(stacked[0], dim, data, fsdp, divided)

    program = jax.jit(jax.shard_map(
        reduce, mesh=mesh, in_specs=PartitionSpec(("data", "fsdp")), out_specs=PartitionSpec(*out),
        axis_names={"data", "fsdp", "tensor"}, check_vma=False,
    ))  # fmt: skip
    accumulator = TreeAccumulator(lambda a, b: np.asarray(a) + np.asarray(b))
    for slot in range(8 // n):
        accumulator.push(program(x[slot * n : (slot + 1) * n]))
    assert np.array_equal(accumulator.total(), pairwise_sum(jnp.asarray(x)))


@pytest.mark.parametrize("k, m", [(1, 5), (1, LANES + 1), (3, 2 * LANES), (8, 700)])
def test_lanes_add_up_to_the_sum_of_squares(k, m):
    chunks = terms(k, (m,), 3)
    lanes = np.asarray(jax.jit(lane_squares)(chunks))
    np.testing.assert_allclose(lanes.astype(np.float64).sum(1), np.square(chunks.astype(np.float64)).sum(1), rtol=1e-5)


def test_lanes_of_a_row_do_not_depend_on_its_neighbours():
    chunks = terms(8, (3 * LANES + 17,), 4)
    together = np.asarray(jax.jit(lane_squares)(chunks))
    alone = np.concatenate([np.asarray(jax.jit(lane_squares)(chunks[i : i + 1])) for i in range(8)])
    assert np.array_equal(together, alone)


LEAVES = [((16, 30), 0), ((3, 8, 50), 1), ((24,), 0), ((5, 7), 0)]


@pytest.mark.parametrize("data, fsdp", MESHES)
def test_the_norm_has_the_same_bits_divided_or_whole(data, fsdp):
    leaves = [terms(1, shape, i)[0] for i, (shape, _) in enumerate(LEAVES)]
    whole = [Chunking(dim, num_chunks(shape[dim], 8), 1, 1) for shape, dim in LEAVES]
    reference = np.asarray(jax.jit(lambda *x: filled_pairwise_sum(ordered_sums_of_squares(x, whole)))(*leaves))
    exact = sum(np.square(x.astype(np.float64)).sum() for x in leaves)
    assert float(reference) == pytest.approx(exact, rel=1e-6)

    divided = [c if shape[dim] % fsdp else Chunking(dim, c.num_chunks, fsdp, 1) for c, (shape, dim) in zip(whole, LEAVES)]
    specs = [
        PartitionSpec(*("fsdp" if i == c.dim and c.fsdp > 1 else None for i in range(x.ndim))) for c, x in zip(divided, leaves)
    ]
    program = jax.jit(jax.shard_map(
        lambda *x: filled_pairwise_sum(ordered_sums_of_squares(x, divided)), mesh=mesh_of(data, fsdp), in_specs=tuple(specs), out_specs=PartitionSpec(),
        axis_names={"data", "fsdp", "tensor"}, check_vma=False,
    ))  # fmt: skip
    assert np.array_equal(program(*leaves), reference)


def test_chunks_are_powers_of_two_that_divide():
    assert [num_chunks(size, 8) for size in (16, 12, 7, 8, 64)] == [8, 4, 1, 8, 8]
    x = np.arange(24).reshape(2, 6, 2)
    assert chunk_rows(x, 1, 3).tolist() == [x[:, 2 * i : 2 * i + 2].reshape(-1).tolist() for i in range(3)]


def test_filling_up_with_zeros_changes_no_bits():
    x = terms(5, (3,), 6)
    assert np.array_equal(
        filled_pairwise_sum(jnp.asarray(x[:, 0])), tree([*x[:, 0], np.float32(0), np.float32(0), np.float32(0)])
    )

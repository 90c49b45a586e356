import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharder.ops.block_float import Code, decode, encode

CODES = [Code(3, 4, signed=True), Code(4, 4, signed=False), Code(5, 11, signed=False)]
codes = pytest.mark.parametrize("code", CODES, ids=str)


def values(code: Code) -> np.ndarray:
    """What each code stands for, with the shared exponent 0, in float64."""
    field, mantissa = np.divmod(np.arange(code.largest + 1), 1 << code.mantissa_bits)
    return (mantissa / 2**code.mantissa_bits + (field > 0)) * 2.0 ** (np.maximum(field, 1) - code.top)


def drawn(code: Code, *shape: int) -> np.ndarray:
    """Numbers of 28 octaves, some of them 0, one block of nothing else."""
    rng = np.random.default_rng()
    x = (rng.standard_normal(shape) * np.exp2(rng.uniform(-25, 3, shape)) * (rng.random(shape) > 0.1)).astype(np.float32)
    x[0] = 0
    return x if code.signed else abs(x)


def there_and_back(x, dim, size, code):
    return jax.jit(lambda x: decode(*encode(x, dim, size, code), dim, size, code))(x)


@codes
@pytest.mark.parametrize("dim, size", [(1, 32), (2, 8), (2, 40)])
def test_every_element_becomes_the_nearest_value_of_its_block(code, dim, size):
    x = drawn(code, 5, 64, 40)
    blocks = np.moveaxis(x, dim, -1).reshape(-1, size).astype(np.float64)
    largest = abs(blocks).max(1, keepdims=True)
    unit = 2.0 ** np.floor(np.log2(np.where(largest > 0, largest, 1)))
    table, relative = values(code), abs(blocks) / unit
    above = np.searchsorted(table, relative)
    near = np.stack([table[np.maximum(above - 1, 0)], table[np.minimum(above, code.largest)]])
    distance = abs(near - relative)
    tie, nearest = distance[0] == distance[1], np.where(distance[0] < distance[1], *near)
    even = np.where(above % 2, near[0], near[1])  # of two neighbours, the one with an even code
    expected = np.where(tie & (near[0] != near[1]), even, nearest)
    if not code.signed:
        expected = np.where((relative > 0) & (expected == 0), table[1], expected)
    found = np.moveaxis(np.asarray(there_and_back(x, dim, size, code)), dim, -1).reshape(-1, size)
    assert np.array_equal(found, np.sign(blocks) * expected * unit)


@codes
def test_ties_go_to_the_even_code(code):
    """Halfway between all neighbours, in a block that the largest code shares."""
    table = values(code)
    halves = (table[1:-1] + table[2:]) / 2  # exact in float32
    x = np.stack([halves, np.full(len(halves), table[-1])], 1).astype(np.float32)
    found = np.asarray(there_and_back(x, 1, 2, code))[:, 0]
    assert np.array_equal(np.searchsorted(table, found) % 2, np.zeros(len(halves)))


@codes
def test_what_was_encoded_is_encoded_again_without_loss(code):
    x = np.asarray(there_and_back(drawn(code, 3, 64), 1, 32, code))
    assert np.array_equal(there_and_back(x, 1, 32, code), x)


@codes
def test_bytes_are_those_of_the_code(code):
    kept, exponents = encode(jnp.ones((2, 64, 3)), 1, 32, code)
    assert (kept.dtype.itemsize * 8, kept.shape) == (code.signed + code.exponent_bits + code.mantissa_bits, (2, 64, 3))
    assert (exponents.dtype, exponents.shape) == (jnp.uint8, (2, 2, 3))


@codes
def test_a_block_of_the_largest_and_of_the_smallest_numbers_stays_finite(code):
    for scale in (3e38, 1e-37, 1e-44):
        found = np.asarray(there_and_back(np.float32([[scale, scale / 2, 0, 0]]), 1, 4, code))
        assert np.isfinite(found).all() and (found >= 0).all() and not found[0, 2:].any()

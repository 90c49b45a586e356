import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharder.ops.linear import linear

pytestmark = pytest.mark.usefixtures("strict_promotion")

# Leading dimensions, contracted dimensions, output dimensions.
SHAPES = [((), (5,), (3,)), ((4,), (5,), (3,)), ((2, 3), (5,), (2, 3, 4)), ((2, 3), (4, 5), (6,)), ((2, 1, 3), (2, 2, 2), ())]


def draw(lead, contracted, out, seed: int = 0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((*lead, *contracted)), rng.standard_normal((*contracted, *out))


def reference(x, weight, num_contracted: int) -> np.ndarray:
    lead, size = x.shape[: x.ndim - num_contracted], int(np.prod(weight.shape[:num_contracted]))
    return (x.reshape(-1, size) @ weight.reshape(size, -1)).reshape(*lead, *weight.shape[num_contracted:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_is_the_matrix_product(shape):
    x, weight = draw(*shape)
    found = linear(jnp.float32(x), jnp.float32(weight), num_contracted=len(shape[1]))
    np.testing.assert_allclose(found, reference(x, weight, len(shape[1])), atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_those_of_the_matrix_product(shape):
    x, weight = draw(*shape)
    cotangent = np.random.default_rng(1).standard_normal((*shape[0], *shape[2]))
    product = lambda *args: linear(*args, num_contracted=len(shape[1]))  # noqa: E731
    found_x, found_weight = jax.vjp(product, jnp.float32(x), jnp.float32(weight))[1](jnp.float32(cotangent))
    size = int(np.prod(shape[1]))
    flat_x, flat_weight, flat = x.reshape(-1, size), weight.reshape(size, -1), cotangent.reshape(int(np.prod(shape[0])), -1)
    np.testing.assert_allclose(found_x, (flat @ flat_weight.T).reshape(x.shape), atol=1e-5)
    np.testing.assert_allclose(found_weight, (flat_x.T @ flat).reshape(weight.shape), atol=1e-5)


def test_the_result_has_the_inputs_dtype():
    assert linear(jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)).dtype == jnp.bfloat16


def test_sums_in_float32_of_bfloat16_inputs_are_exact():
    # 256 + 1 has no bfloat16.
    x = jnp.array([[256.0, 1.0]], jnp.bfloat16)
    found = linear(x, jnp.ones((2, 1), jnp.bfloat16), dtype=jnp.float32)
    assert found.dtype == jnp.float32 and found.tolist() == [[257.0]]

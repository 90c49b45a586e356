import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharder.ops.linear import add_bias, linear

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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_a_bfloat16_product_are_those_of_float32(shape):
    x, weight = (jnp.bfloat16(a) for a in draw(*shape))
    cotangent = jnp.bfloat16(np.random.default_rng(1).standard_normal((*shape[0], *shape[2])))
    product = lambda *args: linear(*args, num_contracted=len(shape[1]))  # noqa: E731
    wide = [a.astype(jnp.float32) for a in (x, weight, cotangent)]
    for found, expected in zip(jax.vjp(product, x, weight)[1](cotangent), jax.vjp(product, *wide[:2])[1](wide[2])):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=1e-2, atol=1e-2)


def test_gradients_of_bfloat16_weights_and_biases_are_summed_in_float32():
    x = jnp.ones((4, 3), jnp.bfloat16)
    backward = jax.make_jaxpr(lambda x, w, g: jax.vjp(linear, x, w)[1](g)[1])(
        x, jnp.ones((3, 5), jnp.bfloat16), jnp.ones((4, 5), jnp.bfloat16)
    )
    assert [str(e.outvars[0].aval.dtype) for e in backward.eqns if e.primitive.name == "dot_general"][-1] == "float32"
    # bfloat16 has no 257 .. 299: adding ones one by one stays at 256.
    found = jax.grad(lambda b: add_bias(jnp.zeros((300, 2), jnp.bfloat16), b).astype(jnp.float32).sum())(
        jnp.zeros(2, jnp.bfloat16)
    )
    assert found.dtype == jnp.bfloat16 and found.tolist() == [300.0, 300.0]


@pytest.mark.parametrize("shape", [(5,), (3, 5), (1, 3, 5), (1, 5)])
def test_a_bias_may_lack_dimensions_or_repeat_one(shape):
    x, bias = jnp.ones((2, 3, 5)), jnp.ones(shape)
    found = jax.grad(lambda b: (add_bias(x, b) * jnp.arange(5.0)).sum())(bias)
    np.testing.assert_allclose(found, jax.grad(lambda b: ((x + b) * jnp.arange(5.0)).sum())(bias))

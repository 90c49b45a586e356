import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharder.ops.attention import attention, causal_mask

pytestmark = pytest.mark.usefixtures("strict_promotion")

# B, T, S, N, K, H
SHAPES = [(2, 5, 5, 4, 4, 8), (1, 3, 7, 6, 2, 5), (3, 1, 4, 4, 1, 3), (2, 4, 1, 1, 1, 1)]


def draw(shape, seed: int = 0):
    """q, k, v, float64, and a mask with at least one key for every query."""
    B, T, S, N, K, H = shape
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((B, T, N, H)), rng.standard_normal((B, S, K, H)), rng.standard_normal((B, S, K, H))
    mask = rng.random((B, T, S)) < 0.6
    mask[..., 0] = True
    return q, k, v, mask


def reference(q, k, v, mask, scale: float) -> np.ndarray:
    """Attention one head at a time, float64."""
    group, out = q.shape[2] // k.shape[2], np.zeros(q.shape)
    for b in range(q.shape[0]):
        for n in range(q.shape[2]):
            scores = np.where(mask[b], q[b, :, n] @ k[b, :, n // group].T * scale, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[b, :, n] = weights / weights.sum(-1, keepdims=True) @ v[b, :, n // group]
    return out


def float32(*arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_the_textbook_formula(shape):
    q, k, v, mask = draw(shape, seed=sum(shape))
    found = attention(*float32(q, k, v), jnp.asarray(mask), scale=0.3)
    np.testing.assert_allclose(found, reference(q, k, v, mask, 0.3), atol=2e-6)


def test_one_mask_serves_all_rows_of_a_batch():
    q, k, v, mask = draw(SHAPES[0])
    found = attention(*float32(q, k, v), jnp.asarray(mask[:1]), scale=1.0)
    np.testing.assert_allclose(found, reference(q, k, v, np.broadcast_to(mask[:1], mask.shape), 1.0), atol=2e-6)


def test_bfloat16_is_computed_with_a_float32_softmax():
    q, k, v, mask = draw((1, 4, 64, 2, 2, 16))
    inputs = [x.astype(jnp.bfloat16) for x in float32(q, k, v)]
    found = attention(*inputs, jnp.asarray(mask), scale=1.0)
    expected = reference(*(np.asarray(x, np.float64) for x in inputs), mask, 1.0)
    # bfloat16 weights and result alone: 2**-8 of values of about 1.
    assert found.dtype == jnp.bfloat16 and np.abs(np.asarray(found, np.float64) - expected).max() < 2**-7


def test_a_fully_masked_row_is_the_mean_of_the_values():
    q, k, v, mask = draw(SHAPES[0])
    mask[1, 2] = False
    found = attention(*float32(q, k, v), jnp.asarray(mask), scale=1.0)
    np.testing.assert_allclose(found[1, 2], v[1].mean(0), atol=1e-6)


def test_gradients_of_a_fully_masked_row_are_finite():
    q, k, v, mask = draw(SHAPES[0])
    mask[1, 2] = False
    loss = lambda *x: jnp.square(attention(*x, jnp.asarray(mask), scale=1.0)).sum()  # noqa: E731
    assert all(jnp.isfinite(g).all() for g in jax.grad(loss, (0, 1, 2))(*float32(q, k, v)))


def test_masked_keys_and_values_count_for_nothing():
    q, k, v, mask = draw(SHAPES[1])
    mask[..., 4] = False
    other_k, other_v = k.copy(), v.copy()
    other_k[:, 4], other_v[:, 4] = 1e3, -1e3
    found = [attention(*float32(q, *kv), jnp.asarray(mask), scale=1.0) for kv in ((k, v), (other_k, other_v))]
    assert np.array_equal(*found)


@pytest.mark.parametrize("argument", range(3), ids=["queries", "keys", "values"])
def test_gradients_are_the_slopes_of_the_reference(argument):
    shape = (2, 3, 4, 4, 2, 5)
    *inputs, mask = draw(shape)
    rng = np.random.default_rng(1)
    direction, weight = rng.standard_normal(inputs[argument].shape), rng.standard_normal(inputs[0].shape)

    def slope(step: float) -> float:
        ends = []
        for sign in (1, -1):
            moved = [x + sign * step * direction if i == argument else x for i, x in enumerate(inputs)]
            ends.append((reference(*moved, mask, 0.7) * weight).sum())
        return (ends[0] - ends[1]) / (2 * step)

    loss = lambda *x: (attention(*x, jnp.asarray(mask), scale=0.7) * jnp.float32(weight)).sum()  # noqa: E731
    gradient = jax.grad(loss, argument)(*float32(*inputs))
    assert (np.asarray(gradient) * direction).sum() == pytest.approx(slope(1e-5), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 3), (2, 4)])
def test_heads_that_cannot_be_shared_are_refused_with_both_numbers(num_heads, num_kv_heads):
    q, k, v, mask = draw((1, 2, 2, num_heads, num_kv_heads, 4))
    with pytest.raises(ValueError, match=f"{num_heads} query heads cannot be shared by {num_kv_heads} key-value heads"):
        attention(*float32(q, k, v), jnp.asarray(mask), scale=1.0)


@pytest.mark.parametrize("num_queries, num_keys", [(4, 4), (2, 5), (1, 3)])
def test_a_query_sees_no_later_key_and_the_last_sees_all(num_queries, num_keys):
    behind = num_keys - num_queries
    expected = [[key <= query + behind for key in range(num_keys)] for query in range(num_queries)]
    assert causal_mask(num_queries, num_keys).tolist() == [expected]

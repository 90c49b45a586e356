from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharder.config import UserError
from sharder.ops import chunked_attention as chunked
from sharder.ops.attention import attention
from sharder.ops.attention_backends import BACKENDS, Call, attend, choose, limit

# B, T, S, N, K, H: one tile, odd lengths over several tiles, grouped heads, one key-value head, a cache longer than the queries.
SHAPES = [(2, 5, 5, 4, 4, 8), (1, 17, 23, 6, 2, 4), (2, 9, 31, 4, 1, 6), (1, 1, 19, 2, 2, 2), (3, 21, 7, 2, 1, 4)]
OTHERS = ["xla", "chunked"]
SCALE = 0.3


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(chunked, "QUERY_TILE", 8)
    monkeypatch.setattr(chunked, "KEY_TILE", 8)


def draw(shape, seed: int = 0):
    """q, k, v float32, a mask with rows without any key and stretches of keys that no query sees, and a direction."""
    B, T, S, N, K, H = shape
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((B, T, N, H), (B, S, K, H), (B, S, K, H)))
    mask = rng.random((B, T, S)) < 0.6
    mask[:, :, S // 2 : S // 2 + 2] = False
    mask[0, T // 2] = False
    return q, k, v, mask, rng.standard_normal((B, T, N, H)).astype(np.float32)


def value_and_gradients(function, q, k, v, mask, direction):
    def loss(q, k, v):
        out = function(q, k, v, mask, scale=SCALE)
        return (out * direction).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return out, *grads


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_reference(name, shape):
    inputs = draw(shape, sum(shape))
    for found, expected in zip(value_and_gradients(BACKENDS[name], *inputs), value_and_gradients(attention, *inputs)):
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_one_mask_serves_all_rows_of_a_batch(name):
    q, k, v, mask, direction = draw(SHAPES[2])
    found = value_and_gradients(BACKENDS[name], q, k, v, mask[:1], direction)
    expected = value_and_gradients(attention, q, k, v, mask[:1], direction)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_bfloat16_is_as_close_as_its_rounding(name):
    q, k, v, mask, _ = draw(SHAPES[1])
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    found, expected = (f(*narrow, mask, scale=SCALE).astype(jnp.float32) for f in (BACKENDS[name], attention))
    assert np.abs(found - expected).max() < 2**-6


@cache
def scratch_bytes(name: str, length: int) -> int:
    """Of forward and backward of one call of pi0's shape, one example."""
    q, kv, mask = (
        jax.ShapeDtypeStruct(s, t)
        for s, t in (((1, length, 8, 64), jnp.float32), ((1, length, 1, 64), jnp.float32), ((1, length, length), bool))
    )
    loss = lambda q, k, v, mask: BACKENDS[name](q, k, v, mask, scale=SCALE).sum()  # noqa: E731
    program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, kv, kv, mask).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_chunked_scratch_grows_by_no_more_than_what_every_token_needs(monkeypatch):
    monkeypatch.setattr(chunked, "QUERY_TILE", 256)
    monkeypatch.setattr(chunked, "KEY_TILE", 512)
    sizes = {length: scratch_bytes("chunked", length) for length in (866, 2048, 4096)}
    # Per token: queries' output and gradient (8 x 64), keys' and values' gradients, maxima and sums, in float32, twice over for copies.
    per_token = 2 * 4 * (2 * 8 * 64 + 4 * 64 + 3 * 8)
    for length in (2048, 4096):
        assert sizes[length] - sizes[866] <= per_token * (length - 866), sizes
    assert sizes[4096] < 8 * 4096 * 4096 * 4 / 8, sizes


def test_cudnn_says_which_limit_and_what_instead():
    q, k, v, mask, _ = draw(SHAPES[0])
    with pytest.raises(
        UserError,
        match="cudnn, which cannot serve this call: it runs on NVIDIA GPUs, and this is cpu. auto would take reference",
    ):
        attend("cudnn", q, k, v, mask, scale=SCALE)


GPU = dict(batch=1, queries=867, keys=867, heads=8, kv_heads=1, dtype="bfloat16", platform="gpu")


@pytest.mark.parametrize(
    "head_dim, capability, served",
    [(256, 9.0, True), (256, 8.0, False), (128, 8.0, True), (264, 9.0, False), (100, 9.0, False)],
)
def test_cudnn_serves_head_dimensions_by_generation(head_dim, capability, served):
    assert (limit("cudnn", Call(**GPU, head_dim=head_dim, compute_capability=capability)) is None) == served


def test_auto_keeps_no_scores_that_are_too_large():
    call = Call(64, 2048, 2048, 8, 1, 256, "float32", "cpu")
    name, reason = choose(call)
    assert name == "chunked" and "scores would take 8192 MiB" in reason


def test_auto_is_the_reference_where_scores_are_small():
    assert choose(Call(4, 30, 30, 8, 1, 16, "float32", "cpu"))[0] == "reference"

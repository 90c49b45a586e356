import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sharder.config import ParallelConfig
from sharder.ops.attention import MASKED
from sharder.ops.cross_entropy import chunk_size, cross_entropy
from sharder.ops.layout import SINGLE
from sharder.ops.summed import summed
from sharder.sharding.axes import AxisRules
from sharder.sharding.compute import ComputeLayout
from sharder.sharding.mesh import MeshShape, make_mesh
from sharder.sharding.plan import make_plan

B, T, D, V, VALID = 8, 24, 16, 24, 20
RNG = np.random.default_rng(0)
X, OUT = RNG.standard_normal((B, T, D)).astype(np.float32), RNG.standard_normal((D, V)).astype(np.float32)
TARGETS, SCALES = RNG.integers(0, VALID, (B, T)).astype(np.int32), RNG.random((B, T)).astype(np.float32)


def reference(x, out):
    """In float64, all logits at once."""
    logits = np.asarray(x, np.float64) @ np.asarray(out, np.float64)[:, :VALID]
    largest = logits.max(-1, keepdims=True)
    return (np.log(np.exp(logits - largest).sum(-1)) + largest[..., 0]) - np.take_along_axis(logits, TARGETS[..., None], -1)[
        ..., 0
    ]


def losses(x, out, targets, num_valid, layout):
    return cross_entropy(x, summed(out, ("embed", "vocab"), layout), targets, num_valid, layout)


def plain(x, out):
    logits = jnp.where(jnp.arange(V) < VALID, x @ out, MASKED)
    return optax.softmax_cross_entropy_with_integer_labels(logits, TARGETS)


def vocabulary_parallel(shape: MeshShape = MeshShape(2, 2, 2)) -> ComputeLayout:
    plan = make_plan({}, AxisRules(names=frozenset({"vocab", "embed"}), tensor=("vocab",)), ParallelConfig(), shape)
    return ComputeLayout(make_mesh(shape), plan, "update")


LAYOUTS = {"one device": lambda: SINGLE, "vocabulary-parallel": vocabulary_parallel}


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_those_of_all_logits_at_once(name, strict_promotion):
    found = jax.jit(lambda x, out: losses(x, out, TARGETS, VALID, LAYOUTS[name]()))(X, OUT)
    np.testing.assert_allclose(found, reference(X, OUT), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("of", [0, 1], ids=["input", "weights"])
def test_gradients_are_those_of_all_logits_at_once(name, of, strict_promotion):
    ours = lambda *a: (losses(*a, TARGETS, VALID, LAYOUTS[name]()) * SCALES).sum()  # noqa: E731
    found, expected = (jax.jit(jax.grad(f, of))(X, OUT) for f in (ours, lambda *a: (plain(*a) * SCALES).sum()))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "tokens, vocab, size", [(128, 256, 16), (1024, 50432, 64), (1024, 1 << 23, 1), (3, 256, 1), (6, 256, 1), (24, 8, 3)]
)
def test_a_chunk_divides_the_sequence_and_is_bounded(tokens, vocab, size):
    assert chunk_size(tokens, vocab) == size


def scratch_bytes(loss, shape) -> int:
    x, out, targets = shape
    return jax.jit(jax.grad(loss, (0, 1))).lower(x, out, targets).compile().memory_analysis().temp_size_in_bytes


LARGE = (
    jax.ShapeDtypeStruct((4, 256, 32), jnp.float32), jax.ShapeDtypeStruct((32, 8192), jnp.float32), jax.ShapeDtypeStruct((4, 256), jnp.int32),
)  # fmt: skip
ALL_LOGITS = 4 * 256 * 8192 * 4


def test_scratch_memory_has_no_room_for_all_logits():
    assert scratch_bytes(lambda x, out, t: losses(x, out, t, 8192, SINGLE).sum(), LARGE) < 0.5 * ALL_LOGITS


def test_all_logits_would_be_seen():
    def loss(x, out, t):
        return optax.softmax_cross_entropy_with_integer_labels(x @ out, t).sum()

    assert scratch_bytes(loss, LARGE) >= ALL_LOGITS


def compiled_text(layout) -> str:
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (X, OUT, TARGETS))
    loss = lambda x, out, t: losses(x, out, t, VALID, layout).sum()  # noqa: E731
    return jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile().as_text()


def test_where_the_vocabulary_is_divided_no_device_has_all_logits_of_a_chunk():
    rows, chunk = B // 4, chunk_size(T, V)
    text = compiled_text(vocabulary_parallel())
    assert f"f32[{rows},{chunk},{V // 2}]" in text or f"f32[1,{rows},{chunk},{V // 2}]" in text
    assert f"f32[{rows},{chunk},{V}]" not in text and f"f32[1,{rows},{chunk},{V}]" not in text


def test_the_gradient_of_the_weights_is_summed_over_replicas_once_and_not_in_every_chunk():
    text = compiled_text(vocabulary_parallel(MeshShape(1, 8, 1)))
    loops = text.split("ENTRY")[0]
    assert "all-reduce" in text.split("ENTRY")[1] and "all-reduce" not in loops.replace("to_apply", "")

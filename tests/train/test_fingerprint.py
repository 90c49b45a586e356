import hashlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharder.sharding.mesh import MeshShape, make_mesh
from sharder.train.fingerprint import combine, digests, hex_digest, leaf_digest, numpy_digest, numpy_fingerprint, rows_digest

pytestmark = pytest.mark.usefixtures("strict_promotion")

device_digest = jax.jit(leaf_digest, static_argnums=0)
PATH = "params/blocks/q"


def random_array(dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bits, so also infinities and NaNs."""
    if dtype == np.bool_:
        return np.random.default_rng(seed).integers(0, 2, shape).astype(bool)
    size = np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, (*shape, size), np.uint8).view(dtype).reshape(shape)


def slow_digest(path: str, words: list[list[int]]) -> list[int]:
    """The algorithm in Python integers: api_notes d, and the finaliser of MurmurHash3 as A. Appleby gives it."""
    salt = sum(byte << 8 * k for k, byte in enumerate(hashlib.sha256(path.encode()).digest()[:4]))
    low = high = 0
    for i, element in enumerate(words):
        h = salt
        for word in element:
            h ^= (word + i * 0x9E3779B9) & 0xFFFFFFFF
            h ^= h >> 16
            h = h * 0x85EBCA6B & 0xFFFFFFFF
            h ^= h >> 13
            h = h * 0xC2B2AE35 & 0xFFFFFFFF
            h ^= h >> 16
        low += h
        high += h * (i * 0x85EBCA77 & 0xFFFFFFFF | 1)
    return [low & 0xFFFFFFFF, high & 0xFFFFFFFF]


@given(hnp.arrays(np.uint8, st.integers(0, 40)), st.text(max_size=8))
def test_bytes_digest_as_the_slow_algorithm_says(x, path):
    assert numpy_digest(path, x).tolist() == slow_digest(path, [[int(b)] for b in x])


@given(hnp.arrays(np.uint32, st.integers(0, 40)), st.sampled_from([np.uint32, np.int32, np.float32]))
def test_words_digest_as_the_slow_algorithm_says(x, dtype):
    assert numpy_digest(PATH, x.view(dtype)).tolist() == slow_digest(PATH, [[int(w)] for w in x])


@given(hnp.arrays(np.uint64, st.integers(0, 20)))
def test_doubles_digest_low_word_first_as_the_slow_algorithm_says(x):
    assert numpy_digest(PATH, x.view(np.float64)).tolist() == slow_digest(PATH, [[int(w) % 2**32, int(w) >> 32] for w in x])


DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.uint32, np.int8, np.bool_]
SHAPES = [(), (1,), (7,), (0,), (3, 0, 2), (5, 1, 6), (2, 3, 4, 5)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
def test_devices_agree_with_numpy_for_every_dtype(dtype):
    x = random_array(dtype, (5, 7))
    assert np.array_equal(device_digest(PATH, x), numpy_digest(PATH, x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_devices_agree_with_numpy_for_every_shape(shape):
    x = random_array(np.float32, shape)
    assert np.array_equal(device_digest(PATH, x), numpy_digest(PATH, x))


@settings(max_examples=8)
@given(st.lists(st.integers(0, 9), max_size=4), st.integers(0, 99))
def test_devices_agree_with_numpy_for_random_shapes(shape, seed):
    x = random_array(np.float32, tuple(shape), seed)
    assert np.array_equal(device_digest(PATH, x), numpy_digest(PATH, x))


def test_devices_agree_with_numpy_for_doubles():
    x = random_array(np.int64, (5, 3))
    with jax.enable_x64(True):
        assert np.array_equal(device_digest(PATH, x), numpy_digest(PATH, x))


SPECS = [P(), P("fsdp"), P(None, "fsdp"), P(("data", "fsdp")), P("fsdp", "data"), P(None, ("data", "fsdp"))]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [MeshShape(1, 8, 1), MeshShape(2, 4, 1)], ids=str)
def test_sharding_does_not_change_the_digest(shape, spec):
    x = random_array(np.float32, (16, 24))
    sharded = jax.device_put(x, NamedSharding(make_mesh(shape), spec))
    assert np.array_equal(device_digest(PATH, sharded), numpy_digest(PATH, x))


@given(st.integers(0, 34), st.integers(0, 31))
def test_one_flipped_bit_is_seen(element, bit):
    x = random_array(np.uint32, (5, 7))
    flipped = x.copy()
    flipped.flat[element] ^= np.uint32(1 << bit)
    assert not np.array_equal(device_digest(PATH, x.view(np.float32)), device_digest(PATH, flipped.view(np.float32)))


@given(st.lists(st.integers(0, 34), min_size=2, max_size=2, unique=True))
def test_two_swapped_elements_are_seen(pair):
    x = random_array(np.float32, (5, 7))
    swapped = x.copy()
    swapped.flat[pair] = x.flat[pair[::-1]]
    assert not np.array_equal(device_digest(PATH, x), device_digest(PATH, swapped))


def test_swaps_are_seen_in_both_halves_of_the_digest():
    # With one half blind to it, 32 bits would be left.
    x = random_array(np.float32, (35,))
    assert (numpy_digest(PATH, x) != numpy_digest(PATH, x[::-1])).all()


def test_negative_zero_is_not_zero():
    assert not np.array_equal(device_digest(PATH, np.float32([0.0])), device_digest(PATH, np.float32([-0.0])))


def test_payload_of_a_nan_is_seen():
    nans = np.uint32([0x7FC00000, 0x7FC00001]).view(np.float32)
    assert not np.array_equal(device_digest(PATH, nans[:1]), device_digest(PATH, nans[1:]))


def test_two_swapped_leaves_are_seen():
    a, b = random_array(np.float32, (6,), 0), random_array(np.float32, (6,), 1)
    assert numpy_fingerprint({"a": a, "b": b}) != numpy_fingerprint({"a": b, "b": a})


def test_the_digest_of_a_leaf_depends_on_its_path():
    x = random_array(np.float32, (6,))
    assert not np.array_equal(device_digest("a", x), device_digest("b", x))


def test_the_fingerprint_names_its_leaves():
    # Empty leaves have digest 0 under any path.
    empty = np.zeros(0, np.float32)
    assert numpy_fingerprint({"a": empty}) != numpy_fingerprint({"b": empty})


def test_leaves_are_digested_in_the_order_of_their_paths():
    leaves = {path: random_array(np.float32, (4,), i) for i, path in enumerate(("b", "a/c", "a"))}
    found = np.asarray(jax.jit(digests)(leaves))
    assert np.array_equal(found, [numpy_digest(path, leaves[path]) for path in ("a", "a/c", "b")])


def test_paths_out_of_order_are_a_mistake():
    with pytest.raises(AssertionError):
        combine(np.zeros((2, 2), np.uint32), ["b", "a"])


def test_hex_digest_has_the_second_sum_first_and_all_zeros():
    assert hex_digest(np.uint32([0xAB, 0x1])) == "00000001000000ab"


def test_the_fingerprint_is_that_of_earlier_versions():
    # It stands in files of runs, so it may not change.
    assert numpy_fingerprint({"a": np.arange(6, dtype=np.float32), "b/c": np.array(True)}) == "16cc3dfba64d1985"


def scratch_bytes(f, x) -> int:
    return jax.jit(f).lower(x).compile().memory_analysis().temp_size_in_bytes


MEGABYTES = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)


def test_a_digest_needs_no_scratch_memory():
    assert scratch_bytes(lambda x: leaf_digest(PATH, x), MEGABYTES) < 4 * 2**20 / 100


def test_a_digest_of_shards_needs_no_scratch_memory():
    sharding = NamedSharding(make_mesh(MeshShape(2, 4, 1)), P("fsdp", "data"))
    sharded = jax.ShapeDtypeStruct(MEGABYTES.shape, jnp.bfloat16, sharding=sharding)
    assert scratch_bytes(lambda x: leaf_digest(PATH, x), sharded) < 2 * 2**20 / 8 / 10


def test_scratch_memory_would_be_seen():
    def two_sums(x):
        h = jax.lax.bitcast_convert_type(x, jnp.uint32) * jnp.uint32(0x85EBCA6B)
        h = h ^ (h >> jnp.uint32(16))
        return h.sum(), (h * jax.lax.broadcasted_iota(jnp.uint32, x.shape, 0)).sum()

    assert scratch_bytes(two_sums, MEGABYTES) >= 4 * 2**20


def test_a_digest_is_one_reduction():
    text = jax.jit(lambda x: leaf_digest(PATH, x)).lower(MEGABYTES).as_text()
    assert text.count("stablehlo.reduce(") == 1


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_digests_of_the_parts_of_a_batch_add_up_to_that_of_the_whole(num_parts):
    batch = {"inputs": random_array(np.int32, (8, 5)), "weights": random_array(np.float32, (8,), seed=1)}
    whole = sum(numpy_digest(name, x) for name, x in batch.items())
    size = 8 // num_parts
    parts = [rows_digest({k: jnp.asarray(x[i : i + size]) for k, x in batch.items()}, i) for i in range(0, 8, size)]
    assert np.array_equal(sum(parts), whole)
    reversed_rows = {k: jnp.asarray(x[::-1]) for k, x in batch.items()}
    assert not np.array_equal(rows_digest(reversed_rows, 0), whole), "the order counts"

"""Lesson 6. The same communication written by hand with shard_map, against what the compiler adds by itself.

`python docs/tutorial/06_shard_map_by_hand.py [--out DIR]`
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lesson import NUM_DEVICES, Lesson, heading, kinds, pyplot, run

REPLICATED = P()


def compile_with(function, mesh: Mesh, arrays: list, specs: tuple, out: P = REPLICATED):
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs)]
    program = jax.jit(function, out_shardings=NamedSharding(mesh, out)).lower(*placed).compile()
    return program, program(*placed)


def a_product(lesson: Lesson, mesh: Mesh) -> None:
    heading("A product with the rows of W divided, and its psum")
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((16, 1024), (1024, 1024)))
    specs = P(None, "shard"), P("shard", None)
    automatic, y = compile_with(jnp.dot, mesh, [x, w], specs)

    # Inside shard_map the function sees one device's part: x is (16, 128), w is (128, 1024), and `@` is that device's product
    # alone. Adding up is ours to write.
    def local(x, w):
        return jax.lax.psum(x @ w, "shard")

    by_hand, y_hand = compile_with(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()), mesh, [x, w], specs)
    lesson.close("psum_gives_the_product", y_hand, x @ w)
    lesson.check("by_hand_equals_automatic", bool((y == y_hand).all()), "the same bits")
    lesson.check("same_collective", kinds(by_hand) == kinds(automatic) == {"all-reduce": 1}, f"{kinds(by_hand)}")

    # Without the psum, out_specs P() would claim that eight different partial products are one array. JAX sees that and
    # refuses...
    forgetful = partial(jax.shard_map, lambda x, w: x @ w, mesh=mesh, in_specs=specs, out_specs=P())
    lesson.refused(
        "forgotten_psum_is_refused", lambda: compile_with(forgetful(check_vma=True), mesh, [x, w], specs), "replicat"
    )
    # ...unless the check is switched off. Then the answer is that of whichever device is asked.
    _, wrong = compile_with(forgetful(check_vma=False), mesh, [x, w], specs)
    parts = [np.asarray(s.data) for s in wrong.addressable_shards]
    differ = sum(not np.array_equal(parts[0], p) for p in parts)
    lesson.check("unchecked_replicas_differ", differ == NUM_DEVICES - 1, f"{differ} of 8 copies differ from the first")
    lesson.close("unchecked_copies_are_the_terms", jnp.asarray(sum(parts)), x @ w)


def loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.square(jnp.tanh(x @ w) - y).mean()


def local_gradient(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Of this device's examples only: `pcast` makes w a copy of its own, else the backward pass would add up over devices."""
    return jax.grad(loss)(jax.lax.pcast(w, "shard", to="varying"), x, y)


def gradients(lesson: Lesson, mesh: Mesh) -> dict[str, float]:
    heading("Data parallelism by hand: pmean of gradients")
    random = np.random.default_rng(1)
    arrays = [jnp.asarray(random.normal(size=s), jnp.float32) for s in ((32, 4), (64, 32), (64, 4))]
    specs = P(), P("shard"), P("shard")
    automatic, expected = compile_with(jax.grad(loss), mesh, arrays, specs)
    lesson.close("automatic_gradient_matches_single_device", expected, jax.grad(loss)(*arrays))

    # Equal parts of a batch: the mean of the parts' means is the mean of all.
    def mean_of_parts(w, x, y):
        return jax.lax.pmean(local_gradient(w, x, y), "shard")

    by_hand, found = compile_with(jax.shard_map(mean_of_parts, mesh=mesh, in_specs=specs, out_specs=P()), mesh, arrays, specs)
    lesson.close("pmean_equals_the_compilers_gradient", found, expected, 1e-6)
    lesson.check("both_need_one_all_reduce", kinds(by_hand) == kinds(automatic) == {"all-reduce": 1}, f"{kinds(by_hand)}")

    # The parts themselves, one below the other: stacked by out_specs instead of averaged.
    stacked = jax.shard_map(lambda *a: local_gradient(*a)[None], mesh=mesh, in_specs=specs, out_specs=P("shard"))
    silent, parts = compile_with(stacked, mesh, arrays, specs, P("shard"))
    lesson.check("parts_need_no_communication", kinds(silent) == {}, f"{kinds(silent)}; eight gradients {parts.shape}")
    lesson.close("mean_of_stacked_parts", parts.mean(0), expected, 1e-6)
    apart = [float(jnp.linalg.norm(p - expected) / jnp.linalg.norm(expected)) for p in parts]
    lesson.check(
        "parts_differ_from_the_mean", min(apart) > 0.1, f"each is off by {min(apart):.2f} to {max(apart):.2f} of its norm"
    )

    # The trap. Without pcast the gradient of a w that all devices share is already the sum over devices - the derivative of
    # "everybody uses w" is "add up what everybody says" - and pmean of eight equal sums is that sum: eight times too large.
    def too_large(w, x, y):
        return jax.lax.pmean(jax.grad(loss)(w, x, y), "shard")

    _, found = compile_with(jax.shard_map(too_large, mesh=mesh, in_specs=specs, out_specs=P()), mesh, arrays, specs)
    lesson.close("without_pcast_eight_times_too_large", found, NUM_DEVICES * expected, 1e-6)
    return {"parts": apart, "pmean": float(jnp.linalg.norm(parts.mean(0) - expected) / jnp.linalg.norm(expected))}


def a_scatter(lesson: Lesson, mesh: Mesh) -> None:
    heading("What only the hand can ask for here: reduce-scatter")
    # Each device needs an eighth of the summed result. An all-reduce and a slice receive twice the bytes: the sum goes round
    # once to be made and once to be told to everybody. In lesson 7 the compiler for CPUs does just that; by hand it is a word.
    terms = jnp.asarray(np.random.default_rng(2).normal(size=(NUM_DEVICES, 1024)), jnp.float32)
    scatter = lambda t: jax.lax.psum_scatter(t[0], "shard", scatter_dimension=0, tiled=True)  # noqa: E731
    specs = (P("shard", None),)
    program, found = compile_with(
        jax.shard_map(scatter, mesh=mesh, in_specs=specs, out_specs=P("shard")), mesh, [terms], specs, P("shard")
    )
    lesson.check("psum_scatter_is_a_reduce_scatter", kinds(program) == {"reduce-scatter": 1}, f"{kinds(program)}")
    lesson.close("scattered_sum_is_the_sum", found, terms.sum(0))


def teach(lesson: Lesson) -> pyplot.Figure:
    mesh = jax.make_mesh((NUM_DEVICES,), ("shard",), axis_types=(AxisType.Auto,))
    a_product(lesson, mesh)
    apart = gradients(lesson, mesh)
    a_scatter(lesson, mesh)
    lesson.measured = {"distance_from_the_compilers_gradient": apart}

    figure, axis = pyplot.subplots(figsize=(7, 3))
    axis.bar([f"device {i}" for i in range(NUM_DEVICES)], apart["parts"], color="tab:green", label="its own gradient")
    axis.bar(["pmean"], [apart["pmean"]], color="black", label="mean of all")
    axis.set(ylabel="distance / norm", title="Gradients of eight parts of a batch, from the gradient of the whole batch")
    axis.legend()
    return figure


if __name__ == "__main__":
    run(teach)

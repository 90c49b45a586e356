"""Lesson 2. How a matrix product is divided decides whether devices must talk, and how much.

`python docs/tutorial/02_matmul_and_collective.py [--out DIR]`
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lesson import NUM_DEVICES, Lesson, collectives, heading, kinds, pyplot, run

SIZE, ROWS = 1024, 16


def compile_on(mesh: Mesh, function, arrays: list, specs: list[P], out: P):
    """The compiled program for arrays placed by these specs, its result, and the bytes that a device receives for it."""
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs)]
    program = jax.jit(function, out_shardings=NamedSharding(mesh, out)).lower(*placed).compile()
    return program, program(*placed), sum(c["received_bytes"] for c in collectives(program))


def divided_sum(lesson: Lesson, mesh: Mesh, x: jax.Array, w: jax.Array) -> float:
    heading("x @ W, the rows of W divided: the sum is divided")
    # y[i, j] = sum over k of x[i, k] W[k, j]. A device that has 128 of the 1024 rows of W has 128 of the terms of every sum.
    # Nobody asked for communication; the compiler sees the placements and adds what is missing: one all-reduce.
    program, y, received = compile_on(mesh, jnp.dot, [x, w], [P(), P("tensor", None)], P())
    print("  " + next(line.strip() for line in program.as_text().splitlines() if " all-reduce(" in line)[:150])
    lesson.check("row_sharded_needs_one_all_reduce", kinds(program) == {"all-reduce": 1}, f"{kinds(program)}")
    lesson.close("sharded_matmul_matches_single_device", y, x @ w)

    # What is added up are the eight partial products. The weight never moves: a partial result has the size of y.
    payload = collectives(program)[0]["payload_bytes"]
    lesson.check("the_result_travels_not_the_weight", payload == y.nbytes, f"{payload:,} bytes; W has {w.nbytes:,}")
    parts = [x[:, k : k + SIZE // NUM_DEVICES] @ w[k : k + SIZE // NUM_DEVICES] for k in range(0, SIZE, SIZE // NUM_DEVICES)]
    lesson.close("partial_products_add_up", y, sum(parts))
    return received


def divided_columns(lesson: Lesson, mesh: Mesh, x: jax.Array, w: jax.Array) -> float:
    heading("x @ W, the columns of W divided: the results are divided")
    # A device with 128 columns of W computes 128 columns of y from beginning to end. Nothing to add, nothing to send - but each
    # device has only its columns of y, and whoever wants them all pays for a gather then.
    program, y, received = compile_on(mesh, jnp.dot, [x, w], [P(), P(None, "tensor")], P(None, "tensor"))
    lesson.check(
        "column_sharded_needs_none",
        kinds(program) == {},
        f"{kinds(program)}; y is {y.addressable_shards[0].data.shape} per device",
    )
    lesson.close("column_sharded_matches", y, x @ w)
    program, _, gathered = compile_on(mesh, jnp.dot, [x, w], [P(), P(None, "tensor")], P())
    lesson.check(
        "whole_columns_cost_a_gather", kinds(program) == {"all-gather": 1}, f"{kinds(program)}, {gathered:,.0f} bytes received"
    )
    return received


def pair(lesson: Lesson, mesh: Mesh, x: jax.Array, w: jax.Array) -> tuple[float, float]:
    heading("Two products in a row: columns first, then rows")
    # The columns of the first weight meet the rows of the second, so that the value in between never leaves its device: the
    # nonlinearity works on each entry alone. One all-reduce for two products (Megatron-LM, arXiv:1909.08053).
    mlp = lambda x, a, b: jax.nn.gelu(x @ a) @ b  # noqa: E731
    b = w.T / SIZE**0.5
    good, y, received = compile_on(mesh, mlp, [x, w, b], [P(), P(None, "tensor"), P("tensor", None)], P())
    lesson.check("pair_needs_one_all_reduce", kinds(good) == {"all-reduce": 1}, f"{kinds(good)}")
    lesson.close("pair_matches", y, mlp(x, w, b))
    # The other way round both weights are divided as well, but the first product must be whole before the nonlinearity: its
    # argument is a sum, and gelu(a + b) is not gelu(a) + gelu(b).
    bad, y, received_bad = compile_on(mesh, mlp, [x, w, b], [P(), P("tensor", None), P(None, "tensor")], P())
    lesson.check(
        "other_order_needs_two", sum(kinds(bad).values()) == 2, f"{kinds(bad)}, {received_bad / received:.2f} x the bytes"
    )
    lesson.close("other_order_matches", y, mlp(x, w, b))
    return received, received_bad


def teach(lesson: Lesson) -> pyplot.Figure:
    mesh = jax.make_mesh((NUM_DEVICES,), ("tensor",), axis_types=(AxisType.Auto,))
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(ROWS, SIZE)), jnp.float32)
    w = jnp.asarray(random.normal(size=(SIZE, SIZE)) / SIZE**0.5, jnp.float32)
    received = {"rows of W": divided_sum(lesson, mesh, x, w), "columns of W": divided_columns(lesson, mesh, x, w)}
    received["pair:\ncolumns, rows"], received["pair:\nrows, columns"] = pair(lesson, mesh, x, w)
    # The examples can be divided instead. Then W is whole everywhere, and the forward pass needs nobody.
    program, _, received["rows of x"] = compile_on(mesh, jnp.dot, [x, w], [P("tensor", None), P()], P("tensor", None))
    lesson.check("divided_examples_need_none", kinds(program) == {}, f"{kinds(program)}, W whole on every device")
    lesson.measured = {"received_bytes": {k.replace("\n", " "): v for k, v in received.items()}, "weight_bytes": w.nbytes}

    figure, axis = pyplot.subplots(figsize=(7, 3.2))
    bars = axis.bar(received.keys(), [v / 1024 for v in received.values()], color="tab:blue")
    axis.bar_label(bars, fmt="%.0f")
    axis.set(
        ylabel="KiB received per device",
        title=f"({ROWS}, {SIZE}) @ ({SIZE}, {SIZE}) on {NUM_DEVICES} devices, by what is divided",
    )
    return figure


if __name__ == "__main__":
    run(teach)

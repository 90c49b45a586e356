"""Lesson 3. The same array on another placement: what has to travel, and what does not.

`python docs/tutorial/03_resharding.py [--out DIR]`
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lesson import NUM_DEVICES, Lesson, collectives, heading, kinds, pyplot, run

SIZE = 1024
PLACEMENTS = {"rows": P("tensor", None), "columns": P(None, "tensor"), "whole": P()}
EXPECTED = {
    ("rows", "columns"): "all-to-all",
    ("columns", "rows"): "all-to-all",
    ("rows", "whole"): "all-gather",
    ("columns", "whole"): "all-gather",
    ("whole", "rows"): None,
    ("whole", "columns"): None,
}
"""What a device lacks decides. From whole to divided it lacks nothing, and drops the rest."""


def by_device_put(lesson: Lesson, mesh: Mesh, matrix: jax.Array) -> None:
    heading("jax.device_put onto another sharding")
    rows = jax.device_put(matrix, NamedSharding(mesh, PLACEMENTS["rows"]))
    columns = jax.device_put(rows, NamedSharding(mesh, PLACEMENTS["columns"]))
    shapes = rows.addressable_shards[3].data.shape, columns.addressable_shards[3].data.shape
    lesson.check(
        "device_put_changes_the_parts", shapes == ((128, 1024), (1024, 128)), f"device 3: {shapes[0]}, then {shapes[1]}"
    )
    lesson.check("device_put_keeps_the_values", bool((columns == matrix).all()), "every entry, bit for bit")
    lesson.check(
        "the_source_stays", rows.sharding.spec == PLACEMENTS["rows"], "device_put gives a new array; the old one is as it was"
    )


def all_pairs(lesson: Lesson, mesh: Mesh, matrix: jax.Array) -> dict[str, float]:
    heading("The same inside a program, and its collective")
    # A program whose inputs and outputs are placed differently moves the data itself: the identity is enough to see it.
    received = {}
    for (source, target), kind in EXPECTED.items():
        placed = jax.device_put(matrix, NamedSharding(mesh, PLACEMENTS[source]))
        sharding = NamedSharding(mesh, PLACEMENTS[target])
        program = jax.jit(lambda a: a, out_shardings=sharding).lower(placed).compile()
        found, same = kinds(program), bool((program(placed) == matrix).all())
        name = f"{source}_to_{target}"
        received[name] = sum(c["received_bytes"] for c in collectives(program))
        wanted = {kind: 1} if kind else {}
        lesson.check(name, found == wanted and same, f"{found or 'nothing'}, {received[name]:,.0f} bytes received per device")
    return received


def compare_bytes(lesson: Lesson, received: dict[str, float], matrix: jax.Array) -> None:
    heading("How many bytes")
    # In an all-to-all a device keeps an eighth of its part and gets 7/8 of the part that it will have. In an all-gather it gets
    # 7/8 of the whole: eight times as much.
    n = NUM_DEVICES
    exchange, gather = (n - 1) / n * matrix.nbytes / n, (n - 1) / n * matrix.nbytes
    lesson.check("exchange_is_seven_eighths_of_a_part", received["rows_to_columns"] == exchange, f"{exchange:,.0f} bytes")
    lesson.check(
        "gather_is_seven_eighths_of_all", received["rows_to_whole"] == gather, f"{gather:,.0f} bytes, {gather / exchange:.0f} x"
    )


def inside_a_function(lesson: Lesson, mesh: Mesh, matrix: jax.Array) -> None:
    heading("with_sharding_constraint: a placement in the middle")
    # To sort every row takes whole rows, to sort every column whole columns. The constraint says where a value shall be, so
    # that each step finds what it needs on its own device.
    by_rows, by_columns = (NamedSharding(mesh, PLACEMENTS[k]) for k in ("rows", "columns"))

    def both(a):
        a = jnp.sort(a, axis=1)
        return jnp.sort(jax.lax.with_sharding_constraint(a, by_columns), axis=0)

    placed = jax.device_put(matrix, by_rows)
    program = jax.jit(both, out_shardings=by_columns).lower(placed).compile()
    lesson.check("one_exchange_in_the_middle", kinds(program) == {"all-to-all": 1}, f"{kinds(program)} for two sorts")
    lesson.close("values_are_those_of_one_device", program(placed), jax.jit(both)(matrix))


def other_devices(lesson: Lesson, mesh: Mesh, matrix: jax.Array) -> None:
    heading("Another mesh")
    # device_put also moves between meshes: here to half the devices, as at a restore on a smaller machine. A compiled program
    # cannot do that, it belongs to one set of devices.
    half = Mesh(mesh.devices[:4], ("tensor",), axis_types=(AxisType.Auto,))
    rows = jax.device_put(matrix, NamedSharding(mesh, PLACEMENTS["rows"]))
    target = NamedSharding(half, PLACEMENTS["rows"])
    moved = jax.device_put(rows, target)
    shape = moved.addressable_shards[0].data.shape
    lesson.check(
        "device_put_to_half_the_devices", shape == (256, 1024) and bool((moved == matrix).all()), f"{shape} on 4 devices"
    )
    lesson.refused(
        "a_program_stays_on_its_devices", lambda: jax.jit(lambda a: a, out_shardings=target)(rows), "incompatible devices"
    )


def teach(lesson: Lesson) -> pyplot.Figure:
    mesh = jax.make_mesh((NUM_DEVICES,), ("tensor",), axis_types=(AxisType.Auto,))
    matrix = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
    by_device_put(lesson, mesh, matrix)
    received = all_pairs(lesson, mesh, matrix)
    compare_bytes(lesson, received, matrix)
    inside_a_function(lesson, mesh, matrix)
    other_devices(lesson, mesh, matrix)
    lesson.measured = {"received_bytes": received, "array_bytes": matrix.nbytes}

    figure, axis = pyplot.subplots(figsize=(7, 3.2))
    bars = axis.barh([n.replace("_", " ") for n in received], [v / 1024 for v in received.values()], color="tab:orange")
    axis.bar_label(bars, fmt="%.0f")
    axis.invert_yaxis()
    axis.set(
        xlabel="KiB received per device",
        title=f"({SIZE}, {SIZE}) float32 on {NUM_DEVICES} devices, from one placement to another",
    )
    return figure


if __name__ == "__main__":
    run(teach)

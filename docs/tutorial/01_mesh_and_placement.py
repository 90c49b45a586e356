"""Lesson 1. A mesh gives names to a grid of devices; a placement says which device holds which part of an array.

`python docs/tutorial/01_mesh_and_placement.py [--out DIR]`
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from lesson import NUM_DEVICES, Lesson, heading, pyplot, run

SIZE = 1024
"""Rows and columns of the matrix."""


def meet_the_mesh(lesson: Lesson) -> Mesh:
    heading("A mesh of one axis")
    # Eight devices in a row. The axis has a name, so that placements need no device numbers: they go on working on 4 devices
    # or on 400. `Auto` leaves to the compiler what happens between the arrays that we place.
    mesh = jax.make_mesh((NUM_DEVICES,), ("tensor",), axis_types=(AxisType.Auto,))
    print(f"  {mesh}")
    ids = [d.id for d in mesh.devices.flat]
    lesson.check("mesh_has_multiple_devices", len(set(ids)) == NUM_DEVICES, f"axis tensor joins devices {ids}")
    return mesh


def place_rows(lesson: Lesson, mesh: Mesh, matrix: jax.Array) -> jax.Array:
    heading("One matrix, its rows divided")
    # A PartitionSpec has an entry for each dimension: the mesh axis that divides it, or None. With the mesh it is a
    # NamedSharding, and `jax.device_put` sends each device its part.
    sharding = NamedSharding(mesh, PartitionSpec("tensor", None))
    placed = jax.device_put(matrix, sharding)
    jax.debug.visualize_array_sharding(placed)

    # To the program it is one array of the old shape; the parts show only when asked for.
    shards = placed.addressable_shards
    parts = {s.data.shape for s in shards}
    lesson.check("global_shape_is_kept", placed.shape == (SIZE, SIZE), f"{placed.shape}")
    lesson.check("shard_row_count_matches_mesh", {p[0] for p in parts} == {SIZE // NUM_DEVICES}, f"each device holds {parts}")
    lesson.check("shard_col_count_is_full", {p[1] for p in parts} == {SIZE}, f"each device holds {parts}")

    # Parts follow the order of the mesh: device i has rows 128 i to 128 i + 127.
    ranges = {s.device.id: s.index[0].indices(SIZE)[:2] for s in shards}
    rows = SIZE // NUM_DEVICES
    lesson.check(
        "parts_follow_the_mesh", all(ranges[i] == (rows * i, rows * (i + 1)) for i in ranges), f"rows by device {ranges}"
    )
    joined = np.concatenate([s.data for s in sorted(shards, key=lambda s: s.device.id)])
    lesson.check(
        "parts_make_the_whole", bool((joined == np.asarray(matrix)).all()), "the eight parts one below the other, bit for bit"
    )
    return placed


def place_whole(lesson: Lesson, mesh: Mesh, matrix: jax.Array) -> jax.Array:
    heading("A copy for everybody")
    # A mesh axis that stands nowhere in the spec divides nothing: all devices along it hold the same.
    placed = jax.device_put(matrix, NamedSharding(mesh, PartitionSpec(None, None)))
    sizes = [s.data.nbytes for s in placed.addressable_shards]
    lesson.check(
        "replicas_cost_eight_times", sum(sizes) == NUM_DEVICES * matrix.nbytes, f"{sum(sizes):,} bytes for {matrix.nbytes:,}"
    )
    lesson.check("replication_is_told", placed.is_fully_replicated, f"is_fully_replicated = {placed.is_fully_replicated}")
    return placed


def what_does_not_divide(lesson: Lesson, mesh: Mesh) -> None:
    heading("What does not divide")
    # 1020 rows are not eight equal parts. Nothing is padded behind our back: it is an error, with the numbers in it.
    sharding = NamedSharding(mesh, PartitionSpec("tensor", None))
    lesson.refused("uneven_rows_are_refused", lambda: jax.device_put(jnp.ones((1020, SIZE)), sharding), "1020")
    # And a mesh axis can divide one dimension only: device 3 is the fourth along the axis, in whichever dimension.
    lesson.refused(
        "one_axis_divides_one_dimension", lambda: NamedSharding(mesh, PartitionSpec("tensor", "tensor")), "duplicate"
    )


def draw(arrays: dict[str, jax.Array]) -> pyplot.Figure:
    """Who holds what: each entry of a small map has the colour of its device; white where all devices hold it."""
    figure, axes = pyplot.subplots(1, len(arrays), figsize=(7.5, 2.9))
    for axis, (title, array) in zip(axes, arrays.items()):
        owner = np.full((64, 64), np.nan)
        if not array.is_fully_replicated:
            for shard in array.addressable_shards:
                rows, cols = (slice(*(n * 64 // SIZE for n in s.indices(SIZE)[:2])) for s in shard.index)
                owner[rows, cols] = shard.device.id
                centre = (cols.start + cols.stop - 1) / 2, (rows.start + rows.stop - 1) / 2
                axis.text(*centre, str(shard.device.id), ha="center", va="center")
        else:
            axis.text(31.5, 31.5, "all devices", ha="center", va="center")
        axis.imshow(owner, cmap="Set3", vmin=0, vmax=NUM_DEVICES)
        axis.set(title=f"{title}\n{array.sharding.shard_shape(array.shape)} per device", xticks=[], yticks=[])
    return figure


def teach(lesson: Lesson) -> pyplot.Figure:
    matrix = jnp.arange(SIZE * SIZE, dtype=jnp.float32).reshape(SIZE, SIZE) / SIZE**2
    mesh = meet_the_mesh(lesson)
    rows = place_rows(lesson, mesh, matrix)
    whole = place_whole(lesson, mesh, matrix)
    what_does_not_divide(lesson, mesh)
    columns = jax.device_put(matrix, NamedSharding(mesh, PartitionSpec(None, "tensor")))
    arrays = {"rows divided": rows, "columns divided": columns, "replicated": whole}
    lesson.measured = {
        name: {"shard": a.addressable_shards[0].data.shape, "spec": str(a.sharding.spec)} for name, a in arrays.items()
    }
    return draw(arrays)


if __name__ == "__main__":
    run(teach)

"""Lesson 4. Two mesh axes: examples divided along one, weights along the other, each with its own communication.

`python docs/tutorial/04_data_x_tensor_mesh.py [--out DIR]`
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lesson import NUM_DEVICES, Lesson, collectives, heading, pyplot, run

B, D, F = 8, 1024, 2048
"""Examples, features, hidden features."""
BATCH = P("data", None)
WEIGHTS = {"first": P(None, "tensor"), "second": P("tensor", None)}


def divide_twice(lesson: Lesson, mesh: Mesh) -> jax.Array:
    heading("Eight devices as a grid of 2 x 4")
    # The last axis is the fastest: devices 0 to 3 are one row. Put the axis that talks most there, since neighbours have the
    # fastest links.
    grid = [[d.id for d in row] for row in mesh.devices]
    lesson.check("tensor_groups_are_neighbours", grid == [[0, 1, 2, 3], [4, 5, 6, 7]], f"{grid}")
    x = jnp.arange(B * D, dtype=jnp.float32).reshape(B, D)
    both = jax.device_put(x, NamedSharding(mesh, P("data", "tensor")))
    jax.debug.visualize_array_sharding(both)
    part = both.addressable_shards[0].data.shape
    lesson.check("shard_batch_equals_global_over_dp", part[0] == B // 2, f"{part} of {x.shape}")
    lesson.check("shard_features_equal_global_over_mp", part[1] == D // 4, f"{part} of {x.shape}")
    # Named once, an axis divides; not named, it repeats: the four devices of a row have the same examples.
    batch = jax.device_put(x, NamedSharding(mesh, BATCH))
    rows = [batch.addressable_shards[i].index[0].start or 0 for i in range(NUM_DEVICES)]
    lesson.check("unnamed_axis_repeats", rows == [0] * 4 + [4] * 4, f"first example by device {rows}")
    # And one dimension may be divided by both.
    all_eight = jax.device_put(x, NamedSharding(mesh, P(("data", "tensor"), None)))
    lesson.check(
        "one_dimension_by_two_axes",
        all_eight.addressable_shards[0].data.shape == (1, D),
        "8 examples over 2 x 4 devices: 1 each",
    )
    return x


def mean_square(weights: dict, x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.gelu(x @ weights["first"]) @ weights["second"]).mean()


def train_like(lesson: Lesson, mesh: Mesh, x: jax.Array) -> dict:
    heading("A loss and its gradient on the grid")
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape) / shape[0] ** 0.5, jnp.float32)  # noqa: E731
    weights, x = {"first": draw(D, F), "second": draw(F, D)}, x / x.size
    place = {k: NamedSharding(mesh, s) for k, s in WEIGHTS.items()}
    placed, batch = jax.device_put(weights, place), jax.device_put(x, NamedSharding(mesh, BATCH))

    outputs = (NamedSharding(mesh, P()), place)
    program = jax.jit(jax.value_and_grad(mean_square), out_shardings=outputs).lower(placed, batch).compile()
    loss, grads = program(placed, batch)
    expected_loss, expected = jax.value_and_grad(mean_square)(weights, x)
    lesson.close("loss_matches_single_device", loss, expected_loss)
    for name in weights:
        lesson.close(f"gradient_of_{name}_matches", grads[name], expected[name])

    # Which group a collective joins tells its axis: groups of 4 are along tensor, groups of 2 along data.
    along = {"tensor": [c for c in collectives(program) if c["group_size"] == 4], "data": []}
    along["data"] = [c for c in collectives(program) if c["group_size"] == 2]
    for axis, found in along.items():
        print(f"  along {axis}: {[(c['kind'], c['payload_bytes']) for c in found]}")
    # Along tensor: the partial products of the second weight, for the 4 examples of the row of the grid.
    arrays = [c["payload_bytes"] for c in along["tensor"]]
    lesson.check("tensor_axis_carries_activations", arrays == [B // 2 * D * 4], f"payload {arrays}: (4, 1024) float32")
    # Along data: the gradients of what a device holds of the weights, a quarter, and the loss.
    payload = sum(c["payload_bytes"] for c in along["data"])
    wanted = sum(w.nbytes for w in weights.values()) // 4 + 4
    lesson.check(
        "data_axis_carries_gradients", payload == wanted, f"payload {payload:,}: a quarter of the weights, and 4 bytes of loss"
    )
    # So more examples per replica mean more along tensor, and the same along data.
    return {axis: sum(c["received_bytes"] for c in found) for axis, found in along.items()}


def elements_per_device(mesh: Mesh, x: jax.Array) -> dict[str, list[int]]:
    """Of one and the same tensor: how much each device holds when it is whole, divided once and divided twice."""
    specs = {
        "replicated": P(),
        "divided once (data)": BATCH,
        "divided once (tensor)": P(None, "tensor"),
        "divided twice": P("data", "tensor"),
    }
    placed = {name: jax.device_put(x, NamedSharding(mesh, spec)) for name, spec in specs.items()}
    return {name: [s.data.size for s in array.addressable_shards] for name, array in placed.items()}


def teach(lesson: Lesson) -> pyplot.Figure:
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    x = divide_twice(lesson, mesh)
    received = train_like(lesson, mesh, x)
    held = elements_per_device(mesh, x)
    sums = {name: sum(sizes) // x.size for name, sizes in held.items()}
    lesson.check("copies_are_devices_over_pieces", list(sums.values()) == [8, 4, 2, 1], f"copies of the tensor in all: {sums}")
    lesson.measured = {"received_bytes_by_axis": received, "elements_per_device": held}

    figure, axis = pyplot.subplots(figsize=(7.5, 3.2))
    for i, (name, sizes) in enumerate(held.items()):
        axis.bar(np.arange(NUM_DEVICES) + (i - 1.5) * 0.2, sizes, 0.2, label=name)
    axis.set_xticks(range(NUM_DEVICES), [f"device {i}" for i in range(NUM_DEVICES)])
    axis.set(ylabel="elements", ylim=(0, 1.35 * x.size), title=f"One tensor ({B}, {D}) on a 2 x 4 mesh, by placement")
    axis.legend(ncols=2)
    return figure


if __name__ == "__main__":
    run(teach)

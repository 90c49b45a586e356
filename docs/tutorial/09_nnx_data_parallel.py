"""Lesson 9. A Flax NNX model on eight devices: nnx.state, jax.device_put, nnx.update - and the training loop stays as it was.

`python docs/tutorial/09_nnx_data_parallel.py [--out DIR]`

Shape letters: B batch, C context.
"""

from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lesson import NUM_DEVICES, Lesson, heading, pyplot, run

CONTEXT, BATCH, NUM_STEPS = 8, 128, 30


class NextByte(nnx.Module):
    """Guesses a byte from the eight before it. It knows nothing of devices."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, 32, rngs=rngs)
        self.hidden = nnx.Linear(CONTEXT * 32, 128, rngs=rngs)
        self.out = nnx.Linear(128, 256, rngs=rngs)

    def __call__(self, bytes_BC: jax.Array) -> jax.Array:
        x = self.embed(bytes_BC).reshape(bytes_BC.shape[0], -1)
        return self.out(nnx.gelu(self.hidden(x)))


@nnx.jit
def train_step(model: NextByte, optimizer: nnx.Optimizer, bytes_BC: jax.Array, next_B: jax.Array) -> jax.Array:
    """Also without a word about devices: no mesh, no psum, no pmean."""

    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(bytes_BC), next_B).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Windows of the README of this folder: a text that is always there."""
    text = np.frombuffer((Path(__file__).parent / "README.md").read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(text) - CONTEXT, size=(NUM_STEPS, BATCH))
    return [(text[s[:, None] + np.arange(CONTEXT)], text[s + CONTEXT]) for s in starts]


def build() -> tuple[NextByte, nnx.Optimizer]:
    model = NextByte(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)


def train(model: NextByte, optimizer: nnx.Optimizer, sharding: NamedSharding | None) -> np.ndarray:
    losses = []
    for batch in batches():
        batch = jax.device_put(batch, sharding) if sharding else batch
        losses.append(train_step(model, optimizer, *batch))
    return np.array(jax.device_get(losses))


def place(lesson: Lesson, mesh: Mesh, pair: tuple[NextByte, nnx.Optimizer]) -> None:
    """Model and optimizer onto all devices, in place."""
    heading("Out of the model, onto the devices, into the model")
    model = pair[0]
    devices = lambda: len(model.out.kernel[...].sharding.device_set)  # noqa: E731
    lesson.check("born_on_one_device", devices() == 1, f"the kernel is on {devices()} device")

    # nnx.state takes the arrays out of the objects: weights, and Adam's moments and counter. They are a tree as any other.
    state = nnx.state(pair)
    num_arrays = len(jax.tree.leaves(state))
    paths = {path[0] for path, _ in nnx.to_flat_state(state)}
    lesson.check("state_has_model_and_optimizer", paths == {0, 1}, f"{num_arrays} arrays of both")
    # jax.device_put gives every device a copy of each.
    placed = jax.device_put(state, NamedSharding(mesh, P()))
    # The trap: these are new arrays. The model has the old ones until it is told.
    lesson.check("device_put_alone_changes_no_model", devices() == 1, "the model's kernel is still on one device")
    nnx.update(pair, placed)
    lesson.check("update_puts_them_in", devices() == NUM_DEVICES, f"the kernel is on {devices()} devices")
    shardings = [a.sharding for a in jax.tree.leaves(nnx.state(pair))]
    whole = all(s.is_fully_replicated and len(s.device_set) == NUM_DEVICES for s in shardings)
    lesson.check("everything_is_replicated", whole, "weights, moments and counter, whole on each device")


def teach(lesson: Lesson) -> pyplot.Figure:
    mesh = jax.make_mesh((NUM_DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    alone, pair = build(), build()
    place(lesson, mesh, pair)

    heading("Training: the batch is divided, nothing else changes")
    by_example = NamedSharding(mesh, P("data"))
    shape = jax.device_put(batches()[0], by_example)[0].addressable_shards[0].data.shape
    lesson.check("each_device_has_its_examples", shape == (BATCH // NUM_DEVICES, CONTEXT), f"{shape} of {(BATCH, CONTEXT)}")
    single, parallel = train(*alone, None), train(*pair, by_example)
    for i in (0, NUM_STEPS // 2, NUM_STEPS - 1):
        print(
            f"  step {i + 1:2d}  loss {parallel[i]:.5f}  perplexity {np.exp(parallel[i]):8.2f}  on one device {single[i]:.5f}"
        )
    lesson.close("losses_are_those_of_one_device", parallel, single)
    lesson.check("loss_falls", parallel[-1] < 0.8 * parallel[0], f"{parallel[0]:.3f} to {parallel[-1]:.3f} nats per byte")

    heading("After training")
    # Every device added the same averaged gradient to the same weights: the copies are still one. Nothing compares them; it is
    # the placement, stated once, that the compiler keeps.
    leaves = jax.tree.leaves(nnx.state(pair))
    same = all(np.array_equal(a.addressable_shards[0].data, s.data) for a in leaves for s in a.addressable_shards)
    lesson.check(
        "copies_are_still_equal",
        same and all(a.sharding.is_fully_replicated for a in leaves),
        f"{len(leaves)} arrays, bit for bit",
    )
    kernels = [np.asarray(m.out.kernel[...]) for m in (pair[0], alone[0])]
    lesson.close("weights_are_those_of_one_device", kernels[0], kernels[1], 1e-3)
    lesson.measured = {"losses": parallel.tolist(), "losses_on_one_device": single.tolist()}

    figure, axis = pyplot.subplots(figsize=(7, 3))
    axis.plot(np.exp(parallel), label=f"{NUM_DEVICES} devices")
    axis.plot(np.exp(single), ":", label="one device")
    axis.set(xlabel="step", ylabel="perplexity", yscale="log", title="Next byte of this README, data-parallel and alone")
    axis.legend()
    return figure


if __name__ == "__main__":
    run(teach)

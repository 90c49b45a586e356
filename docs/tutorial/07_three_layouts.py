"""Lesson 7. One weight, three layouts: where it is kept, where it is computed with, where it is updated.

`python docs/tutorial/07_three_layouts.py [--out DIR]`
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lesson import Lesson, collectives, heading, kinds, pyplot, run

from sharder.config import ParallelConfig
from sharder.sharding.axes import AxisRules, ParamDecl
from sharder.sharding.mesh import REPLICA_AXES, MeshShape, make_mesh
from sharder.sharding.plan import Plan, make_plan
from sharder.sharding.policy import LAYOUTS

D, F, B = 1024, 4096, 16
SHAPE = MeshShape(data=1, fsdp=4, tensor=2)
"""Four replicas of two devices."""

# What the model says: the names of its dimensions, and that `mlp` may be divided for computation. Nothing about devices.
RULES = AxisRules(names=frozenset({"embed", "mlp"}), tensor=("mlp",))
WEIGHTS = {"mlp_in": ParamDecl((D, F), "float32", ("embed", "mlp")), "mlp_out": ParamDecl((F, D), "float32", ("mlp", "embed"))}

# What the user says is one word, and these are the parts of mlp_in that a device then has (bytes follow).
EXPECTED = {
    "dp": {"storage": (1024, 2048), "compute": (1024, 2048), "update": (1024, 2048)},
    "zero": {"storage": (1024, 2048), "compute": (1024, 2048), "update": (1024, 512)},
    "fsdp": {"storage": (1024, 512), "compute": (1024, 2048), "update": (1024, 512)},
}


def loss(weights: dict, x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.gelu(x @ weights["mlp_in"]) @ weights["mlp_out"] - x).mean()


def make_step(plan: Plan | None, mesh: Mesh | None):
    """A step of gradient descent with momentum. The policy is nowhere in it: only the three layouts are."""

    def place(tree: dict, layout: str) -> dict:
        return jax.lax.with_sharding_constraint(tree, plan.shardings(layout, mesh)) if plan else tree

    def step(weights: dict, momentum: dict, x: jax.Array):
        value, grads = jax.value_and_grad(loss)(place(weights, "compute"), x)
        grads, kept = place(grads, "update"), place(weights, "update")
        momentum = place(jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads), "update")
        return place(jax.tree.map(lambda w, m: w - 0.1 * m, kept, momentum), "storage"), momentum, value

    return step


def show_layouts(lesson: Lesson, policy: str, plan: Plan, mesh: Mesh) -> None:
    leaf = plan.leaves["mlp_in"]
    shapes = {layout: NamedSharding(mesh, leaf.spec(layout)).shard_shape((D, F)) for layout in LAYOUTS}
    said = ", ".join(f"{layout} {leaf.spec(layout)} {shapes[layout]}" for layout in LAYOUTS)
    lesson.check(f"{policy}_layouts", shapes == EXPECTED[policy], said)


def train(lesson: Lesson, policy: str, plan: Plan, mesh: Mesh, weights: dict, x: jax.Array, expected: list[float]) -> dict:
    """Three steps; what a device holds between them, and what was communicated."""
    state = (
        jax.device_put(weights, plan.shardings("storage", mesh)),
        jax.device_put(jax.tree.map(np.zeros_like, weights), plan.shardings("update", mesh)),
    )
    x = jax.device_put(x, NamedSharding(mesh, P(REPLICA_AXES, None)))
    program = jax.jit(make_step(plan, mesh)).lower(*state, x).compile()
    losses = []
    for _ in expected:
        *state, value = program(*state, x)
        losses.append(float(value))
    lesson.close(f"{policy}_trains_as_one_device", np.array(losses), np.array(expected), 1e-5)

    held = [sum(a.addressable_shards[0].data.nbytes for a in tree.values()) for tree in state]
    planned = [plan.param_bytes_per_device("storage"), plan.param_bytes_per_device("update")]
    lesson.check(
        f"{policy}_bytes_are_those_of_the_plan", held == planned, f"weights {held[0]:,}, momentum {held[1]:,} bytes per device"
    )
    # Groups of four are along fsdp; groups of two are tensor parallelism, the same in all three (lesson 2).
    along = [c for c in collectives(program) if c["group_size"] == SHAPE.fsdp]
    return {"held_bytes": dict(zip(("weights", "momentum"), held)), "kinds": kinds(program), "along_fsdp": along}


def compare(lesson: Lesson, found: dict[str, dict]) -> None:
    heading("What each policy communicates along fsdp")
    payload = {p: {k: 0 for k in ("all-gather", "all-reduce", "reduce-scatter")} for p in found}
    for policy, facts in found.items():
        for c in facts["along_fsdp"]:
            payload[policy][c["kind"]] = payload[policy].get(c["kind"], 0) + c["payload_bytes"]
        print(f"  {policy}: {payload[policy]}")
    # All divide the tensor axis, so that a replica's device computes with half of the two weights: this much.
    half = 2 * D * F * 4 // SHAPE.tensor
    gathered = {p: v["all-gather"] for p, v in payload.items()}
    lesson.check("dp_gathers_nothing", gathered["dp"] == 0, "every replica updates its own copy")
    lesson.check("zero_gathers_weights_once", gathered["zero"] == half, f"{gathered['zero']:,} bytes, after the update")
    # The weights of one layer are gathered before the forward pass and, here, kept for the backward pass. A deep model lets
    # go of them and gathers again, or it would hold all layers whole: twice these bytes (docs/sharding.md).
    lesson.check(
        "fsdp_gathers_weights_to_compute", gathered["fsdp"] == half, f"{gathered['fsdp']:,} bytes, before the forward pass"
    )
    reduced = {p: v["all-reduce"] + v["reduce-scatter"] for p, v in payload.items()}
    lesson.check(
        "all_reduce_gradients_once",
        set(reduced.values()) == {half + 4},
        f"{reduced} bytes: a replica's gradients, and the loss",
    )
    if payload["fsdp"]["reduce-scatter"]:
        lesson.check("gradients_are_scattered", payload["fsdp"]["reduce-scatter"] == half, "a reduce-scatter")
    else:
        lesson.skip(
            "gradients_are_scattered",
            "this backend reduces to all devices and slices; programs compiled for GPUs and TPUs have a reduce-scatter",
        )


def teach(lesson: Lesson) -> pyplot.Figure:
    random = np.random.default_rng(0)
    weights = {n: np.asarray(random.normal(size=d.shape) / d.shape[0] ** 0.5, np.float32) for n, d in WEIGHTS.items()}
    x = np.asarray(random.normal(size=(B, D)), np.float32)
    one, alone, expected = jax.jit(make_step(None, None)), (weights, jax.tree.map(np.zeros_like, weights)), []
    for _ in range(3):
        *alone, value = one(*alone, x)
        expected.append(float(value))

    mesh, found = make_mesh(SHAPE), {}
    for policy in EXPECTED:
        heading(f"Policy {policy} on {SHAPE}")
        plan = make_plan(WEIGHTS, RULES, ParallelConfig(policy=policy, tensor=SHAPE.tensor), SHAPE)
        show_layouts(lesson, policy, plan, mesh)
        found[policy] = train(lesson, policy, plan, mesh, weights, x, expected)
    compare(lesson, found)
    lesson.measured = {"policies": found, "losses_on_one_device": expected}

    figure, axis = pyplot.subplots(figsize=(7, 3.2))
    kept = {part: np.array([facts["held_bytes"][part] / 2**20 for facts in found.values()]) for part in ("weights", "momentum")}
    axis.bar(list(found), kept["weights"], label="weights")
    axis.bar(list(found), kept["momentum"], bottom=kept["weights"], label="momentum")
    axis.set(ylabel="MiB per device between steps", title=f"Two weights ({D}, {F}) and their momentum on 4 x 2 devices")
    axis.legend()
    return figure


if __name__ == "__main__":
    run(teach)

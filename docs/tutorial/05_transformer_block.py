"""Lesson 5. A transformer block whose placements need two collectives forward, two backward, and not one more.

`python docs/tutorial/05_transformer_block.py [--out DIR]`

Shape letters: B batch, T positions, D model dimension, N heads, H head dimension, F feed-forward dimension.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lesson import Lesson, collectives, heading, kinds, pyplot, run

B, T, D, N, H, F = 4, 16, 64, 8, 8, 256

# Heads and hidden features are divided. Whatever enters a half of the block is whole, and whatever leaves it is a sum over
# heads or hidden features: columns, then rows, as in lesson 2, twice.
WEIGHTS = {
    "norm1": ((D,), P(None)),
    "q": ((D, N, H), P(None, "tensor", None)),
    "k": ((D, N, H), P(None, "tensor", None)),
    "v": ((D, N, H), P(None, "tensor", None)),
    "attn_out": ((N, H, D), P("tensor", None, None)),
    "norm2": ((D,), P(None)),
    "mlp_in": ((D, F), P(None, "tensor")),
    "mlp_out": ((F, D), P("tensor", None)),
}
SPECS = {name: spec for name, (_, spec) in WEIGHTS.items()}
X_SPEC = P("data", None, None)


def norm(x_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
    """RMS norm (arXiv:1910.07467)."""
    return x_BTD * jax.lax.rsqrt(jnp.square(x_BTD).mean(-1, keepdims=True) + 1e-6) * scale_D


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of each head by itself, (B, T, N, H) each: no head needs another, so dividing them is free."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    causal = jnp.tril(jnp.ones((T, T), bool))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(causal, scores, -1e30)), v)


def project(w: dict, y: jax.Array) -> list[jax.Array]:
    return [jnp.einsum("btd,dnh->btnh", y, w[name]) for name in "qkv"]


def project_jointly(w: dict, y: jax.Array) -> list[jax.Array]:
    """One matrix (D, 3 N H) for all three, as many models store it."""
    return [part.reshape(B, T, N, H) for part in jnp.split(y @ w["qkv"], 3, axis=-1)]


def block(w: dict, x: jax.Array, project=project) -> jax.Array:
    attended = attend(*project(w, norm(x, w["norm1"])))
    x = x + jnp.einsum("btnh,nhd->btd", attended, w["attn_out"])
    return x + jax.nn.gelu(norm(x, w["norm2"]) @ w["mlp_in"]) @ w["mlp_out"]


def loss(w: dict, x: jax.Array) -> jax.Array:
    return jnp.square(block(w, x)).mean()


def compile_on(mesh: Mesh, function, specs: dict, w: dict, x: jax.Array, outputs):
    """The compiled program for weights placed by these specs, and its placed arguments."""
    place = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
    placed = {name: jax.device_put(w[name], place(spec)) for name, spec in specs.items()}, jax.device_put(x, place(X_SPEC))
    outputs = jax.tree.map(place, outputs, is_leaf=lambda s: isinstance(s, P))
    return jax.jit(function, out_shardings=outputs).lower(*placed).compile(), placed


def forward(lesson: Lesson, mesh: Mesh, w: dict, x: jax.Array):
    heading("Forward: the minimum is two")
    program, placed = compile_on(mesh, block, SPECS, w, x, X_SPEC)
    lesson.close("block_matches_single_device", program(*placed), jax.jit(block)(w, x))
    found = collectives(program)
    # Heads add up once, hidden features add up once. Less is impossible: each half ends in a sum over what is divided, and the
    # next norm needs the whole sum.
    lesson.check(
        "forward_has_the_minimum", kinds(program) == {"all-reduce": 2}, f"{kinds(program)}, the minimum is 2 all-reduces"
    )
    sizes = [c["payload_bytes"] for c in found]
    lesson.check(
        "each_carries_the_residual_stream", sizes == [B // 2 * T * D * 4] * 2, f"payload {sizes}: (2, {T}, {D}) float32"
    )
    lesson.check(
        "all_along_tensor", all(c["group_size"] == 4 for c in found), "groups of 4; nothing crosses the data axis forward"
    )
    return program


def backward(lesson: Lesson, mesh: Mesh, w: dict, x: jax.Array):
    heading("Backward: two more, and the gradients")
    program, placed = compile_on(mesh, jax.value_and_grad(loss), SPECS, w, x, (P(), SPECS))
    value, grads = jax.device_get(program(*placed))
    expected_value, expected = jax.device_get(jax.jit(jax.value_and_grad(loss))(w, x))
    lesson.close("loss_matches", value, expected_value)
    worst = max(SPECS, key=lambda n: abs(grads[n] - expected[n]).max() / abs(expected[n]).max())
    lesson.close("gradients_match", grads[worst], expected[worst])
    # A weight divided by columns passes back a sum over its columns: what was free forward costs an all-reduce backward.
    along = {size: [c for c in collectives(program) if c["group_size"] == size] for size in (4, 2)}
    counts = len(along[4]), {c["kind"] for c in along[4]}
    lesson.check("two_forward_two_backward", counts == (4, {"all-reduce"}), f"{len(along[4])} all-reduces along tensor")
    payload = sum(c["payload_bytes"] for c in along[2])
    wanted = sum(a.nbytes // (4 if "tensor" in SPECS[n] else 1) for n, a in w.items()) + 4
    lesson.check(
        "gradients_cross_data_once",
        payload == wanted,
        f"{payload:,} bytes in {len(along[2])} collective(s): each shard once, and the loss",
    )


def what_goes_wrong(lesson: Lesson, mesh: Mesh, w: dict, x: jax.Array) -> dict:
    heading("The same block, placed less well")
    # A joint projection divided along its last dimension: the first device holds six of the eight heads of q, the second the
    # other two and half of k, so that heads that belong together lie on different devices and move before attention.
    joint = {**w, "qkv": jnp.concatenate([w[n].reshape(D, N * H) for n in "qkv"], axis=1)}
    specs = {**{n: s for n, s in SPECS.items() if n not in "qkv"}, "qkv": P(None, "tensor")}
    bad, placed = compile_on(mesh, lambda w, x: block(w, x, project_jointly), specs, joint, x, X_SPEC)
    lesson.close("joint_projection_is_as_right", bad(*placed), jax.jit(block)(w, x))
    lesson.check("joint_projection_moves_heads", sum(kinds(bad).values()) > 2, f"{kinds(bad)}")
    # The output matrices divided by their columns too: "divide the last dimension of everything".
    last = {**SPECS, "attn_out": P(None, None, "tensor"), "mlp_out": P(None, "tensor")}
    columns, placed = compile_on(mesh, block, last, w, x, X_SPEC)
    lesson.close("columns_only_is_as_right", columns(*placed), jax.jit(block)(w, x))
    lesson.check("columns_only_needs_more", sum(kinds(columns).values()) > 2, f"{kinds(columns)}")
    return {"joint q, k, v": bad, "all by columns": columns}


def teach(lesson: Lesson) -> pyplot.Figure:
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    random = np.random.default_rng(0)
    w = {n: jnp.asarray(random.normal(size=shape) / D**0.5, jnp.float32) for n, (shape, _) in WEIGHTS.items()}
    x = jnp.asarray(random.normal(size=(B, T, D)), jnp.float32)
    programs = {"as above": forward(lesson, mesh, w, x)}
    backward(lesson, mesh, w, x)
    programs |= what_goes_wrong(lesson, mesh, w, x)
    lesson.measured = {name: {"kinds": kinds(p), "collectives": collectives(p)} for name, p in programs.items()}

    figure, axis = pyplot.subplots(figsize=(7, 3.2))
    bottom = np.zeros(len(programs))
    for kind in sorted({k for p in programs.values() for k in kinds(p)}):
        counts = np.array([kinds(p).get(kind, 0) for p in programs.values()])
        axis.bar(list(programs), counts, bottom=bottom, label=kind)
        bottom += counts
    axis.axhline(2, color="black", linestyle=":", label="minimum")
    axis.set(ylabel="collectives", title="Forward pass of one block on a 2 x 4 mesh, by placement of its weights")
    axis.legend()
    return figure


if __name__ == "__main__":
    run(teach)

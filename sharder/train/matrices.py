"""Parameters seen as matrices, for optimizers that know rows and columns: Adafactor and Muon.

A parameter has sides: each of its dimensions is one, but heads and head_dim, which are one side together; layers are
no side, they are stacked matrices. So blocks/q (layers, embed, heads, head_dim) is a matrix embed x (heads head_dim) for
each layer, and a bias (layers, heads, head_dim) a vector.

Shape letters: L layers (1 where none are stacked), R rows, C columns.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from sharder.models.build import flatten, unflatten
from sharder.sharding.axes import ParamDecl

HEADS = ("heads", "kv_heads")

# K. Jordan's Muon: five iterations of this quintic bring the singular values into 0.5 .. 1.5.
NEWTON_SCHULZ, NUM_ITERATIONS = (3.4445, -4.7750, 2.0315), 5
# arXiv:2502.16982, 2.2: updates have the root mean square that AdamW's have, so that one learning rate serves both.
RMS_OF_UPDATES = 0.2
# arXiv:1804.04235, algorithm 4 and table 4.
DECAY_EXPONENT, SQUARE_FLOOR, CLIPPING_THRESHOLD = 0.8, 1e-30, 1.0


def sides(axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """The dimensions of each side."""
    found: list[tuple[int, ...]] = []
    for dim, axis in enumerate(axes):
        if axis == "head_dim" and dim and axes[dim - 1] in HEADS:
            found[-1] += (dim,)
        elif axis != "layers":
            found.append((dim,))
    return found


def is_matrix(decl: ParamDecl) -> bool:
    return len(sides(decl.axes)) == 2


def is_hidden_matrix(decl: ParamDecl) -> bool:
    """A matrix of a block: what Muon is for. Embeddings and output projections are not."""
    return is_matrix(decl) and decl.axes[0] == "layers"


def side_sizes(decl: ParamDecl) -> tuple[int, ...]:
    return tuple(math.prod(decl.shape[d] for d in side) for side in sides(decl.axes))


def as_matrices(x: jax.Array, decl: ParamDecl) -> jax.Array:
    """(L, R, C) from a matrix parameter."""
    return x.reshape(-1, *side_sizes(decl))


class FactoredState(NamedTuple):
    """Moving averages of squared gradients."""

    count: jax.Array
    row: dict
    """Of matrices, means over their columns, (L, R)."""
    col: dict
    """Of matrices, means over their rows, (L, C)."""
    full: dict
    """Of all other parameters, element by element."""


def side_spec(decl: ParamDecl, spec: PartitionSpec, side: int) -> PartitionSpec:
    """Layout of the averages (L, R) or (L, C) along one side of a matrix with layout `spec`.

    Whole where an inner dimension of the side is divided: its pieces are not contiguous along the side.
    """
    first, *inner = sides(decl.axes)[side]
    return PartitionSpec(None, None if any(spec[d] is not None for d in inner) else spec[first])


def scale_by_factored_moments(params: dict[str, ParamDecl], min_dim: int) -> optax.GradientTransformation:
    """Adafactor's scaling and clipping (arXiv:1804.04235, algorithm 4 without relative steps), every layer a matrix of its own.

    Matrices of at least `min_dim` rows and columns keep means over rows and columns, other parameters every square.
    optax's own takes the two largest dimensions whatever they are, layers or heads too, and clips all layers together.
    """
    factored = {p for p, decl in params.items() if is_matrix(decl) and min(side_sizes(decl)) >= min_dim}

    def init(tree):
        flat = flatten(tree)
        zeros = lambda shape: jnp.zeros(shape, jnp.float32)  # noqa: E731
        row, col = (
            {
                p: zeros((math.prod(params[p].shape) // math.prod(side_sizes(params[p])), side_sizes(params[p])[side]))
                for p in sorted(factored)
            }
            for side in (0, 1)
        )
        full = {p: zeros(x.shape) for p, x in flat.items() if p not in factored}
        return FactoredState(jnp.zeros((), jnp.int32), unflatten(row), unflatten(col), unflatten(full))

    def update(tree, state, _=None):
        beta = 1.0 - (state.count + 1).astype(jnp.float32) ** -DECAY_EXPONENT
        row, col, full, scaled = flatten(state.row), flatten(state.col), flatten(state.full), {}
        for path, g in flatten(tree).items():
            square, decl = jnp.square(g) + SQUARE_FLOOR, params[path]
            if path in factored:
                square_LRC = as_matrices(square, decl)
                row[path] = beta * row[path] + (1.0 - beta) * square_LRC.mean(2)
                col[path] = beta * col[path] + (1.0 - beta) * square_LRC.mean(1)
                relative_LR = row[path] / row[path].mean(1, keepdims=True)
                u = as_matrices(g, decl) * jax.lax.rsqrt(relative_LR)[:, :, None] * jax.lax.rsqrt(col[path])[:, None, :]
            else:
                full[path] = beta * full[path] + (1.0 - beta) * square
                u = g * jax.lax.rsqrt(full[path])
                u = u.reshape(u.shape[0] if decl.axes[0] == "layers" else 1, -1)
            rms = jnp.sqrt(jnp.square(u).mean(tuple(range(1, u.ndim)), keepdims=True))
            scaled[path] = (u / jnp.maximum(1.0, rms / CLIPPING_THRESHOLD)).reshape(g.shape)
        return unflatten(scaled), FactoredState(state.count + 1, unflatten(row), unflatten(col), unflatten(full))

    return optax.GradientTransformation(init, update)


def nearly_orthogonal(g_LRC: jax.Array) -> jax.Array:
    """Matrices with the singular vectors of `g_LRC` and singular values near 1, by products alone.

    optax has this in a private module only.
    """
    wide = g_LRC.shape[1] <= g_LRC.shape[2]
    x = g_LRC if wide else g_LRC.swapaxes(1, 2)  # the smaller of the two squares
    x = x / (jnp.sqrt(jnp.square(x).sum((1, 2), keepdims=True)) + 1e-8)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NUM_ITERATIONS):
        square = x @ x.swapaxes(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide else x.swapaxes(1, 2)


def orthogonalized(params: dict[str, ParamDecl], place: Callable[[jax.Array], jax.Array]) -> optax.GradientTransformation:
    """Muon's update: every layer's matrix replaced by the nearest one with singular values about 1 (five Newton-Schulz steps).

    `place` lays out matrices (L, R, C) for the iteration, which needs them whole.
    """

    def one(path: str, g: jax.Array) -> jax.Array:
        u_LRC = place(nearly_orthogonal(place(as_matrices(g, params[path]))))
        return (u_LRC * (RMS_OF_UPDATES * max(side_sizes(params[path])) ** 0.5)).reshape(g.shape)

    def update(tree, state, _=None):
        return jax.tree_util.tree_map_with_path(lambda path, g: one("/".join(str(k.key) for k in path), g), tree), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)

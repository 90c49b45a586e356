"""The pieces that models share: declaring a parameter, normalisation, dropout.

Shape letters: B batch, T positions, D model dimension.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from sharder.ops.layout import Layout
from sharder.ops.linear import linear
from sharder.ops.widen import widened

Initializer = Callable[..., jax.Array]

normal = jax.nn.initializers.normal
zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones

LAYER_NORM_EPS = 1e-5
"""GPT-2's."""


def param(rngs: nnx.Rngs, init: Initializer, dtype: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    """A parameter with a logical axis name for every dimension, under our own metadata key `axes`.

    flax's key `out_sharding` would place the array at once on a mesh axis of that name.
    """
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} needs {len(shape)} axis names, got {axes}")
    return nnx.Param(init(rngs.params(), shape, jnp.dtype(dtype)), axes=axes)


def stack(block: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """`num_layers` independently initialised copies of a block, every parameter with a leading axis `layers`."""

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers", "axes": "layers"})
    def make(layer_rngs):
        return block(layer_rngs)

    return make(rngs)


def fetch(module: nnx.Module, name: str, layout: Layout, dtype: str) -> nnx.Module:
    """The module at path `name` with its weights where they are computed with."""
    graphdef, params = nnx.split(module)
    return nnx.merge(graphdef, layout.weights(name, nnx.to_pure_dict(params), dtype))


def gelu(x: jax.Array) -> jax.Array:
    """GELU in its tanh form (arXiv:1606.08415)."""
    return jax.nn.gelu(x, approximate=True)


# Here and below only the inputs are kept for the backward pass: what is elementwise is cheaper to compute again than to
# store and load (a scanned feed-forward block took 0.48 s with the intermediates of GELU kept, 0.36 s without).
@partial(jax.checkpoint, prevent_cse=False)
def gelu_linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """GELU, then the matrix product of a layer."""
    return linear(gelu(x), weight)


def layer_norm(x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array, eps: float = LAYER_NORM_EPS) -> jax.Array:
    """Layer normalisation over the last dimension, computed in float32, in the dtype of `x` (arXiv:1607.06450)."""

    @partial(jax.checkpoint, prevent_cse=False)
    def normalise(x_BTD, scale_D, bias_D):
        x = x_BTD.astype(jnp.float32)
        mean = x.mean(-1, keepdims=True)
        centred = x - mean
        variance = jnp.square(centred).mean(-1, keepdims=True)
        return (centred * jax.lax.rsqrt(variance + eps) * widened(scale_D) + widened(bias_D)).astype(x_BTD.dtype)

    return normalise(x_BTD, scale_D, bias_D)


def dropout(x_BTD: jax.Array, keys_B: jax.Array | None, site: int, rate: float) -> jax.Array:
    """Inverted dropout with one key per example, so that the mask depends on the example and not on its neighbours.

    `site` tells the places inside a layer apart. No keys: nothing is dropped.
    """
    if keys_B is None or rate == 0.0:
        return x_BTD
    keep = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate, x_BTD.shape[1:]))(keys_B)
    return jnp.where(keep, x_BTD / (1.0 - rate), jnp.zeros((), x_BTD.dtype))

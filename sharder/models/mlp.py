"""A stack of dense layers with GELU, fitted to targets by mean squared error: the weak-scaling workload.

Shape letters: B batch, I inputs, D hidden dimension, O outputs.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from sharder.config import MlpConfig
from sharder.models.layers import fetch, gelu, normal, param, stack, zeros
from sharder.ops.layout import SINGLE, Layout
from sharder.ops.linear import add_bias, linear
from sharder.sharding.axes import AxisRules


class Dense(nnx.Module):
    def __init__(self, dims: tuple[int, int], axes: tuple[str, str], dtype: str, rngs: nnx.Rngs):
        # He et al., arXiv:1502.01852: keeps the variance through the nonlinearity.
        self.kernel = param(rngs, normal((2.0 / dims[0]) ** 0.5), dtype, dims, axes)
        self.bias = param(rngs, zeros, dtype, dims[1:], axes[1:])

    def __call__(self, x: jax.Array) -> jax.Array:
        return add_bias(linear(x, self.kernel[...]), self.bias[...])


class Mlp(nnx.Module):
    """Inputs (B, I) to outputs (B, O)."""

    axis_rules = AxisRules(
        names=frozenset({"layers", "input", "hidden_in", "hidden", "output"}),
        tensor=(),
        storage=("hidden_in", "hidden", "output"),
    )
    undecayed_axes = frozenset()
    tokens_per_example = False

    def __init__(self, config: MlpConfig, rngs: nnx.Rngs):
        self.config = config
        dtype, D = config.param_dtype, config.hidden_dim
        self.first = Dense((config.input_dim, D), ("input", "hidden"), dtype, rngs)
        self.blocks = stack(lambda r: Dense((D, D), ("hidden_in", "hidden"), dtype, r), config.num_layers, rngs)
        self.last = Dense((D, config.output_dim), ("hidden_in", "output"), dtype, rngs)

    def __call__(self, x_BI: jax.Array, layout: Layout = SINGLE) -> jax.Array:
        dtype = self.config.compute_dtype
        with jax.named_scope("embed"):
            x_BD = gelu(fetch(self.first, "first", layout, dtype)(x_BI.astype(jnp.dtype(dtype))))
        graphdef, params = nnx.split(self.blocks)

        def body(x_BD, params):
            dense = nnx.merge(graphdef, layout.weights("blocks", params, dtype))
            with jax.named_scope("mlp"):
                return layout.activation(gelu(dense(x_BD)), ("batch", "hidden")), None

        x_BD, _ = jax.lax.scan(layout.scanned(body, self.config.remat), x_BD, nnx.to_pure_dict(params))
        with jax.named_scope("head"):
            return fetch(self.last, "last", layout, dtype)(x_BD)

    def losses(self, batch: dict, keys_B: jax.Array | None, layout: Layout = SINGLE) -> tuple[jax.Array, jax.Array]:
        """Per example the mean squared error over the outputs, and weight 1, both (B,) float32."""
        outputs_BO = self(batch["inputs"], layout)
        with jax.named_scope("loss"):
            error_BO = outputs_BO.astype(jnp.float32) - batch["targets"]
            return jnp.square(error_BO).mean(-1), jnp.ones(error_BO.shape[0], jnp.float32)

"""SigLIP's image encoder (arXiv:2303.15343): patches, learned positions, pre-layer-norm blocks, no pooling.

Shape letters: B images, P patches, D dimension of the encoder, N heads, H head dimension, F feed-forward dimension,
O dimension of the tokens that come out.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from sharder.config import SiglipConfig
from sharder.models.layers import fetch, gelu_linear, layer_norm, normal, ones, param, stack, zeros
from sharder.ops.attention import attention
from sharder.ops.layout import Layout
from sharder.ops.linear import add_bias, linear

EPS = 1e-6
"""Of its layer norms."""


class Block(nnx.Module):
    def __init__(self, config: SiglipConfig, dtype: str, rngs: nnx.Rngs):
        D, N, F = config.embed_dim, config.num_heads, config.mlp_dim
        H = D // N
        self.norm1_scale = param(rngs, ones, dtype, (D,), ("embed",))
        self.norm1_bias = param(rngs, zeros, dtype, (D,), ("embed",))
        for name in ("query", "key", "value"):
            setattr(self, name, param(rngs, normal(D**-0.5), dtype, (D, N, H), ("embed", "heads", "head_dim")))
            setattr(self, f"{name}_bias", param(rngs, zeros, dtype, (N, H), ("heads", "head_dim")))
        self.out = param(rngs, normal(D**-0.5), dtype, (N, H, D), ("heads", "head_dim", "embed"))
        self.out_bias = param(rngs, zeros, dtype, (D,), ("embed",))
        self.norm2_scale = param(rngs, ones, dtype, (D,), ("embed",))
        self.norm2_bias = param(rngs, zeros, dtype, (D,), ("embed",))
        self.mlp_in = param(rngs, normal(D**-0.5), dtype, (D, F), ("embed", "mlp"))
        self.mlp_in_bias = param(rngs, zeros, dtype, (F,), ("mlp",))
        self.mlp_out = param(rngs, normal(F**-0.5), dtype, (F, D), ("mlp", "embed"))
        self.mlp_out_bias = param(rngs, zeros, dtype, (D,), ("embed",))

    def __call__(self, x_BPD: jax.Array, layout: Layout) -> jax.Array:
        with jax.named_scope("attention"):
            y_BPD = layer_norm(x_BPD, self.norm1_scale[...], self.norm1_bias[...], EPS)
            projected = (add_bias(linear(y_BPD, self.query[...]), self.query_bias[...]), add_bias(linear(y_BPD, self.key[...]), self.key_bias[...]),
                         add_bias(linear(y_BPD, self.value[...]), self.value_bias[...]))  # fmt: skip
            q, k, v = (layout.activation(x, ("batch", "seq", "heads", "head_dim")) for x in projected)
            everything = jnp.ones((1, q.shape[1], q.shape[1]), bool)
            y_BPNH = attention(q, k, v, everything, scale=q.shape[-1] ** -0.5)
            x_BPD = add_bias(x_BPD + linear(y_BPNH, self.out[...], num_contracted=2), self.out_bias[...])
            x_BPD = layout.activation(x_BPD, ("batch", "seq", "embed"))
        with jax.named_scope("mlp"):
            y_BPD = layer_norm(x_BPD, self.norm2_scale[...], self.norm2_bias[...], EPS)
            h_BPF = add_bias(linear(y_BPD, self.mlp_in[...]), self.mlp_in_bias[...])
            h_BPF = layout.activation(h_BPF, ("batch", "seq", "mlp"))
            x_BPD = add_bias(x_BPD + gelu_linear(h_BPF, self.mlp_out[...]), self.mlp_out_bias[...])
            return layout.activation(x_BPD, ("batch", "seq", "embed"))


class Patches(nnx.Module):
    """A convolution whose stride is its size, and learned positions."""

    def __init__(self, config: SiglipConfig, num_patches: int, dtype: str, rngs: nnx.Rngs):
        size, D = config.patch_size, config.embed_dim
        fan_in = size * size * 3
        axes = ("patch_height", "patch_width", "channels", "embed")
        self.kernel = param(rngs, normal(fan_in**-0.5), dtype, (size, size, 3, D), axes)
        self.bias = param(rngs, zeros, dtype, (D,), ("embed",))
        self.positions = param(rngs, normal(D**-0.5), dtype, (num_patches, D), ("positions", "embed"))

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        B, height, width, _ = images_BHWC.shape
        size = self.kernel.shape[0]
        rows, columns = height // size, width // size
        patches = images_BHWC.reshape(B, rows, size, columns, size, 3).swapaxes(2, 3).reshape(B, rows * columns, size, size, 3)
        return add_bias(add_bias(linear(patches, self.kernel[...], num_contracted=3), self.bias[...]), self.positions[...])


class Head(nnx.Module):
    """The last norm, and the projection to the language model's dimension."""

    def __init__(self, config: SiglipConfig, out_dim: int, dtype: str, rngs: nnx.Rngs):
        D = config.embed_dim
        self.norm_scale = param(rngs, ones, dtype, (D,), ("embed",))
        self.norm_bias = param(rngs, zeros, dtype, (D,), ("embed",))
        self.kernel = param(rngs, normal(D**-0.5), dtype, (D, out_dim), ("embed", "projection"))
        self.bias = param(rngs, zeros, dtype, (out_dim,), ("projection",))

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        return add_bias(
            linear(layer_norm(x_BPD, self.norm_scale[...], self.norm_bias[...], EPS), self.kernel[...]), self.bias[...]
        )


class Siglip(nnx.Module):
    """Images in [-1, 1] to one token for each patch."""

    def __init__(self, config: SiglipConfig, image_size: tuple[int, int], out_dim: int, dtype: str, rngs: nnx.Rngs):
        self.num_patches = (image_size[0] // config.patch_size) * (image_size[1] // config.patch_size)
        self.patches = Patches(config, self.num_patches, dtype, rngs)
        self.blocks = stack(lambda r: Block(config, dtype, r), config.num_layers, rngs)
        self.head = Head(config, out_dim, dtype, rngs)

    def __call__(self, images_BHWC: jax.Array, name: str, dtype: str, remat: str, layout: Layout) -> jax.Array:
        """(B, height, width, 3) float32 to (B, P, O) of `dtype`; `name` is the path of this module in the model.

        Patches and positions are computed in float32.
        """
        with jax.named_scope("patches"):
            x_BPD = fetch(self.patches, f"{name}/patches", layout, "float32")(images_BHWC).astype(jnp.dtype(dtype))
            x_BPD = layout.activation(x_BPD, ("batch", "seq", "embed"))
        graphdef, params = nnx.split(self.blocks)

        def body(x_BPD, params):
            return nnx.merge(graphdef, layout.weights(f"{name}/blocks", params, dtype))(x_BPD, layout), None

        x_BPD, _ = jax.lax.scan(layout.scanned(body, remat), x_BPD, nnx.to_pure_dict(params))
        with jax.named_scope("head"):
            return fetch(self.head, f"{name}/head", layout, dtype)(x_BPD)

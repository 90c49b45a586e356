"""pi0 (arXiv:2410.24164) and pi0.5 (arXiv:2504.16054): chunks of actions by flow matching, given images, prompt and state.

A batch holds `image/<camera>` (B, height, width, 3), uint8 or float32 in [-1, 1], `image_mask/<camera>` (B,) bool (absent:
valid), `tokens` (B, L) int32 and `token_mask` (B, L) bool, `state` (B, A), `actions` (B, T, A), and where parts of them are
filled up `action_is_pad` (B, T) and `action_dim_mask` (B, A), True where a dimension is real.

Time runs from 1 (noise) to 0 (actions). Shape letters: B batch, P prefix positions (images, then prompt), S suffix positions
(state, then actions), T actions of a chunk, A action dimension, D dimension of an expert.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from sharder.config import Pi0Config
from sharder.models.gemma import Cache, Gemma
from sharder.models.layers import fetch, normal, param, zeros
from sharder.models.siglip import Siglip
from sharder.ops.attention_backends import attend
from sharder.ops.augment import augment
from sharder.ops.layout import SINGLE, Layout
from sharder.ops.linear import add_bias, linear
from sharder.sharding.axes import AxisRules

LONGEST_PERIOD, SHORTEST_PERIOD = 4.0, 4e-3
"""Of the sines that encode the time."""
TIME_POWER, TIME_SCALE, TIME_SHIFT = 1.5, 0.999, 0.001
"""Time is Beta(1.5, 1), whose distribution function is t**1.5, scaled and shifted away from 0."""
FEATURES = ("action_in", "state", "time_in", "time_out")


class Tokens(NamedTuple):
    """A stretch of the sequence."""

    tokens: jax.Array
    """(B, n, D)"""
    mask: jax.Array
    """(B, n) bool, False where filled up."""
    starts_block: jax.Array
    """(n,) bool, True where a block begins that what comes before must not see."""


class Dense(nnx.Module):
    def __init__(self, shape: tuple[int, int], axes: tuple[str, str], dtype: str, rngs: nnx.Rngs):
        self.kernel = param(rngs, normal(shape[0] ** -0.5), dtype, shape, axes)
        self.bias = param(rngs, zeros, dtype, shape[1:], axes[1:])

    def __call__(self, x: jax.Array) -> jax.Array:
        return add_bias(linear(x, self.kernel[...]), self.bias[...])


def encode_time(time_B: jax.Array, dim: int) -> jax.Array:
    """(B,) to (B, dim) float32: sines, then cosines, of periods that grow geometrically."""
    fraction = jnp.linspace(0.0, 1.0, dim // 2, dtype=jnp.float32)
    period = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD) ** fraction
    angles = time_B.astype(jnp.float32)[:, None] * (2 * math.pi / period)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def block_causal(mask_BT: jax.Array, starts_block: jax.Array) -> jax.Array:
    """(B, T, T), True where the key is valid, as is the query, and does not lie in a later block."""
    block = jnp.cumsum(starts_block)
    return (block[None, :] <= block[:, None])[None] & mask_BT[:, None, :] & mask_BT[:, :, None]


def to_unit_range(image: jax.Array) -> jax.Array:
    """uint8 to float32 in [-1, 1]; float32 stays."""
    return image.astype(jnp.float32) / 255.0 * 2.0 - 1.0 if image.dtype == jnp.uint8 else image


def draw_noise_and_time(keys_B: jax.Array, shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Normal noise (B, *shape) and time (B,), float32, each from the example's own key."""

    def one(key):
        uniform = jax.random.uniform(jax.random.fold_in(key, 1))
        return jax.random.normal(jax.random.fold_in(key, 0), shape), uniform ** (1 / TIME_POWER) * TIME_SCALE + TIME_SHIFT

    return jax.vmap(one)(keys_B)


def real(batch: dict, numbers_BTA: jax.Array) -> jax.Array:
    """The numbers, and zeros where steps or dimensions of the batch's actions are filled up."""
    if "action_is_pad" in batch:
        numbers_BTA = numbers_BTA * ~batch["action_is_pad"][:, :, None]
    if "action_dim_mask" in batch:
        numbers_BTA = numbers_BTA * batch["action_dim_mask"][:, None, :]
    return numbers_BTA


def keys_of_content(actions_BTA: jax.Array) -> jax.Array:
    """One key for each example from the bits of its actions: the same noise wherever, whenever it is evaluated."""
    words = jax.lax.bitcast_convert_type(actions_BTA.astype(jnp.float32), jnp.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.key(0), words.reshape(words.shape[0], -1).sum(1, dtype=jnp.uint32)
    )


class Pi0(nnx.Module):
    axis_rules = AxisRules(
        names=frozenset({
            "layers", "vocab", "positions", "embed", "projection", "modulation", "heads", "kv_heads", "head_dim", "mlp", "rank",
            "patch_height", "patch_width", "channels", "action", "features",
        }),
        tensor=("heads", "mlp"),
        storage=("embed", "mlp", "head_dim", "projection", "modulation", "action"),
    )  # fmt: skip
    undecayed_axes = frozenset({"positions"})
    tokens_per_example = False

    def __init__(self, config: Pi0Config, rngs: nnx.Rngs):
        self.config = config
        dtype, A, D = config.param_dtype, config.action_dim, config.action_expert.embed_dim
        self.adaptive = config.variant == "pi05"
        self.vision = Siglip(config.vision, config.image_size, config.backbone.embed_dim, dtype, rngs)
        self.llm = Gemma(
            {"backbone": config.backbone, "action": config.action_expert}, frozenset({"action"} if self.adaptive else ()),
            config.num_layers, (config.num_heads, config.num_kv_heads, config.head_dim), config.vocab_size, dtype, rngs,
        )  # fmt: skip
        self.action_in = Dense((A, D), ("action", "embed"), dtype, rngs)
        self.time_in = Dense((D if self.adaptive else 2 * D, D), ("features", "embed"), dtype, rngs)
        self.time_out = Dense((D, D), ("features", "embed"), dtype, rngs)
        self.action_out = Dense((D, A), ("embed", "action"), dtype, rngs)
        if not self.adaptive:
            self.state = Dense((A, D), ("action", "embed"), dtype, rngs)

    def _dense(self, name: str, layout: Layout) -> Dense:
        """One of the small projections, which are computed in float32."""
        return fetch(getattr(self, name), name, layout, "float32")

    def prefix(self, batch: dict, layout: Layout = SINGLE) -> Tokens:
        """Images of all cameras, then the prompt; everything in it sees everything."""
        config = self.config
        images = [to_unit_range(batch[f"image/{camera}"]) for camera in config.cameras]
        B = images[0].shape[0]
        stacked = jnp.stack(images, axis=1).reshape(B * len(images), *images[0].shape[1:])
        with jax.named_scope("vision"):
            encoded = self.vision(stacked, "vision", config.compute_dtype, config.remat, layout)
        image_tokens = encoded.reshape(B, -1, encoded.shape[-1])
        masks = [batch.get(f"image_mask/{camera}", jnp.ones(B, bool)) for camera in config.cameras]
        image_mask = jnp.repeat(jnp.stack(masks, axis=1), self.vision.num_patches, axis=1)
        with jax.named_scope("embed"):
            prompt = self.llm.embed(batch["tokens"], "llm", config.compute_dtype, layout)
        tokens = jnp.concatenate([image_tokens, prompt], axis=1)
        mask = jnp.concatenate([image_mask, batch["token_mask"]], axis=1)
        return Tokens(layout.activation(tokens, ("batch", "seq", "embed")), mask, jnp.zeros(tokens.shape[1], bool))

    def suffix(self, state_BA, noisy_BTA, time_B, layout: Layout = SINGLE) -> tuple[Tokens, jax.Array | None]:
        """State (pi0 only) and noisy actions, float32, and the condition (B, D) of the adaptive norms (pi0.5 only)."""
        with jax.named_scope("suffix"):
            actions = self._dense("action_in", layout)(noisy_BTA)
            B, T, D = actions.shape
            time_in, time_out = self._dense("time_in", layout), self._dense("time_out", layout)
            time_BD = encode_time(time_B, D)
            first = jnp.arange(T) == 0
            if self.adaptive:
                condition = jax.nn.silu(time_out(jax.nn.silu(time_in(time_BD))))
                return Tokens(actions, jnp.ones((B, T), bool), first), condition
            both = jnp.concatenate([actions, jnp.broadcast_to(time_BD[:, None], actions.shape)], axis=-1)
            actions = time_out(jax.nn.silu(time_in(both)))
            state = self._dense("state", layout)(state_BA)[:, None]
            tokens = jnp.concatenate([state, actions], axis=1)
            return Tokens(tokens, jnp.ones((B, T + 1), bool), jnp.concatenate([jnp.ones(1, bool), first])), None

    def _llm(self, xs: dict, condition, positions, mask, layout: Layout, **cache):
        config = self.config

        def backend(q, k, v, mask):
            return attend(config.attention, q, k, v, mask, scale=config.head_dim**-0.5)

        conditions = {} if condition is None else {"action": condition}
        return self.llm(
            xs,
            conditions,
            backend,
            positions,
            mask,
            name="llm",
            dtype=config.compute_dtype,
            remat=config.remat,
            layout=layout,
            **cache,
        )

    def velocity(self, suffix_out: jax.Array, layout: Layout = SINGLE) -> jax.Array:
        """(B, T, A) float32 from the action expert's output (B, S, D)."""
        with jax.named_scope("action_out"):
            return self._dense("action_out", layout)(suffix_out[:, -self.config.action_horizon :].astype(jnp.float32))

    def outputs(self, batch: dict, noisy_BTA, time_B, layout: Layout = SINGLE) -> dict[str, jax.Array]:
        """Everything on the way from a batch and noisy actions to their velocity, by name."""
        prefix = self.prefix(batch, layout)
        suffix, condition = self.suffix(batch["state"], noisy_BTA, time_B, layout)
        mask = jnp.concatenate([prefix.mask, suffix.mask], axis=1)
        positions = jnp.cumsum(mask, axis=1) - 1
        visible = block_causal(mask, jnp.concatenate([prefix.starts_block, suffix.starts_block]))
        out, _ = self._llm({"backbone": prefix.tokens, "action": suffix.tokens}, condition, positions, visible, layout)
        found = {
            "prefix_tokens": prefix.tokens, "prefix_mask": prefix.mask, "suffix_tokens": suffix.tokens,
            "suffix_mask": suffix.mask,
            "prefix_out": out["backbone"], "suffix_out": out["action"], "velocity": self.velocity(out["action"], layout),
        }  # fmt: skip
        return found if condition is None else found | {"adarms_cond": condition}

    def flow_losses(self, batch: dict, noise_BTA, time_B, layout: Layout = SINGLE) -> tuple[jax.Array, jax.Array, dict]:
        """Per example the squared error of the velocity, summed over steps and averaged over dimensions, its weight (B,), and
        `outputs`."""
        actions = batch["actions"].astype(jnp.float32)
        noisy = time_B[:, None, None] * noise_BTA + (1 - time_B[:, None, None]) * actions
        found = self.outputs(batch, noisy, time_B, layout)
        with jax.named_scope("loss"):
            errors = jnp.square(found["velocity"] - (noise_BTA - actions))
            everything = jnp.ones(errors.shape, jnp.float32)
            counted = real(batch, everything) if self.config.loss_mask == "padded" else everything
            num_dims = errors.shape[2]
            return (errors * counted).sum((1, 2)) / num_dims, counted.sum((1, 2)) / num_dims, found

    def augmented(self, batch: dict, keys_B: jax.Array) -> dict:
        """The batch with pictures changed at random; a camera on a wrist keeps its geometry, one that is masked stays black."""
        changed = {}
        for camera in self.config.cameras:
            image_BHWC = to_unit_range(batch[f"image/{camera}"])
            valid_B = batch.get(f"image_mask/{camera}", jnp.ones(image_BHWC.shape[0], bool))
            with jax.named_scope("augment"):
                new = augment(image_BHWC, keys_B, geometric="wrist" not in camera)
            changed[f"image/{camera}"] = jnp.where(valid_B[:, None, None, None], new, image_BHWC)
        return batch | changed

    def losses(self, batch: dict, keys_B: jax.Array | None, layout: Layout = SINGLE) -> tuple[jax.Array, jax.Array]:
        """`flow_losses` at noise and time drawn from one key per example; without keys, from the content of the example.

        With keys, which is in training, the pictures are changed at random where the config says so.
        """
        if keys_B is not None and self.config.augment:
            batch = self.augmented(batch, keys_B)
        keys_B = keys_of_content(batch["actions"]) if keys_B is None else keys_B
        noise, time = draw_noise_and_time(keys_B, (self.config.action_horizon, self.config.action_dim))
        return self.flow_losses(batch, noise, time, layout)[:2]

    def sample(self, batch: dict, noise_BTA: jax.Array, num_steps: int = 10, *, layout: Layout = SINGLE) -> jax.Array:
        """Actions (B, T, A) by `num_steps` Euler steps from noise; images and prompt are read once."""
        prefix = self.prefix(batch, layout)
        seen = prefix.mask[:, :, None] & prefix.mask[:, None, :]
        positions = jnp.cumsum(prefix.mask, axis=1) - 1
        _, cache = self._llm({"backbone": prefix.tokens}, None, positions, seen, layout, keep_cache=True)

        def step(noisy, index):
            time = 1 - index.astype(jnp.float32) / num_steps
            velocity = self._denoise(batch["state"], noisy, time, prefix.mask, cache, layout)
            return noisy - velocity / num_steps, None

        return jax.lax.scan(step, noise_BTA.astype(jnp.float32), jnp.arange(num_steps))[0]

    def sampling_errors(self, batch: dict, layout: Layout = SINGLE) -> tuple[jax.Array, jax.Array]:
        """Per example the absolute error of actions sampled from noise of the example's own, summed over all that is not filled
        up, and of how many numbers (B,)."""
        noise, _ = draw_noise_and_time(keys_of_content(batch["actions"]), batch["actions"].shape[1:])
        sampled = self.sample(batch, noise, layout=layout)
        errors = jnp.abs(sampled - batch["actions"].astype(jnp.float32))
        return real(batch, errors).sum((1, 2)), real(batch, jnp.ones_like(errors)).sum((1, 2))

    def _denoise(self, state_BA, noisy_BTA, time, prefix_mask, cache: Cache, layout: Layout) -> jax.Array:
        """Velocity of the noisy actions at `time` (scalar), given keys and values of the prefix."""
        B = noisy_BTA.shape[0]
        suffix, condition = self.suffix(state_BA, noisy_BTA, jnp.broadcast_to(time, (B,)), layout)
        among = block_causal(suffix.mask, suffix.starts_block)
        before = jnp.broadcast_to(prefix_mask[:, None], (B, among.shape[1], prefix_mask.shape[1]))
        positions = prefix_mask.sum(1)[:, None] + jnp.cumsum(suffix.mask, axis=1) - 1
        visible = jnp.concatenate([before, among], axis=2)
        out, _ = self._llm({"action": suffix.tokens}, condition, positions, visible, layout, cache=cache)
        return self.velocity(out["action"], layout)

"""AdamW with warm-up and cosine decay, and the update of a state from given gradients.

optax supplies the transformations; what is ours is that the arithmetic is float32 whatever the parameters' dtype,
and that the gradient norm comes from outside, so that every engine may sum it in its own order.
"""

import jax
import jax.numpy as jnp
import optax

from sharder.config import OptimizerConfig
from sharder.models.build import Declared, unflatten


def schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate by number of completed steps: linear from 0, then a half cosine to final_lr_fraction of the peak."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        end_value=config.learning_rate * config.final_lr_fraction,
    )


def decay_mask(declared: Declared) -> dict:
    """True for the parameters that weight decay applies to: matrices, not biases, norms or learned positions."""

    def decays(axes: tuple[str, ...]) -> bool:
        # Stacking adds "layers"; what is left of a norm or a bias has no input dimension to decay along.
        return len([a for a in axes if a not in ("layers", "heads", "kv_heads")]) > 1 and not declared.undecayed_axes & set(axes)

    return unflatten({path: decays(decl.axes) for path, decl in declared.params.items()})


def make_optimizer(config: OptimizerConfig, declared: Declared) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101) without clipping, which `clipped` does."""
    return optax.chain(
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(declared)),
        optax.scale_by_learning_rate(schedule(config)),
    )


def to_float32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def global_norm(grads) -> jax.Array:
    """Square root of the sum of all squares, float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))


def clipped(grads, norm: jax.Array, clip_norm: float | None):
    """Float32 gradients scaled so that their global norm, which is `norm`, does not exceed `clip_norm`."""
    grads = to_float32(grads)
    if clip_norm is None:
        return grads
    scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    return jax.tree.map(lambda g: g * scale, grads)


def moving_average(average, params, decay: float):
    """decay x average + (1 - decay) x params, float32."""
    return jax.tree.map(lambda a, p: a + (1.0 - decay) * (p.astype(jnp.float32) - a), average, params)

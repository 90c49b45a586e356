"""AdamW, Adafactor and Muon with warm-up and cosine decay, and the update of a state from given gradients.

optax supplies the transformations; what is ours is that the arithmetic is float32 whatever the parameters' dtype,
and that the gradient norm comes from outside, so that every engine may sum it in its own order.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from sharder.config import OptimizerConfig
from sharder.models.build import Declared, unflatten
from sharder.sharding.plan import LeafPlan, Plan
from sharder.train.matrices import is_hidden_matrix, orthogonalized, scale_by_factored_moments, side_sizes, side_spec, sides
from sharder.train.moments import scale_by_narrow_adam

Place = Callable[[jax.Array], jax.Array]


def schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate by number of completed steps: linear from initial_lr_fraction of the peak, then a half cosine to
    final_lr_fraction of it."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate * config.initial_lr_fraction,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        end_value=config.learning_rate * config.final_lr_fraction,
    )


def decay_mask(declared: Declared) -> dict:
    """True for the parameters that weight decay applies to: matrices, not biases, norms or learned positions."""

    def decays(axes: tuple[str, ...]) -> bool:
        return len(sides(axes)) > 1 and not declared.undecayed_axes & set(axes)

    return unflatten({path: decays(decl.axes) for path, decl in declared.params.items()})


def _adamw(config: OptimizerConfig, declared: Declared, place: Place) -> optax.GradientTransformation:
    if config.moments == "float32":
        return optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    return scale_by_narrow_adam(config, declared)


def _adafactor(config: OptimizerConfig, declared: Declared, place: Place) -> optax.GradientTransformation:
    return scale_by_factored_moments(declared.params, config.factored_min_dim)


def _muon(config: OptimizerConfig, declared: Declared, place: Place) -> optax.GradientTransformation:
    muon = optax.chain(optax.trace(decay=config.momentum, nesterov=True), orthogonalized(declared.params, place))
    labels = unflatten({p: "muon" if is_hidden_matrix(decl) else "adamw" for p, decl in declared.params.items()})
    return optax.partition({"muon": muon, "adamw": _adamw(config, declared, place)}, labels)


OPTIMIZERS = {"adamw": _adamw, "adafactor": _adafactor, "muon": _muon}
"""From mean gradients to the update before weight decay and learning rate."""


def make_optimizer(config: OptimizerConfig, declared: Declared, place: Place = lambda x: x) -> optax.GradientTransformation:
    """The rule of that name with decoupled weight decay (arXiv:1711.05101), without clipping, which `clipped` does.

    `place` lays out stacked matrices (layers, rows, columns) for Muon's iteration; the state does not depend on it.
    """
    return optax.chain(
        OPTIMIZERS[config.name](config, declared, place),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(declared)),
        optax.scale_by_learning_rate(schedule(config)),
    )


def owner(path: str, plan: Plan) -> LeafPlan | None:
    """The parameter that an array of optimizer state belongs to: the longest parameter path that `path` ends with."""
    parts = path.split("/")
    return next((plan.leaves[p] for p in ("/".join(parts[i:]) for i in range(len(parts))) if p in plan.leaves), None)


def optimizer_spec(path: str, shape: tuple[int, ...], plan: Plan) -> PartitionSpec:
    """Where an array of optimizer state lives, `path` as in opt_state/0/mu/blocks/q: with its parameter in the update layout.

    Adafactor's averages over rows and columns are divided as the side of the matrix that they run along; exponents that blocks of
    moments share, as their parameter; what belongs to no parameter, counters, is whole. Any other shape is an error, never
    silently whole.
    """
    leaf = owner(path, plan)
    if leaf is None or leaf.decl.shape == shape:
        assert leaf is not None or shape == (), f"{path} {shape} belongs to no parameter"
        return PartitionSpec() if leaf is None else leaf.update
    kind = path.removesuffix(leaf.path).rstrip("/").split("/")[-1]
    if kind in ("mu_exponents", "nu_exponents"):
        assert len(shape) == len(leaf.decl.shape) and sum(a != b for a, b in zip(shape, leaf.decl.shape)) == 1, (path, shape)
        return leaf.update
    side = {"row": 0, "col": 1}.get(kind)
    assert side is not None and shape[1:] == (side_sizes(leaf.decl)[side],), (
        f"no rule for {path} {shape} of {leaf.path} {leaf.decl.shape}"
    )
    return side_spec(leaf.decl, leaf.update, side)


def to_float32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def sums_of_squares(grads):
    """Of each leaf, float32; infinite or NaN where any element is, or its square."""
    return jax.tree.map(lambda g: jnp.sum(jnp.square(g.astype(jnp.float32))), grads)


def global_norm(grads) -> jax.Array:
    """Square root of the sum of all squares, float32."""
    return jnp.sqrt(sum(jax.tree.leaves(sums_of_squares(grads))))


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

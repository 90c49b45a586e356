"""The declarative engine: one step function for every policy, with placement inferred from pinned layouts.

Parameters come in their storage layout, blocks ask for them in the compute layout, gradients leave in the storage
layout (with a single accumulation slot at once in the update layout), the optimizer runs in the update layout, and
parameters return to storage.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharder.models.build import unflatten
from sharder.sharding.compute import ComputeLayout
from sharder.sharding.mesh import AXES
from sharder.train.fingerprint import digests
from sharder.train.optimizer import clipped, global_norm, make_optimizer, moving_average, schedule, to_float32
from sharder.train.setup import Setup
from sharder.train.state import TrainState, by_path

Metrics = dict[str, jax.Array]


def stop_sharding(mesh: Mesh) -> NamedSharding:
    """Layout of the stop flags: one int32 for each device."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def example_keys(seed: jax.Array, step: jax.Array, slots: jax.Array) -> jax.Array:
    """One random key for each example of the global batch, from (seed, step, place in the batch) and nothing else."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, slots)


def apply_update(setup: Setup, state: TrainState, grads, norm: jax.Array) -> TrainState:
    """The optimizer on gradients of the mean loss whose global norm is `norm`, everything in the update layout."""
    config = setup.config
    optimizer = make_optimizer(config.optimizer, setup.declared)
    params32 = to_float32(state.params)
    updates, opt_state = optimizer.update(clipped(grads, norm, config.optimizer.clip_norm), state.opt_state, params32)
    new32 = optax.apply_updates(params32, updates)
    params = jax.tree.map(lambda new, old: new.astype(old.dtype), new32, state.params)
    ema = None if state.ema is None else moving_average(state.ema, params, config.train.ema_decay)
    return TrainState(state.step + 1, params, opt_state, ema)


def accumulate(setup: Setup, params, batch: dict, seed: jax.Array, step: jax.Array):
    """Sums over all slots: gradients of the summed loss, the summed loss and the summed weight."""
    layout = setup.batch
    # Accumulators live in the storage layout; without accumulation gradients go straight to where they are used.
    gradient_layout = "update" if layout.num_slots == 1 else "storage"
    compute = ComputeLayout(setup.mesh, setup.plan, gradient_layout)
    gradient_shardings = unflatten(setup.plan.shardings(gradient_layout, setup.mesh))

    def slot_loss(params, slot_batch, slot):
        keys_B = example_keys(seed, step, slot * layout.slot_size + jnp.arange(layout.slot_size))
        losses_B, weights_B = nnx.merge(setup.declared.graphdef, params).losses(slot_batch, keys_B, compute)
        return losses_B.sum(), weights_B.sum()

    def slot_gradients(slot_batch, slot):
        (loss, weight), grads = jax.value_and_grad(slot_loss, has_aux=True)(params, slot_batch, slot)
        return with_sharding_constraint(grads, gradient_shardings), loss, weight

    if layout.num_slots == 1:
        return slot_gradients(jax.tree.map(lambda x: x[0], batch), 0)

    def body(sums, scanned):
        grads, loss, weight = slot_gradients(*scanned)
        total = jax.tree.map(lambda s, g: s + g.astype(jnp.float32), sums[0], grads)
        return (with_sharding_constraint(total, gradient_shardings), sums[1] + loss, sums[2] + weight), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    start = (with_sharding_constraint(zeros, gradient_shardings), jnp.float32(0), jnp.float32(0))
    return jax.lax.scan(body, start, (batch, jnp.arange(layout.num_slots)))[0]


def make_train_step(setup: Setup) -> Callable[[TrainState, dict, jax.Array, jax.Array], tuple[TrainState, Metrics]]:
    """The compiled step (state, batch, seed, stop flags) -> (state, metrics); the state is donated.

    Metrics are scalars, but for `digests` (n, 2), the fingerprints of the new state's leaves by sorted path.
    """
    update_shardings = unflatten(setup.plan.shardings("update", setup.mesh))
    rate = schedule(setup.config.optimizer)

    def train_step(state: TrainState, batch: dict, seed: jax.Array, stop: jax.Array):
        grads, loss_sum, weight_sum = accumulate(setup, state.params, batch, seed, state.step)
        with jax.named_scope("optimizer"):
            grads = with_sharding_constraint(jax.tree.map(lambda g: g / weight_sum, grads), update_shardings)
            norm = global_norm(grads)
            placed = TrainState(
                state.step, with_sharding_constraint(state.params, update_shardings), state.opt_state, state.ema
            )
            new = with_sharding_constraint(apply_update(setup, placed, grads, norm), setup.state_shardings)
        with jax.named_scope("fingerprint"):
            leaves = digests(by_path(new))
        metrics = {
            "loss": loss_sum / weight_sum,
            "grad_norm": norm,
            "learning_rate": rate(state.step),
            "digests": leaves,
            "stop": stop.max(),
        }
        return new, metrics

    return jax.jit(
        train_step,
        in_shardings=(setup.state_shardings, setup.batch.sharding, setup.replicated(), stop_sharding(setup.mesh)),
        out_shardings=(setup.state_shardings, setup.replicated()),
        donate_argnums=0,
    )

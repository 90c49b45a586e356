"""The declarative engine: one step function for every policy, with placement inferred from pinned layouts.

Parameters come in their storage layout, blocks ask for them in the compute layout, gradients leave in the storage
layout (with a single accumulation slot at once in the update layout), the optimizer runs in the update layout, and
parameters return to storage.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharder.models.build import flatten, merged
from sharder.ops.layout import Layout
from sharder.sharding.compute import ComputeLayout
from sharder.sharding.mesh import AXES
from sharder.sharding.policy import stacked_matrices
from sharder.train.fingerprint import digests, rows_digest
from sharder.train.optimizer import clipped, make_optimizer, moving_average, schedule, sums_of_squares, to_float32
from sharder.train.setup import Setup
from sharder.train.state import TrainState, by_path

Metrics = dict[str, jax.Array]


def stop_sharding(mesh: Mesh) -> NamedSharding:
    """Layout of the stop flags: one int32 for each device."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def stop_flags(mesh: Mesh, value: bool) -> jax.Array:
    """The flags of this process's devices; their maximum over all is whether any process was asked to stop."""
    return jax.make_array_from_process_local_data(stop_sharding(mesh), np.full(jax.local_device_count(), value, np.int32))


def example_keys(seed: jax.Array, step: jax.Array, slots: jax.Array) -> jax.Array:
    """One random key for each example of the global batch, from (seed, step, place in the batch) and nothing else."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, slots)


def place_matrices(matrices_LRC: jax.Array, setup: Setup) -> jax.Array:
    """Whole matrices, each on as few devices as their number allows."""
    spec = stacked_matrices(matrices_LRC.shape[0], setup.plan.mesh)
    return with_sharding_constraint(matrices_LRC, NamedSharding(setup.mesh, spec))


def apply_update(setup: Setup, state: TrainState, grads, norm: jax.Array) -> TrainState:
    """The optimizer on gradients of the mean loss whose global norm is `norm`, everything in the update layout."""
    config = setup.config
    optimizer = make_optimizer(config.optimizer, setup.declared.trained, lambda matrices: place_matrices(matrices, setup))
    trained = setup.declared.only_trained(state.params)
    params32 = to_float32(trained)
    updates, opt_state = optimizer.update(clipped(grads, norm, config.optimizer.clip_norm), state.opt_state, params32)
    new32 = optax.apply_updates(params32, updates)
    new = jax.tree.map(lambda new, old: new.astype(old.dtype), new32, trained)
    ema = None if state.ema is None else moving_average(state.ema, new, config.train.ema_decay)
    return TrainState(state.step + 1, merged(new, state.params) if setup.declared.frozen else new, opt_state, ema)


def accumulate(
    graphdef: nnx.GraphDef, layout: Layout, pin: Callable, params, batch: dict, seed, step, first_example, frozen=None
):
    """Sums over all accumulation slots: gradients of the summed loss, the summed loss, the summed weight, and the
    digest of the examples.

    `frozen`: parameters of which there are no gradients, None: there are no such.

    `batch` holds arrays (slots, slot_size, ...), whose examples have places first_example .. in the global batch.
    `pin` fixes the layout of gradients; with several slots they are accumulated in float32.
    """
    num_slots, slot_size = jax.tree.leaves(batch)[0].shape[:2]

    def slot_loss(params, slot_batch, slot):
        keys_B = example_keys(seed, step, first_example + slot * slot_size + jnp.arange(slot_size))
        whole = params if frozen is None else merged(params, frozen)
        losses_B, weights_B = nnx.merge(graphdef, whole).losses(slot_batch, keys_B, layout)
        return losses_B.sum(), weights_B.sum()

    def slot_gradients(slot_batch, slot):
        (loss, weight), grads = jax.value_and_grad(slot_loss, has_aux=True)(params, slot_batch, slot)
        with jax.named_scope("fingerprint"):
            digest = rows_digest(slot_batch, first_example + slot * slot_size)
        return pin(grads), loss, weight, digest

    if num_slots == 1:
        return slot_gradients(jax.tree.map(lambda x: x[0], batch), 0)

    def body(sums, scanned):
        grads, *others = slot_gradients(*scanned)
        with jax.named_scope("gradient_sums"):
            total = jax.tree.map(lambda s, g: s + g.astype(jnp.float32), sums[0], grads)
            return (pin(total), *(s + x for s, x in zip(sums[1:], others))), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    nothing = (pin(zeros), jnp.float32(0), jnp.float32(0), jnp.zeros(2, jnp.uint32))
    return jax.lax.scan(body, nothing, (batch, jnp.arange(num_slots)))[0]


def only_if_finite(
    setup: Setup, old: TrainState, new: TrainState, finite: jax.Array, halted: jax.Array
) -> tuple[TrainState, jax.Array]:
    """The new state where the step was finite, else the old one; and whether the run is halted.

    A run that stops is halted from its first step that is not finite on: the steps that were dispatched before the host could
    see it change nothing either. A run that skips goes on: the step counts, and with it the schedule, but nothing is learnt.
    """
    skips = setup.config.train.on_nonfinite == "skip"
    halted = halted if skips else halted | ~finite
    keep = finite if skips else ~halted
    kept = jax.tree.map(lambda n, o: jax.lax.select(keep, n, o), new, old)
    if skips:
        kept = TrainState(new.step, kept.params, (*kept.opt_state[:-1], new.opt_state[-1]), kept.ema)
    return kept, halted


def finish_step(setup: Setup, state: TrainState, grads, norm, loss, batch_digest, stop, halted) -> tuple[TrainState, Metrics]:
    """Update, return to the layouts at rest, fingerprint: the second half of a step, the same in both engines.

    `grads` are those of the mean loss, in the update layout, and `norm` their global norm; `batch_digest` is handed on.
    Where `halted`, or where loss or norm is not finite, the state stays as it was.
    """
    # What is frozen stays where it is.
    update_shardings = merged(setup.gradient_shardings("update"), setup.state_shardings.params)
    with jax.named_scope("optimizer"):
        params = with_sharding_constraint(state.params, update_shardings)
        placed = TrainState(state.step, params, state.opt_state, state.ema)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        new, halted = only_if_finite(setup, placed, apply_update(setup, placed, grads, norm), finite, halted)
        # Chosen where they were computed: else both candidates are made whole first.
        new = replace(new, params=with_sharding_constraint(new.params, update_shardings))
        new = with_sharding_constraint(new, setup.state_shardings)
    with jax.named_scope("fingerprint"):
        leaf_digests = digests(by_path(new))
    rate = schedule(setup.config.optimizer)(state.step)
    metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rate, "stop": stop.max(), "finite": finite, "halted": halted}
    return new, metrics | {"digests": leaf_digests, "batch_digest": batch_digest}


def compile_step(setup: Setup, arguments: tuple) -> Callable[..., tuple[TrainState, Metrics]]:
    """The compiled step for arguments like these."""
    return lower_step(setup, arguments).compile()


def lower_step(setup: Setup, arguments: tuple) -> jax.stages.Lowered:
    """The step (state, batch, seed, stop flags, halted) -> (state, metrics) for arguments like these; the state is donated.

    Metrics are scalars, but for `digests` (n, 2), the fingerprints of the new state's leaves by sorted path, `batch_digest` (2,),
    that of the examples, and `finite_leaves` (m,), whether every element of a gradient is, by sorted path. `halted` is that of the
    step before, and false at first.
    """
    # Accumulators live in the storage layout; without accumulation gradients go straight to where they are used.
    gradient_layout = "update" if setup.batch.num_slots == 1 else "storage"
    compute = ComputeLayout(setup.mesh, setup.plan, gradient_layout)
    declared = setup.declared
    gradient_shardings, update_shardings = (setup.gradient_shardings(layout) for layout in (gradient_layout, "update"))

    def train_step(state: TrainState, batch: dict, seed: jax.Array, stop: jax.Array, halted: jax.Array):
        pin = lambda grads: with_sharding_constraint(grads, gradient_shardings)  # noqa: E731
        trained, frozen = declared.only_trained(state.params), state.params if declared.frozen else None
        sums = accumulate(declared.graphdef, compute, pin, trained, batch, seed, state.step, 0, frozen)
        grads, loss_sum, weight_sum, batch_digest = sums
        with jax.named_scope("gradient_sums"):
            grads = with_sharding_constraint(jax.tree.map(lambda g: g / weight_sum, grads), update_shardings)
            squares = sums_of_squares(grads)
            norm = jnp.sqrt(sum(jax.tree.leaves(squares)))
            finite_leaves = jnp.isfinite(jnp.stack([x for _, x in sorted(flatten(squares).items())]))
        new, metrics = finish_step(setup, state, grads, norm, loss_sum / weight_sum, batch_digest, stop, halted)
        return new, metrics | {"finite_leaves": finite_leaves}

    jitted = jax.jit(
        train_step,
        in_shardings=(
            setup.state_shardings,
            setup.batch.sharding,
            setup.replicated(),
            stop_sharding(setup.mesh),
            setup.replicated(),
        ),
        out_shardings=(setup.state_shardings, setup.replicated()),
        donate_argnums=0,
    )
    return jitted.lower(*arguments)

"""The mean loss over a held-out dataset, and of a policy how far what it samples lies from what was recorded."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from sharder.data.dataset import Dataset
from sharder.data.loader import sequential_batches
from sharder.sharding.compute import ComputeLayout
from sharder.train.setup import Setup
from sharder.train.step import stop_flags, stop_sharding

EvalStep = Callable[[object, dict, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


def make_eval_step(setup: Setup) -> EvalStep:
    """The compiled evaluation (parameters, batch, stop flags) -> (summed loss, summed weight, whether a flag was set), without
    dropout or update."""
    return _compiled(setup, lambda model, batch, layout: model.losses(batch, None, layout))


def make_sampling_step(setup: Setup) -> EvalStep:
    """The same of the absolute errors of sampled actions, in units of the model."""
    return _compiled(setup, lambda model, batch, layout: model.sampling_errors(batch, layout))


def _compiled(setup: Setup, measure: Callable) -> EvalStep:
    compute = ComputeLayout(setup.mesh, setup.plan, "storage")

    def eval_step(params, batch, stop):
        model = nnx.merge(setup.declared.graphdef, params)

        def body(sums, slot_batch):
            valid_B = slot_batch.pop("valid")
            losses_B, weights_B = measure(model, slot_batch, compute)
            return (sums[0] + (losses_B * valid_B).sum(), sums[1] + (weights_B * valid_B).sum()), None

        return *jax.lax.scan(body, (jnp.float32(0), jnp.float32(0)), dict(batch))[0], stop.max()

    return jax.jit(
        eval_step,
        in_shardings=(setup.state_shardings.params, setup.batch.sharding, stop_sharding(setup.mesh)),
        out_shardings=setup.replicated(),
    )


class Interrupted(Exception):
    """A process was asked to stop during an evaluation; all processes see it at the same batch."""


def evaluate(
    eval_step: EvalStep, params, dataset: Dataset, setup: Setup, stop: Callable[[], bool] = lambda: False
) -> tuple[float, int]:
    """Mean of what the step measures (the loss in nats), and of how many examples; batches are summed in order, in float64.

    Raises Interrupted where `stop` became true in any process.
    """
    flags = [stop_flags(setup.mesh, value) for value in (False, True)]
    loss = weight = 0.0
    batch_size, limit = setup.batch.num_slots * setup.batch.slot_size, setup.config.train.validation_batches
    for batch in sequential_batches(dataset, setup.batch, limit):
        loss_sum, weight_sum, stopped = jax.device_get(eval_step(params, batch, flags[bool(stop())]))
        if stopped:
            raise Interrupted
        loss, weight = loss + float(loss_sum), weight + float(weight_sum)
    return loss / weight, len(dataset) if limit is None else min(len(dataset), limit * batch_size)

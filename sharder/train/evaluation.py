"""The mean loss over a held-out dataset."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from sharder.data.dataset import Dataset
from sharder.data.loader import sequential_batches
from sharder.sharding.compute import ComputeLayout
from sharder.train.setup import Setup

EvalStep = Callable[[object, dict], tuple[jax.Array, jax.Array]]


def make_eval_step(setup: Setup) -> EvalStep:
    """The compiled evaluation (parameters, batch) -> (summed loss, summed weight), without dropout or update."""
    compute = ComputeLayout(setup.mesh, setup.plan, "storage")

    def eval_step(params, batch):
        model = nnx.merge(setup.declared.graphdef, params)

        def body(sums, slot_batch):
            valid_B = slot_batch.pop("valid")
            losses_B, weights_B = model.losses(slot_batch, None, compute)
            return (sums[0] + (losses_B * valid_B).sum(), sums[1] + (weights_B * valid_B).sum()), None

        return jax.lax.scan(body, (jnp.float32(0), jnp.float32(0)), dict(batch))[0]

    return jax.jit(
        eval_step,
        in_shardings=(setup.state_shardings.params, setup.batch.sharding),
        out_shardings=setup.replicated(),
    )


def evaluate(eval_step: EvalStep, params, dataset: Dataset, setup: Setup) -> tuple[float, int]:
    """Mean loss in nats, and of how many examples; batches are summed in order, in float64."""
    loss = weight = 0.0
    batch_size, limit = setup.batch.num_slots * setup.batch.slot_size, setup.config.train.validation_batches
    for batch in sequential_batches(dataset, setup.batch, limit):
        loss_sum, weight_sum = jax.device_get(eval_step(params, batch))
        loss, weight = loss + float(loss_sum), weight + float(weight_sum)
    return loss / weight, len(dataset) if limit is None else min(len(dataset), limit * batch_size)

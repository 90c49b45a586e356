"""The arguments of a step as shapes on their shardings: what compiling needs, and nothing that has to be allocated."""

import jax
import numpy as np

from sharder.data.open import example_shapes
from sharder.train.exact import ExactStep
from sharder.train.setup import Setup
from sharder.train.state import declare_state
from sharder.train.step import lower_step, stop_sharding


def abstract_arguments(setup: Setup) -> tuple:
    """State, batch, seed, stop flags and `halted` of the run's own step."""
    state = jax.tree.map(_placed, declare_state(setup.config, setup.declared), setup.state_shardings)
    batch = setup.train_batch.abstract(example_shapes(setup.config))
    seed = jax.ShapeDtypeStruct((), np.uint32, sharding=setup.replicated())
    stop = jax.ShapeDtypeStruct((setup.mesh.size,), np.int32, sharding=stop_sharding(setup.mesh))
    return state, batch, seed, stop, jax.ShapeDtypeStruct((), np.bool_, sharding=setup.replicated())


def _placed(x: jax.ShapeDtypeStruct, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def compile_exact(setup: Setup) -> dict[str, str]:
    """The programs of exact mode as text, by name, compiled for the devices of the setup, which must be there."""
    step = ExactStep(setup, setup.workers, abstract_arguments(setup))
    return {name: program.as_text() for name, program in step.programs.items()}


def lower_abstract(setup: Setup) -> jax.stages.Lowered:
    """The declarative training step, traced for the devices of the setup, whether or not they are there."""
    return lower_step(setup, abstract_arguments(setup))

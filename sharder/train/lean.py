"""Exact mode for models of which no device can hold a whole copy: a slot is one program over the mesh.

Parameters are gathered block by block, and a block's gradients are added up over the replicas in the fixed tree before the next
block's are computed (`sharder.sharding.manual`). The program is compiled anew for every mesh, so its bits are the same by
test, not by construction, and for at least two replicas only: a program for a single device is compiled on another path.
They need not be those of the whole copy. Memory of a slot: shards, activations, one block's weights and gradients.
"""

import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sharder.data.loader import WorkerLayout
from sharder.exactness import check_kernels
from sharder.models.build import unflatten
from sharder.ops.ordered import REPLICAS
from sharder.sharding.manual import ManualLayout
from sharder.sharding.policy import only_axes
from sharder.train.kept import Kept
from sharder.train.optimizer import to_float32
from sharder.train.setup import Setup
from sharder.train.state import TrainState
from sharder.train.step import accumulate

Tree = Any


class LeanSlots:
    """A slot: forward and backward of one worker on every replica, block by block, with the ordered sums inside."""

    def __init__(self, setup: Setup, layout: WorkerLayout, state: TrainState, batch: dict, kept: Kept):
        """`state` and `batch` (one slot): arrays or shapes; everything is compiled here."""
        self.setup, self.layout, declared = setup, layout, setup.declared
        self.num_worker_runs = 0
        """How many workers this process has computed."""
        mesh, num_replicas = setup.mesh, setup.plan.mesh.num_replicas
        manual = ManualLayout(setup.plan)
        rows, none = PartitionSpec(REPLICAS), PartitionSpec()

        def slot_sums(params, batch, seed, step, slot):
            worker = slot * num_replicas + jax.lax.axis_index(REPLICAS)
            # What is frozen has no gradient to be added up, and keeps its dtype.
            shards, frozen = to_float32(declared.only_trained(params)), params if declared.frozen else None
            first = worker * layout.worker_size
            grads, *scalars = accumulate(declared.graphdef, manual, lambda g: g, shards, batch, seed, step, first, frozen)
            return grads, *(x[None] for x in scalars)

        specs = unflatten({path: only_axes(leaf.storage, REPLICAS) for path, leaf in setup.plan.leaves.items()})
        program = jax.shard_map(
            slot_sums, mesh=mesh, in_specs=(specs, rows, none, none, none),
            out_specs=(declared.only_trained(specs), rows, rows, rows),
            axis_names=set(REPLICAS), check_vma=False,
        )  # fmt: skip
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)  # noqa: E731
        scalars = [jax.ShapeDtypeStruct((), t, sharding=setup.replicated()) for t in (jnp.uint32, jnp.int32, jnp.int32)]
        out = (setup.gradient_shardings("update"), *[NamedSharding(mesh, rows)] * 3)

        def lower() -> jax.stages.Lowered:
            lowered = jax.jit(program, out_shardings=out).lower(*jax.tree.map(shape, (state.params, batch)), *scalars)
            check_kernels(setup.config, lowered.as_text(), jax.default_backend(), os.environ.get("XLA_FLAGS", ""))
            return lowered

        self._slot = kept.compile("slot", lower)
        self._numbers = [jax.device_put(jnp.int32(i), setup.replicated()) for i in range(layout.num_slots)]
        self.gradient_shapes = jax.tree.map(
            lambda p, s: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=s), declared.only_trained(state.params), out[0]
        )

    @staticmethod
    def gradient(leaf: jax.Array, declared_ndim: int) -> jax.Array:
        return leaf

    @property
    def programs(self) -> dict:
        """What was compiled, by name."""
        return {"slot": self._slot}

    def begin(self, state: TrainState, seed: jax.Array) -> tuple:
        """What all slots of a step share."""
        return state.params, seed, state.step

    def __call__(self, shared: tuple, batch: dict, slot: int) -> tuple[Tree, jax.Array, jax.Array, jax.Array]:
        """Ordered sum of the gradients of this slot's workers; losses, weights and digests, a row for each worker."""
        params, seed, step = shared
        self.num_worker_runs += len(self.setup.mesh.local_devices) // self.setup.plan.mesh.tensor
        return self._slot(params, batch, seed, step, self._numbers[slot])

"""The worker executable of exact mode: forward and backward of one virtual worker, the same binary wherever it runs.

Beside the state a device holds one compute-layout copy of the parameters (under fsdp; dp and zero have it anyway), and the
whole gradient of the worker that runs and of the one whose gradient is being added up.
"""

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharder.data.loader import WorkerLayout
from sharder.exactness import check_kernels
from sharder.models.build import flatten, unflatten
from sharder.ops.layout import SINGLE
from sharder.ops.ordered import REPLICAS, ordered_sum
from sharder.sharding.compute import ComputeLayout
from sharder.sharding.mesh import AXES, make_group_mesh
from sharder.sharding.plan import LeafPlan
from sharder.sharding.policy import storage_dim
from sharder.train.executables import Devices
from sharder.train.kept import Kept
from sharder.train.setup import Setup
from sharder.train.state import TrainState
from sharder.train.step import accumulate

Tree = Any


def local_replicas(mesh: Mesh) -> list[tuple[int, Devices]]:
    """Number and devices (its tensor group) of every replica of this process."""
    groups = mesh.devices.reshape(-1, mesh.devices.shape[-1])
    return [(r, tuple(group)) for r, group in enumerate(groups) if group[0].process_index == jax.process_index()]


class WorkerSlots:
    """A slot: gather once for all slots, the worker on every replica, an ordered sum over the replicas."""

    def __init__(self, setup: Setup, layout: WorkerLayout, state: TrainState, batch: dict, kept: Kept):
        """`state` and `batch` (one slot): arrays or shapes; everything is compiled here."""
        self.setup, self.layout, self.kept = setup, layout, kept
        self.replicas = local_replicas(setup.mesh)
        self.num_worker_runs = 0
        """How often the worker's program ran in this process."""
        self.leaves = list(setup.plan.leaves.values())
        self.trained = setup.trained_leaves
        self._gather = self._compile_gather(state)
        self._workers = kept.compile_for_groups(
            "worker", partial(self._lower_worker, batch), [devices for _, devices in self.replicas]
        )
        self._reduce = self._compile_reduce()

    # What is compiled.

    def _shapes(self, leaves: list[LeafPlan], specs, mesh: Mesh, lead: tuple[int, ...] = (), dtype=None) -> Tree:
        """Arrays of the shapes of these parameters with these specs, by path, behind further leading dimensions."""
        return unflatten(
            {
                leaf.path: jax.ShapeDtypeStruct(
                    lead + leaf.decl.shape, dtype or leaf.decl.dtype, sharding=NamedSharding(mesh, spec)
                )
                for leaf, spec in zip(leaves, specs)
            }
        )

    def _compile_gather(self, state: TrainState):
        if self.setup.plan.policy != "fsdp" or self.setup.plan.mesh.fsdp == 1:
            return lambda params: params

        def gather(params):
            return params

        identity = jax.jit(gather, out_shardings=unflatten(self.setup.plan.shardings("compute", self.setup.mesh)))
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state.params)
        return self.kept.compile("gather", lambda: identity.lower(shapes))

    def _lower_worker(self, batch: dict, devices: Devices) -> jax.stages.Lowered:
        """Forward and backward of one virtual worker on the devices of one replica."""
        mesh = make_group_mesh(devices)
        whole = NamedSharding(mesh, PartitionSpec())
        grouped = len(devices) > 1
        layout = ComputeLayout(mesh, self.setup.plan, "compute", storage="compute") if grouped else SINGLE
        declared = self.setup.declared
        pinned = unflatten({leaf.path: NamedSharding(mesh, leaf.compute) for leaf in self.trained})
        rows_out = unflatten({leaf.path: NamedSharding(mesh, PartitionSpec(None, *leaf.compute)) for leaf in self.trained})

        def worker(params, batch, seed, step, first_example):
            pin = (lambda grads: jax.lax.with_sharding_constraint(grads, pinned)) if grouped else (lambda grads: grads)
            trained, frozen = declared.only_trained(params), params if declared.frozen else None
            sums = accumulate(declared.graphdef, layout, pin, trained, batch, seed, step, first_example, frozen)
            # One row for each replica, to be stacked over replicas without a copy.
            return jax.tree.map(lambda x: x[None], sums)

        num = self.layout.num_microbatches
        rows = {k: jax.ShapeDtypeStruct((num, *x.shape[1:]), x.dtype, sharding=whole) for k, x in batch.items()}
        scalars = [jax.ShapeDtypeStruct((), t, sharding=whole) for t in (jnp.uint32, jnp.int32, jnp.int32)]
        params = self._shapes(self.leaves, [leaf.compute for leaf in self.leaves], mesh)
        lowered = jax.jit(worker, out_shardings=(rows_out, whole, whole, whole)).lower(params, rows, *scalars)
        check_kernels(self.setup.config, lowered.as_text(), devices[0].platform, os.environ.get("XLA_FLAGS", ""))
        return lowered

    def _stacked_specs(self) -> list[PartitionSpec]:
        return [PartitionSpec(REPLICAS, *leaf.compute) for leaf in self.trained]

    @property
    def _row_is_sum(self) -> bool:
        """With a single replica its row is the sum already, and stays a row: no copy."""
        return self.setup.plan.mesh.num_replicas == 1 and {x.decl.dtype for x in self.trained} == {"float32"}

    def _compile_reduce(self):
        """Gradients of all replicas, stacked, to their ordered sum in the update layout, float32."""
        if self._row_is_sum:
            return lambda stacked: stacked
        mesh, plan = self.setup.mesh, self.setup.plan

        @jax.named_scope("gradient_sums")
        def reduce(stacked):
            sums = {}
            for leaf in self.trained:
                x = flatten(stacked)[leaf.path][0].astype(jnp.float32)
                dim = storage_dim(leaf.decl.axes, plan.rules)
                sums[leaf.path] = ordered_sum(x, dim, plan.mesh.data, plan.mesh.fsdp, leaf.divided)
            return unflatten(sums)

        specs = unflatten({leaf.path: spec for leaf, spec in zip(self.trained, self._stacked_specs())})
        out = unflatten({leaf.path: leaf.update for leaf in self.trained})
        program = jax.jit(
            jax.shard_map(reduce, mesh=mesh, in_specs=(specs,), out_specs=out, axis_names=set(AXES), check_vma=False)
        )
        # Accumulated gradients are float32; a single microbatch keeps the parameters' own dtype.
        dtype = jnp.float32 if self.layout.num_microbatches > 1 else None
        shapes = self._shapes(self.trained, self._stacked_specs(), mesh, (plan.mesh.num_replicas,), dtype)
        return self.kept.compile("reduce", lambda: program.lower(shapes))

    @property
    def gradient_shapes(self) -> Tree:
        """Of a slot's ordered sum: in the update layout, or a row."""
        if self._row_is_sum:
            return self._shapes(self.trained, self._stacked_specs(), self.setup.mesh, (1,))
        return self._shapes(self.trained, [leaf.update for leaf in self.trained], self.setup.mesh, dtype=jnp.float32)

    @staticmethod
    def gradient(leaf: jax.Array, declared_ndim: int) -> jax.Array:
        """A leaf of `gradient_shapes` without its row, where it has one."""
        return leaf[0] if leaf.ndim > declared_ndim else leaf

    @property
    def programs(self) -> dict:
        """What was compiled, by name, for the first of this process's replicas; where nothing is to be done, nothing is."""
        found = {"gather": self._gather, "worker": self._workers[0], "reduce": self._reduce}
        return {name: program for name, program in found.items() if isinstance(program, jax.stages.Compiled)}

    # What runs.

    def begin(self, state: TrainState, seed: jax.Array) -> tuple:
        """What all slots of a step share."""
        return self._on_replicas(self._gather(state.params)), self._on_replicas(seed), self._on_replicas(state.step)

    def __call__(self, shared: tuple, batch: dict, slot: int) -> tuple[Tree, jax.Array, jax.Array, jax.Array]:
        """Ordered sum of the gradients of this slot's workers; losses, weights and digests, a row for each worker."""
        params, seeds, steps = shared
        rows = self._on_replicas(batch)
        outputs = [
            worker(params[i], rows[i], seeds[i], steps[i], self._first_example(slot, replica))
            for i, (worker, (replica, _)) in enumerate(zip(self._workers, self.replicas))
        ]
        self.num_worker_runs += len(outputs)
        grads, *scalars = self._over_replicas(outputs)
        return self._reduce(grads), *scalars

    def _first_example(self, slot: int, replica: int) -> np.int32:
        """Place in the global batch of the first example of the worker that this replica runs in this slot."""
        return np.int32((slot * self.setup.plan.mesh.num_replicas + replica) * self.layout.worker_size)

    def _on_replicas(self, tree: Tree) -> list[Tree]:
        """What each replica of this process holds of global arrays that are whole, or divided along their first dimension,
        over replicas; moves nothing."""
        pieces = {id(x): {s.device: s.data for s in x.addressable_shards} for x in jax.tree.leaves(tree)}

        def on(devices: Devices, x: jax.Array) -> jax.Array:
            local = [pieces[id(x)][d] for d in devices]
            if len(devices) == 1:
                return local[0]
            spec = PartitionSpec(*("tensor" if "tensor" in (e or ()) else None for e in x.sharding.spec))
            sharding = NamedSharding(make_group_mesh(devices), spec)
            shape = tuple(n * len(devices) if e else n for n, e in zip(local[0].shape, (*spec, *[None] * x.ndim)))
            return jax.make_array_from_single_device_arrays(shape, sharding, local)

        return [jax.tree.map(partial(on, devices), tree) for _, devices in self.replicas]

    def _over_replicas(self, outputs: list[Tree]) -> Tree:
        """Global arrays whose row r is what replica r computed; moves nothing."""
        mesh, n = self.setup.mesh, self.setup.plan.mesh.num_replicas

        def join(*rows: jax.Array) -> jax.Array:
            spec = rows[0].sharding.spec if isinstance(rows[0].sharding, NamedSharding) else PartitionSpec()
            sharding = NamedSharding(mesh, PartitionSpec(REPLICAS, *spec[1:]))
            local = [shard.data for row in rows for shard in row.addressable_shards]
            return jax.make_array_from_single_device_arrays((n, *rows[0].shape[1:]), sharding, local)

        return jax.tree.map(join, *outputs)

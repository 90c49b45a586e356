"""The explicit engine of exact mode: the same bits on any number of replicas, by construction.

The global batch is cut into V virtual workers. Forward and backward of one worker is one compiled program over the devices
of one replica, and that very program runs for every worker, wherever it is. What is added up over workers is added in one
fixed tree (`sharder.ops.ordered`); the rest of the step is elementwise on shards.

A step, with n replicas:

    gather      parameters from the storage to the compute layout                  (moves bytes; nothing to do for dp and zero)
    V/n times   worker on every replica, then an ordered sum over the replicas      (the tree over n adjacent workers)
                and over the slots so far                                          (the same tree, further up)
    mean        loss, gradients of the mean loss and their norm
    finish      update, fingerprint

Memory per device beside the state: one compute-layout copy of the parameters (under fsdp), one whole gradient, and
log2(V/n) + 1 accumulators in the update layout. Traffic per step and device: (V/n) (n-1)/n of the gradient for the sums,
as a ring reduce-scatter, plus what the layouts need to come back together.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharder.data.loader import WorkerLayout
from sharder.models.build import flatten, unflatten
from sharder.ops.layout import SINGLE
from sharder.ops.ordered import REPLICAS, Chunking, TreeAccumulator, num_chunks, ordered_sum, ordered_sum_of_squares, pairwise_sum
from sharder.sharding.compute import ComputeLayout
from sharder.sharding.mesh import AXES, make_group_mesh
from sharder.sharding.plan import LeafPlan, divisor
from sharder.sharding.policy import storage_dim
from sharder.train.executables import Devices, compile_for_groups
from sharder.train.setup import Setup
from sharder.train.state import TrainState
from sharder.train.step import Metrics, accumulate, finish_step

Tree = Any


def local_replicas(mesh: Mesh) -> list[tuple[int, Devices]]:
    """Number and devices (its tensor group) of every replica of this process."""
    groups = mesh.devices.reshape(-1, mesh.devices.shape[-1])
    return [(r, tuple(group)) for r, group in enumerate(groups) if group[0].process_index == jax.process_index()]


def chunking(setup: Setup, leaf: LeafPlan, num_workers: int) -> Chunking:
    """The canonical chunks of a parameter: those of its storage dimension, whatever the policy."""
    mesh, axes = setup.plan.mesh, leaf.decl.axes
    dim = storage_dim(axes, setup.plan.rules)
    dim = int(np.argmax(leaf.decl.shape)) if dim is None else dim
    tensor = [divisor(entry, mesh) for entry in leaf.compute]
    count = num_chunks(leaf.decl.shape[dim] // tensor[dim], num_workers)
    return Chunking(dim, count, mesh.fsdp if leaf.divided else 1, max(tensor))


class ExactStep:
    """The compiled step (state, batch, seed, stop flags) -> (state, metrics); the state is donated."""

    def __init__(self, setup: Setup, layout: WorkerLayout, arguments: tuple):
        """`arguments`: arrays or shapes like those of a call; everything is compiled here."""
        state, batch, seed, stop = arguments
        self.setup, self.layout = setup, layout
        self.replicas = local_replicas(setup.mesh)
        self.num_workers = layout.num_slots * setup.plan.mesh.num_replicas
        self.num_worker_runs = 0
        """How often the worker's program ran in this process."""
        self.leaves = list(setup.plan.leaves.values())
        # With a single replica its row is the sum already, and stays a row: no copy.
        self.row_is_sum = setup.plan.mesh.num_replicas == 1 and {x.decl.dtype for x in self.leaves} == {"float32"}
        self._gather = self._compile_gather(state)
        self._workers = compile_for_groups(partial(self._lower_worker, batch[0]), [devices for _, devices in self.replicas])
        self._reduce = self._compile_reduce()
        self._add = self._compile_add()
        self._mean = self._compile_mean()
        self._finish = self._compile_finish(state, stop)

    # What is compiled.

    def _compute_shardings(self, mesh: Mesh) -> Tree:
        return unflatten({leaf.path: NamedSharding(mesh, leaf.compute) for leaf in self.leaves})

    @property
    def _update_shardings(self) -> Tree:
        return unflatten(self.setup.plan.shardings("update", self.setup.mesh))

    def _shapes(self, specs, mesh: Mesh, lead: tuple[int, ...] = (), dtype=None) -> Tree:
        """Parameter-shaped arrays with these specs, by path, behind further leading dimensions."""
        return unflatten(
            {
                leaf.path: jax.ShapeDtypeStruct(lead + leaf.decl.shape, dtype or leaf.decl.dtype, sharding=NamedSharding(mesh, spec))
                for leaf, spec in zip(self.leaves, specs)
            }
        )

    def _compile_gather(self, state: TrainState):
        if self.setup.plan.policy != "fsdp" or self.setup.plan.mesh.fsdp == 1:
            return lambda params: params
        identity = jax.jit(lambda params: params, out_shardings=self._compute_shardings(self.setup.mesh))
        return identity.lower(jax.tree.map(_shape, state.params)).compile()

    def _lower_worker(self, batch: dict, devices: Devices) -> jax.stages.Lowered:
        """Forward and backward of one virtual worker on the devices of one replica."""
        mesh = make_group_mesh(devices)
        whole = NamedSharding(mesh, PartitionSpec())
        grouped = len(devices) > 1
        layout = ComputeLayout(mesh, self.setup.plan, "compute", storage="compute") if grouped else SINGLE
        pinned = self._compute_shardings(mesh)
        rows_out = unflatten({leaf.path: NamedSharding(mesh, PartitionSpec(None, *leaf.compute)) for leaf in self.leaves})

        def worker(params, batch, seed, step, first_example):
            pin = (lambda grads: jax.lax.with_sharding_constraint(grads, pinned)) if grouped else (lambda grads: grads)
            sums = accumulate(self.setup.declared.graphdef, layout, pin, params, batch, seed, step, first_example)
            # One row for each replica, to be stacked over replicas without a copy.
            return jax.tree.map(lambda x: x[None], sums)

        num = self.layout.num_microbatches
        rows = {k: jax.ShapeDtypeStruct((num, *x.shape[1:]), x.dtype, sharding=whole) for k, x in batch.items()}
        scalars = [jax.ShapeDtypeStruct((), t, sharding=whole) for t in (jnp.uint32, jnp.int32, jnp.int32)]
        params = self._shapes([leaf.compute for leaf in self.leaves], mesh)
        return jax.jit(worker, out_shardings=(rows_out, whole, whole, whole)).lower(params, rows, *scalars)

    def _stacked_specs(self) -> list[PartitionSpec]:
        return [PartitionSpec(REPLICAS, *leaf.compute) for leaf in self.leaves]

    @property
    def _gradient_dtype(self):
        """That of accumulated gradients; a single microbatch keeps the parameters' own."""
        return jnp.float32 if self.layout.num_microbatches > 1 else None

    def _compile_reduce(self):
        """Gradients of all replicas, stacked, to their ordered sum in the update layout, float32."""
        if self.row_is_sum:
            return lambda stacked: stacked
        mesh, plan = self.setup.mesh, self.setup.plan

        def reduce(stacked):
            sums = {}
            for leaf in self.leaves:
                x = flatten(stacked)[leaf.path][0].astype(jnp.float32)
                dim = storage_dim(leaf.decl.axes, plan.rules)
                sums[leaf.path] = ordered_sum(x, dim, plan.mesh.data, plan.mesh.fsdp, leaf.divided)
            return unflatten(sums)

        specs = unflatten(dict(zip(plan.leaves, self._stacked_specs())))
        out = unflatten({leaf.path: leaf.update for leaf in self.leaves})
        program = jax.jit(
            jax.shard_map(reduce, mesh=mesh, in_specs=(specs,), out_specs=out, axis_names=set(AXES), check_vma=False)
        )
        stacked = self._shapes(self._stacked_specs(), mesh, (plan.mesh.num_replicas,), self._gradient_dtype)
        return program.lower(stacked).compile()

    def _sums(self) -> tuple[Tree, tuple[jax.ShapeDtypeStruct, ...]]:
        """Shapes of a slot's ordered sum of gradients, and of the losses, weights and digests of its workers."""
        mesh, n = self.setup.mesh, self.setup.plan.mesh.num_replicas
        rows = NamedSharding(mesh, PartitionSpec(REPLICAS))
        kinds = ((n,), jnp.float32), ((n,), jnp.float32), ((n, 2), jnp.uint32)
        scalars = tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=rows) for shape, dtype in kinds)
        if self.row_is_sum:
            return self._shapes(self._stacked_specs(), mesh, (1,)), scalars
        return self._shapes([leaf.update for leaf in self.leaves], mesh, dtype=jnp.float32), scalars

    def _compile_add(self):
        if self.layout.num_slots == 1:
            return None
        grads, _ = self._sums()
        return jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=(0,)).lower(grads, grads).compile()

    def _compile_mean(self):
        """Sums over all workers to the gradients of the mean loss, their global norm, the mean loss, and the digest of the
        examples."""
        setup, mesh = self.setup, self.setup.mesh
        chunkings = [chunking(setup, leaf, self.num_workers) for leaf in self.leaves]
        specs = tuple(leaf.update for leaf in self.leaves)
        norm_of = jax.shard_map(
            lambda *leaves: jnp.sqrt(ordered_sum_of_squares(leaves, chunkings)),
            mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), axis_names=set(AXES), check_vma=False,
        )  # fmt: skip

        def mean(grad_sums, slots):
            whole = lambda xs: jax.lax.with_sharding_constraint(jnp.concatenate(xs), setup.replicated())  # noqa: E731
            loss, weight, digest = (pairwise_sum(whole(xs)) for xs in zip(*slots))
            grads = jax.tree.map(lambda g: (g[0] if self.row_is_sum else g) / weight, grad_sums)
            return grads, norm_of(*flatten(grads).values()), loss / weight, digest

        out = (self._update_shardings, *[setup.replicated()] * 3)
        grads, scalars = self._sums()
        return jax.jit(mean, out_shardings=out).lower(grads, (scalars,) * self.layout.num_slots).compile()

    def _compile_finish(self, state: TrainState, stop):
        """Update and fingerprint. A program of its own, whose inputs are the same at any number of replicas: where the
        sums were inside it, the compiler moved the clipping factor through the moments differently for n = 1."""
        setup = self.setup
        grads = self._shapes([leaf.update for leaf in self.leaves], setup.mesh, dtype=jnp.float32)
        scalar, digest = (jax.ShapeDtypeStruct(*kind, sharding=setup.replicated()) for kind in (((), jnp.float32), ((2,), jnp.uint32)))
        out = (setup.state_shardings, setup.replicated())
        program = jax.jit(partial(finish_step, setup), out_shardings=out, donate_argnums=0)
        return program.lower(jax.tree.map(_shape, state), grads, scalar, scalar, digest, _shape(stop)).compile()

    # What runs.

    def __call__(self, state: TrainState, batch: list[dict], seed: jax.Array, stop: jax.Array) -> tuple[TrainState, Metrics]:
        params = self._on_replicas(self._gather(state.params))
        seeds, steps = self._on_replicas(seed), self._on_replicas(state.step)
        gradients, scalars = TreeAccumulator(self._add), []
        for slot, slot_batch in enumerate(batch):
            rows = self._on_replicas(slot_batch)
            outputs = [
                worker(params[i], rows[i], seeds[i], steps[i], self._first_example(slot, replica))
                for i, (worker, (replica, _)) in enumerate(zip(self._workers, self.replicas))
            ]
            self.num_worker_runs += len(outputs)
            grads, *of_slot = self._over_replicas(outputs)
            gradients.push(self._reduce(grads))
            if scalars:
                # Not further ahead than one slot: every slot in flight holds a whole gradient.
                jax.block_until_ready(scalars[-1])
            scalars.append(tuple(of_slot))
        return self._finish(state, *self._mean(gradients.total(), tuple(scalars)), stop)

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


def _shape(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

"""The explicit engine of exact mode: the same bits on any number of replicas, by construction.

The global batch is cut into V virtual workers. What is added up over workers is added in one fixed tree
(`sharder.ops.ordered`); the rest of the step is elementwise on shards. A step, with n replicas:

    V/n slots   forward and backward of n adjacent workers, and an ordered sum over them   (the tree over n workers)
                added to the slots so far                                                 (the same tree, further up)
    mean        loss, gradients of the mean loss and their norm
    finish      update, fingerprint

How a slot is computed is chosen by `--parallel.exact-memory`: `copy` (`sharder.train.workers`) runs one executable for
every worker, so that its bits cannot depend on n; `lean` (`sharder.train.lean`) never holds a whole copy.

Memory per device beside the state and what a slot needs: log2(V/n) + 1 accumulators in the update layout. Traffic per step
and device: (V/n) (n-1)/n of the gradient for the sums, as a ring reduce-scatter, plus what the layouts need to come back
together.
"""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sharder.data.loader import WorkerLayout
from sharder.models.build import flatten, unflatten
from sharder.ops.ordered import (
    REPLICAS,
    Chunking,
    TreeAccumulator,
    filled_pairwise_sum,
    num_chunks,
    ordered_sums_of_squares,
    pairwise_sum,
)
from sharder.sharding.mesh import AXES
from sharder.sharding.plan import LeafPlan, divisor
from sharder.sharding.policy import storage_dim
from sharder.train.kept import Kept
from sharder.train.lean import LeanSlots
from sharder.train.setup import Setup
from sharder.train.state import TrainState
from sharder.train.step import Metrics, finish_step
from sharder.train.workers import WorkerSlots

SLOTS = {"copy": WorkerSlots, "lean": LeanSlots}


def chunking(setup: Setup, leaf: LeafPlan, num_workers: int) -> Chunking:
    """The canonical chunks of a parameter: those of its storage dimension, whatever the policy."""
    mesh, axes = setup.plan.mesh, leaf.decl.axes
    dim = storage_dim(axes, setup.plan.rules)
    dim = int(np.argmax(leaf.decl.shape)) if dim is None else dim
    tensor = [divisor(entry, mesh) for entry in leaf.compute]
    count = num_chunks(leaf.decl.shape[dim] // tensor[dim], num_workers)
    return Chunking(dim, count, mesh.fsdp if leaf.divided else 1, max(tensor))


def compile_finish(setup: Setup, kept: Kept, state: TrainState, stop, halted) -> jax.stages.Compiled:
    """Update and fingerprint. A program of its own, whose inputs are the same at any number of replicas: where the sums were
    inside it, the compiler moved the clipping factor through the moments differently for n = 1."""

    def shape(x, dtype=None, sharding=None):
        return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding or x.sharding)

    trained = setup.declared.only_trained(state.params)
    grads = jax.tree.map(lambda p, s: shape(p, jnp.float32, s), trained, setup.gradient_shardings("update"))
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=setup.replicated())
    digest = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=setup.replicated())
    out = (setup.state_shardings, setup.replicated())
    program = jax.jit(partial(finish_step, setup), out_shardings=out, donate_argnums=0)
    shapes = jax.tree.map(shape, state), grads, scalar, scalar, digest, shape(stop), shape(halted)
    return kept.compile("finish", lambda: program.lower(*shapes))


class ExactStep:
    """The compiled step (state, batch, seed, stop flags, halted) -> (state, metrics); the state is donated."""

    def __init__(self, setup: Setup, layout: WorkerLayout, arguments: tuple, keep: bool = False):
        """`arguments`: arrays or shapes like those of a call; everything is compiled here, and kept for the next start with `keep`."""
        state, batch, seed, stop, halted = arguments
        self.setup, self.layout = setup, layout
        self.waited_s = 0.0
        """How long the last call waited for the devices."""
        self.num_workers = layout.num_slots * setup.plan.mesh.num_replicas
        self.kept = Kept(setup, jax.tree.map(lambda x: (x.shape, str(x.dtype)), batch[0]), keep=keep)
        self.slots = SLOTS[setup.config.parallel.exact_memory](setup, layout, state, batch[0], self.kept)
        self._add = self._compile_add()
        self._mean = self._compile_mean()
        self._finish = compile_finish(setup, self.kept, state, stop, halted)

    @property
    def num_worker_runs(self) -> int:
        """How many virtual workers this process has computed."""
        return self.slots.num_worker_runs

    @property
    def programs(self) -> dict:
        """What was compiled, by name."""
        return self.slots.programs | ({"add": self._add} if self._add else {}) | {"mean": self._mean, "finish": self._finish}

    @property
    def runs(self) -> dict[str, int]:
        """How often a step runs each of `programs`, over all devices."""
        devices, slots = self.setup.mesh.size, self.layout.num_slots
        return dict.fromkeys(self.programs, devices) | {
            name: devices * (slots - (name == "add")) for name in ("worker", "slot", "reduce", "add") if name in self.programs
        }

    def _compile_add(self):
        if self.layout.num_slots == 1:
            return None
        grads = self.slots.gradient_shapes

        def add(a, b):
            with jax.named_scope("gradient_sums"):
                return jax.tree.map(jnp.add, a, b)

        return self.kept.compile("add", lambda: jax.jit(add, donate_argnums=(0,)).lower(grads, grads))

    def _slot_scalars(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the losses, weights and digests of the workers of a slot."""
        n, rows = self.setup.plan.mesh.num_replicas, NamedSharding(self.setup.mesh, PartitionSpec(REPLICAS))
        kinds = ((n,), jnp.float32), ((n,), jnp.float32), ((n, 2), jnp.uint32)
        return tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=rows) for shape, dtype in kinds)

    def _compile_mean(self):
        """Sums over all workers to the gradients of the mean loss, their global norm, the mean loss, the digest of the
        examples, and which leaves of the gradients are finite."""
        setup, mesh = self.setup, self.setup.mesh
        leaves = setup.trained_leaves
        chunkings = [chunking(setup, leaf, self.num_workers) for leaf in leaves]
        squares_of = jax.shard_map(
            lambda *grads: ordered_sums_of_squares(grads, chunkings),
            mesh=mesh, in_specs=tuple(leaf.update for leaf in leaves), out_specs=PartitionSpec(), axis_names=set(AXES), check_vma=False,
        )  # fmt: skip

        def mean(grad_sums, slots):
            with jax.named_scope("gradient_sums"):
                slots = jax.lax.with_sharding_constraint(slots, setup.replicated())
                loss, weight, digest = (pairwise_sum(jnp.concatenate(xs)) for xs in zip(*slots))
                sums = flatten(grad_sums)
                grads = {leaf.path: self.slots.gradient(sums[leaf.path], len(leaf.decl.shape)) / weight for leaf in leaves}
                squares = squares_of(*grads.values())
                return unflatten(grads), jnp.sqrt(filled_pairwise_sum(squares)), loss / weight, digest, jnp.isfinite(squares)

        out = (setup.gradient_shardings("update"), *[setup.replicated()] * 4)
        slots = (self._slot_scalars(),) * self.layout.num_slots
        program = jax.jit(mean, out_shardings=out)
        return self.kept.compile("mean", lambda: program.lower(self.slots.gradient_shapes, slots))

    def __call__(self, state: TrainState, batch: list[dict], seed, stop, halted) -> tuple[TrainState, Metrics]:
        shared, self.waited_s = self.slots.begin(state, seed), 0.0
        gradients, scalars = TreeAccumulator(self._add), []
        for slot, slot_batch in enumerate(batch):
            grads, *of_slot = self.slots(shared, slot_batch, slot)
            gradients.push(grads)
            if scalars:
                # Not further ahead than one slot: every slot in flight holds a whole gradient.
                started = time.perf_counter()
                jax.block_until_ready(scalars[-1])
                self.waited_s += time.perf_counter() - started
            scalars.append(tuple(of_slot))
        *mean, finite_leaves = self._mean(gradients.total(), tuple(scalars))
        state, metrics = self._finish(state, *mean, stop, halted)
        return state, metrics | {"finite_leaves": finite_leaves}

"""The state of a run, its declaration, its shardings, and its birth already sharded."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharder.config import RunConfig
from sharder.models.build import Declared, initial_params, unflatten
from sharder.sharding.plan import Plan
from sharder.train.optimizer import make_optimizer, optimizer_spec, to_float32

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes."""

    step: jax.Array
    """Completed steps, int32 scalar."""
    params: Tree
    opt_state: Tree
    ema: Tree
    """Moving average of the parameters, float32, or None."""


def _name(key) -> str:
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def by_path(state: TrainState) -> dict[str, Any]:
    """Leaves by path ("params/blocks/q", "opt_state/0/mu/blocks/q"), sorted; works for arrays, shapes and shardings."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return dict(sorted(("/".join(map(_name, path)), leaf) for path, leaf in leaves))


def from_paths(like: TrainState, leaves: dict[str, Any]) -> TrainState:
    """Inverse of `by_path` for a state of the structure of `like`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves["/".join(map(_name, path))], like)


def initial_state(config: RunConfig, declared: Declared, params: Tree) -> TrainState:
    """The state before the first step, around freshly drawn parameters."""
    trained = to_float32(declared.only_trained(params))
    ema = None if config.train.ema_decay is None else trained
    # Moments follow the dtype of what the optimizer is initialised with: float32, also for bfloat16 parameters.
    return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(config.optimizer, declared.trained).init(trained), ema)


def declare_state(config: RunConfig, declared: Declared) -> TrainState:
    """The state as shapes and dtypes, allocating nothing."""
    # The model is not built again, which takes longer than all the rest.
    params = unflatten({p: jax.ShapeDtypeStruct(x.shape, x.dtype) for p, x in declared.params.items()})
    return jax.eval_shape(lambda params: initial_state(config, declared, params), params)


def state_specs(config: RunConfig, declared: Declared, plan: Plan) -> TrainState:
    """PartitionSpec of every leaf at rest: parameters in the storage layout, what the optimizer keeps as `optimizer_spec`
    says, the moving average in the update layout."""
    abstract = declare_state(config, declared)
    storage = unflatten({p: leaf.storage for p, leaf in plan.leaves.items()})
    update = unflatten({p: leaf.update for p, leaf in plan.leaves.items() if p not in declared.frozen})
    opt_state = jax.tree_util.tree_map_with_path(
        lambda path, x: optimizer_spec("/".join(map(_name, path)), x.shape, plan), abstract.opt_state
    )
    return TrainState(PartitionSpec(), storage, opt_state, None if abstract.ema is None else update)


def shardings(specs: TrainState, mesh: Mesh) -> TrainState:
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def create_state(config: RunConfig, declared: Declared, state_shardings: TrainState) -> TrainState:
    """A fresh state, every array born on its own shards."""

    def create(seed):
        return initial_state(config, declared, initial_params(config.model, jax.random.key(seed)))

    return jax.jit(create, out_shardings=state_shardings)(jnp.uint32(config.train.seed))


def with_shardings(abstract: TrainState, state_shardings: TrainState) -> dict[str, jax.ShapeDtypeStruct]:
    """What a restore needs to know of every leaf, by path."""
    shards = by_path(state_shardings)
    return {p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shards[p]) for p, x in by_path(abstract).items()}

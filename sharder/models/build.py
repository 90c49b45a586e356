"""From a model's configuration to the model: the one place where a model is chosen."""

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
from flax import nnx

from sharder.config import LlamaConfig, MlpConfig, ModelConfig, Pi0Config, TransformerConfig
from sharder.models.freeze import frozen_paths
from sharder.models.llama import Llama
from sharder.models.mlp import Mlp
from sharder.models.pi0 import Pi0
from sharder.models.transformer import Transformer
from sharder.sharding.axes import AxisRules, ParamDecl

MODELS = {TransformerConfig: Transformer, LlamaConfig: Llama, MlpConfig: Mlp, Pi0Config: Pi0}


FROZEN_DTYPE = jnp.dtype("bfloat16").name


def build_model(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Module:
    return MODELS[type(config)](config, rngs)


def flatten(tree: dict, prefix: str = "") -> dict:
    """Nested dicts to one dict by path, sorted: {"blocks/q": leaf}."""
    flat = {}
    for key in sorted(tree, key=str):
        value, path = tree[key], f"{prefix}{key}"
        flat.update(flatten(value, path + "/") if isinstance(value, dict) else {path: value})
    return flat


def unflatten(flat: dict) -> dict:
    """Inverse of `flatten`."""
    tree: dict = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


@dataclass(frozen=True)
class Declared:
    """A model that has no arrays yet."""

    config: ModelConfig
    graphdef: nnx.GraphDef
    params: dict[str, ParamDecl]
    """By path."""
    rules: AxisRules
    undecayed_axes: frozenset[str]
    """Parameters with one of these axes are left out of weight decay, as are those of one dimension."""
    tokens_per_example: bool
    """Whether an example is a sequence of tokens, so that a rate is given in tokens per second."""
    frozen: frozenset[str] = frozenset()
    """Paths of parameters that are not trained."""

    @property
    def trained(self) -> "Declared":
        """The same with trained parameters only: what the optimizer knows of."""
        return dataclasses.replace(
            self, params={p: x for p, x in self.params.items() if p not in self.frozen}, frozen=frozenset()
        )

    def only_trained(self, tree: dict) -> dict:
        """A tree of parameters without the frozen ones."""
        return unflatten({p: x for p, x in flatten(tree).items() if p not in self.frozen}) if self.frozen else tree

    @property
    def num_params(self) -> int:
        return sum(math.prod(decl.shape) for decl in self.params.values())


@lru_cache(32)
def declare(config: ModelConfig) -> Declared:
    """Shapes, dtypes and logical axes of all parameters, without allocating any."""
    model = nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    params = {
        "/".join(map(str, path)): ParamDecl(tuple(v.shape), str(v.dtype), tuple(v.get_metadata()["axes"]))
        for path, v in nnx.to_flat_state(state)
    }
    frozen = frozen_paths(config, params)
    params |= {path: dataclasses.replace(params[path], dtype=FROZEN_DTYPE) for path in frozen}
    return Declared(
        config, graphdef, dict(sorted(params.items())), model.axis_rules, model.undecayed_axes, model.tokens_per_example, frozen
    )


def initial_params(config: ModelConfig, key: jax.Array) -> dict:
    """Freshly drawn parameters as nested dicts; trace it under jit with output shardings, so that they are born sharded."""
    params = nnx.to_pure_dict(nnx.state(build_model(config, nnx.Rngs(params=key))))
    flat = flatten(params)
    frozen = frozen_paths(config, flat)
    return unflatten(flat | {path: flat[path].astype(FROZEN_DTYPE) for path in frozen}) if frozen else params


def merged(trained: dict, whole: dict) -> dict:
    """`whole` with its trained parameters replaced."""
    return unflatten(flatten(whole) | flatten(trained))

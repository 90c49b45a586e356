"""From a model's configuration to the model: the one place where a model is chosen."""

import math
from dataclasses import dataclass
from functools import lru_cache

import jax
from flax import nnx

from sharder.config import LlamaConfig, MlpConfig, ModelConfig, TransformerConfig
from sharder.models.llama import Llama
from sharder.models.mlp import Mlp
from sharder.models.transformer import Transformer
from sharder.sharding.axes import AxisRules, ParamDecl

MODELS = {TransformerConfig: Transformer, LlamaConfig: Llama, MlpConfig: Mlp}


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
    return Declared(config, graphdef, dict(sorted(params.items())), model.axis_rules, model.undecayed_axes, model.tokens_per_example)


def initial_params(config: ModelConfig, key: jax.Array) -> dict:
    """Freshly drawn parameters as nested dicts; trace it under jit with output shardings, so that they are born sharded."""
    return nnx.to_pure_dict(nnx.state(build_model(config, nnx.Rngs(params=key))))

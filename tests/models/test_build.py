from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from sharder import recipes
from sharder.config import MlpConfig, TransformerConfig
from sharder.models.build import build_model, declare, flatten, initial_params, unflatten
from sharder.models.layers import param
from sharder.models.mlp import Mlp
from sharder.models.transformer import Transformer
from sharder.sharding.axes import check_axes

TINY = TransformerConfig(
    vocab_size=20, padded_vocab_size=24, max_seq_len=8, embed_dim=16, num_heads=2, mlp_dim=32, num_layers=3
)
MLP = MlpConfig(input_dim=6, hidden_dim=8, num_layers=3, output_dim=4)
models = pytest.mark.parametrize("config", [TINY, replace(TINY, tie_embeddings=True), MLP], ids=["own output", "tied", "mlp"])

NAMES = st.text("abcdefghijklmnopqrstuvwxyz_0123456789", min_size=1, max_size=5)
TREES = st.recursive(st.integers(), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=4), max_leaves=12).filter(
    lambda tree: isinstance(tree, dict)
)


@given(TREES)
def test_unflatten_is_the_inverse_of_flatten(tree):
    assert unflatten(flatten(tree)) == tree


@given(TREES)
def test_flat_trees_are_sorted_by_path(tree):
    assert list(flatten(tree)) == sorted(flatten(tree))


def test_paths_are_joined_by_slashes():
    assert flatten({"b": {"d": 1, "c": {"e": 2}}, "a": 3}) == {"a": 3, "b/c/e": 2, "b/d": 1}


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_parameter_names_each_dimension_once(name):
    declared = declare(recipes.load_recipe(name).model)
    for path, decl in declared.params.items():
        check_axes(path, decl, declared.rules)


@models
def test_stacked_parameters_and_no_others_have_layers_first(config):
    first = {path: (decl.axes[0], decl.shape[0]) for path, decl in declare(config).params.items()}
    assert {path for path, (axis, _) in first.items() if axis == "layers"} == {p for p in first if p.startswith("blocks/")}
    assert {size for axis, size in first.values() if axis == "layers"} == {3}


@models
def test_declared_is_what_is_built(config):
    built = flatten(jax.eval_shape(lambda: initial_params(config, jax.random.key(0))))
    declared = declare(config).params
    assert {p: (x.shape, str(x.dtype)) for p, x in built.items()} == {p: (d.shape, d.dtype) for p, d in declared.items()}


@pytest.mark.parametrize("config", [TINY, MLP], ids=["transformer", "mlp"])
def test_param_dtype_is_that_of_every_parameter(config):
    assert {decl.dtype for decl in declare(replace(config, param_dtype="bfloat16")).params.values()} == {"bfloat16"}


def test_declaring_allocates_nothing():
    before = len(jax.live_arrays())
    declare(recipes.load_recipe("gpt_xl").model)
    assert len(jax.live_arrays()) == before


def count(config: TransformerConfig) -> int:
    """Parameters of a GPT-2 with tied embeddings, by hand."""
    D, F, L = config.embed_dim, config.mlp_dim, config.num_layers
    block = 2 * (2 * D) + (3 * D * D + 3 * D) + (D * D + D) + (D * F + F) + (F * D + D)
    return config.padded_vocab_size * D + config.max_seq_len * D + L * block + 2 * D


# Counts of the published weights (huggingface.co/openai-community), before the vocabulary is padded.
@pytest.mark.parametrize(
    "name, published",
    [("gpt", 124_439_808), ("gpt_medium", 354_823_168), ("gpt_large", 774_030_080), ("gpt_xl", 1_557_611_200)],
)
def test_gpt_has_the_published_parameters_and_padding(name, published):
    config = recipes.load_recipe(name).model
    assert declare(config).num_params == published + (50432 - 50257) * config.embed_dim == count(config)


def test_tiny_lm_has_3_3_million_parameters():
    config = recipes.load_recipe("tiny_lm").model
    assert declare(config).num_params == count(config) + 256 * 256 == 3_323_392


def test_mlp_parameters_are_counted():
    assert declare(MLP).num_params == (6 * 8 + 8) + 3 * (8 * 8 + 8) + (8 * 4 + 4)


@pytest.mark.parametrize("config", [TINY, MLP], ids=["transformer", "mlp"])
def test_layers_are_drawn_independently(config):
    path = "mlp_in" if isinstance(config, TransformerConfig) else "kernel"
    stacked = np.asarray(jax.jit(lambda: initial_params(config, jax.random.key(0))["blocks"][path])())
    assert not any(np.array_equal(stacked[i], stacked[j]) for i in range(3) for j in range(i))


def test_the_key_decides_the_parameters():
    draw = jax.jit(lambda key: initial_params(MLP, key)["last"]["kernel"])
    a, b, c = (np.asarray(draw(jax.random.key(k))) for k in (0, 0, 1))
    assert np.array_equal(a, b) and not np.array_equal(a, c)


@pytest.mark.parametrize("config, model", [(TINY, Transformer), (MLP, Mlp)], ids=["transformer", "mlp"])
def test_a_configuration_builds_its_own_model(config, model):
    assert type(nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0)))) is model


def test_a_parameter_without_a_name_for_each_dimension_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 3\) needs 2 axis names, got \('embed',\)"):
        param(nnx.Rngs(0), jax.nn.initializers.zeros, "float32", (2, 3), ("embed",))

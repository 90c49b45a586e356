"""What is counted on paper against what the program traces to, and what the compiler makes of it."""

import dataclasses
import math

import jax
import pytest
from flax import nnx
from jax._src.interpreters.partial_eval import dce_jaxpr
from small import RECIPE

from sharder.data.open import example_shapes
from sharder.instrument.dots import text_flops
from sharder.instrument.flops import count_step, step_flops, step_flops_6nd, tokens_of_example, utilisation
from sharder.instrument.hardware import peak_flops
from sharder.instrument.products import products_of
from sharder.models.build import declare, merged, unflatten
from sharder.recipes import load_recipe
from sharder.train.abstract import lower_abstract
from sharder.train.setup import prepare


def traced_flops(jaxpr) -> float:
    """Matrix products of a traced program, loops as often as they run."""
    total = 0.0
    for e in jaxpr.eqns:
        if e.primitive.name == "dot_general":
            (contracted, _), _ = e.params["dimension_numbers"]
            left = e.invars[0].aval.shape
            total += 2.0 * math.prod(e.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)
        inner = [getattr(v, "jaxpr", v) for v in e.params.values() if hasattr(getattr(v, "jaxpr", v), "eqns")]
        total += (
            e.params.get("length", 1) * sum(map(traced_flops, inner))
            if e.primitive.name == "scan"
            else sum(map(traced_flops, inner))
        )
    return total


def trace(config, gradients: bool) -> float:
    """Matrix products of one example."""
    declared = declare(config.model)
    whole = unflatten({p: jax.ShapeDtypeStruct(x.shape, x.dtype) for p, x in declared.params.items()})
    batch = {k: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for k, x in example_shapes(config).items()}

    def loss(trained, whole, batch, keys):
        params = merged(trained, whole) if declared.frozen else trained
        return nnx.merge(declared.graphdef, params).losses(batch, keys)[0].sum()

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    traced = jax.make_jaxpr(jax.value_and_grad(loss) if gradients else loss)(
        declared.only_trained(whole), whole, batch, keys
    ).jaxpr
    return traced_flops(dce_jaxpr(traced, [True] * len(traced.outvars))[0])


@pytest.mark.parametrize(
    "recipe, remat",
    [
        ("mlp", "none"), ("mlp", "block"), ("tiny_lm", "none"), ("tiny_lm", "dots"), ("gpt", "block"), ("llama", "none"), ("pi0_tiny", "none"),
        ("pi05_lora", "block"),
    ],
)  # fmt: skip
def test_products_on_paper_are_those_of_the_traced_program(recipe, remat):
    config = load_recipe(recipe)
    changes = {"remat": remat} | ({"attention": "reference"} if hasattr(config.model, "attention") else {})
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
    flops = step_flops(products_of(config.model, config.data.seq_len), 1)
    assert flops.forward == pytest.approx(trace(config, gradients=False), rel=1e-6)
    assert flops.hardware == pytest.approx(trace(config, gradients=True), rel=1e-3)


@pytest.mark.parametrize("freeze", ["vision-and-backbone", "all-but-lora"])
def test_frozen_parts_have_no_gradients_to_compute(freeze):
    config = load_recipe("pi0_tiny")
    expert = dataclasses.replace(config.model.action_expert, lora_rank=4)
    model = dataclasses.replace(config.model, freeze=freeze, action_expert=expert, attention="reference")
    config = dataclasses.replace(config, model=model)
    assert step_flops(products_of(model, 0), 1).hardware == pytest.approx(trace(config, gradients=True), rel=1e-2)


def compiled_ratio(recipe: str, batch: int) -> float:
    config = load_recipe(recipe)
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, global_batch_size=batch),
        parallel=dataclasses.replace(config.parallel, reduction="fast"),
    )
    if hasattr(config.model, "attention"):
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="reference"))
    setup = prepare(config, jax.devices()[:1])
    return text_flops(lower_abstract(setup).compile().as_text()) / count_step(setup.config).hardware


@pytest.mark.parametrize("recipe, batch", [("mlp", 64), (RECIPE, 2)], ids=["mlp", "small"])
def test_the_compiled_program_does_the_products_on_paper(recipe, batch):
    assert compiled_ratio(recipe, batch) == pytest.approx(1, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("recipe, batch", [("tiny_lm", 2), ("gpt", 1), ("pi0_tiny", 2)])
def test_the_compiled_program_of_a_larger_model_does_too(recipe, batch):
    assert compiled_ratio(recipe, batch) == pytest.approx(1, abs=0.01)


def test_a_look_up_multiplies_nothing():
    products = {p.module: p for p in products_of(load_recipe("pi0").model, 0)}
    assert products["embedding"].forward == 0 and products["embedding"].num_params == 257152 * 2048


def test_tokens_of_pictures_are_not_charged_to_the_action_expert():
    products = {p.module: p for p in products_of(load_recipe("pi0").model, 0)}
    assert products["action expert feed-forward in"].num_tokens == 51
    assert products["backbone feed-forward in"].num_tokens == 3 * 256 + 48


def test_the_mask_leaves_half_of_a_causal_square():
    causal = next(p for p in products_of(load_recipe("tiny_lm").model, 128) if p.module == "attention scores")
    assert causal.visible == causal.forward * 129 / 256


def test_6nd_counts_every_token_of_an_example():
    """pi0: three pictures of 256 patches, 48 tokens of prompt, a state and 50 actions."""
    assert tokens_of_example(load_recipe("pi0").model, 0) == 3 * 256 + 48 + 1 + 50
    assert tokens_of_example(load_recipe("gpt").model, 1024) == 1024
    assert tokens_of_example(load_recipe("mlp").model, 0) == 1


def test_a_step_is_six_operations_per_parameter_and_token():
    assert step_flops_6nd(124_439_808, 512 * 1024) == 6 * 124_439_808 * 524_288


def test_utilisation_is_the_share_of_all_devices_peak():
    """Half of what eight devices of 1 TFLOP/s could do in two seconds."""
    assert utilisation(8e12, 2.0, 1e12, 8) == pytest.approx(0.5)


def test_without_a_known_peak_there_is_no_utilisation():
    assert utilisation(8e12, 2.0, None, 8) is None


@pytest.mark.parametrize(
    "kind, dtype, peak", [("NVIDIA H200", "bfloat16", 989.4e12), ("NVIDIA H200", "float32", None), ("cpu", "bfloat16", None)]
)
def test_an_unknown_peak_stays_unknown(kind, dtype, peak):
    assert peak_flops(kind, dtype) == peak

import dataclasses
import re

import pytest
from small import needs_tested_jax, small

from sharder.accounting import account_batch
from sharder.config import UserError
from sharder.models.build import declare
from sharder.preflight import check, settle_reduction
from sharder.preflight import findings as structured
from sharder.recipes import load_recipe
from sharder.sharding.mesh import MeshShape
from sharder.sharding.plan import make_plan
from sharder.sharding.show import undivided_text


def findings(config, plan):
    return [finding.message for finding in structured(config, plan)]


def planned(config, mesh):
    declared = declare(config.model)
    return config, make_plan(declared.params, declared.rules, config.parallel, mesh)


def change(config, **sections):
    return dataclasses.replace(config, **{s: dataclasses.replace(getattr(config, s), **f) for s, f in sections.items()})


@pytest.mark.parametrize("recipe", ["tiny_lm", "gpt", "gpt_medium", "gpt_large", "gpt_xl", "mlp"])
@pytest.mark.parametrize("policy", ["dp", "zero", "fsdp"])
def test_every_recipe_fits_eight_devices(recipe, policy):
    """Odd head counts (gpt_xl has 25) never block FSDP: embed is what is divided."""
    config = change(load_recipe(recipe), parallel={"policy": policy})
    assert findings(*planned(config, MeshShape(1, 8, 1))) == []


@pytest.mark.parametrize("num_devices", [128, 256, 768])
def test_the_biases_of_projections_never_block_fsdp(num_devices):
    """head_dim is 64; embed is 768 and the padded vocabulary 50432 = 197 x 256 (768 needs another)."""
    padded = -(-50257 // num_devices) * num_devices
    config = change(
        load_recipe("gpt"),
        parallel={"policy": "fsdp"},
        model={"padded_vocab_size": padded},
        train={"global_batch_size": num_devices},
    )
    config, plan = planned(config, MeshShape(1, num_devices, 1))
    assert findings(config, plan) == [] and not plan.leaves["blocks/q_bias"].divided


def test_all_findings_come_at_once():
    config = change(small(), parallel={"policy": "fsdp"}, data={"seq_len": 64})
    found = findings(*planned(config, MeshShape(1, 6, 1)))
    assert [
        any(word in f for f in found)
        for word in ("embed is 64", "mlp is 128", "--train.global-batch-size is 16", "--data.seq-len")
    ] == [True] * 4
    with pytest.raises(UserError, match="reasons why this run cannot start"):
        check(*planned(config, MeshShape(1, 6, 1)))


def test_what_a_finding_recommends_works():
    config = change(small(), parallel={"policy": "fsdp"}, train={"global_batch_size": 18})
    found = findings(*planned(config, MeshShape(1, 6, 1)))
    assert any("--parallel.fsdp one of [1, 2]" in f for f in found)
    assert findings(*planned(config, MeshShape(3, 2, 1))) == []
    paths = {p for f in found for p in f.split("--parallel.replicate ")[1].split()}
    accepted = change(config, parallel={"replicate": tuple(paths)})
    assert findings(*planned(accepted, MeshShape(1, 6, 1))) == []


def test_where_no_degree_would_do_none_is_recommended():
    """mlp is 3072: no number of replicas helps where a tensor degree of 5 divides the same dimension."""
    config = change(load_recipe("gpt"), parallel={"fsdp": 2, "tensor": 5})
    found = findings(*planned(config, MeshShape(1, 2, 5)))
    assert any("mlp is 3072, which does not divide into 10" in f for f in found) and not any("one of []" in f for f in found)
    assert any("make it 3070 or 3080, or accept whole copies with" in f for f in found)


def test_an_unknown_name_to_replicate_is_a_finding():
    config = change(small(), parallel={"replicate": ("blocks/nothing",)})
    assert any("the model has no such parameter" in f for f in findings(*planned(config, MeshShape(1, 1, 1))))


def test_tensor_parallelism_of_a_model_without_it_is_a_finding():
    assert any(
        "no axis that tensor parallelism divides" in f for f in findings(*planned(load_recipe("mlp"), MeshShape(1, 4, 2)))
    )


def test_batch_accounting_multiplies_to_the_global_batch():
    accounting = account_batch(change(small(), train={"global_batch_size": 64, "microbatch_size": 2}), 4)
    assert (accounting.microbatch_size, accounting.num_replicas, accounting.num_slots) == (2, 4, 8)
    assert accounting.global_batch_size == 64 and accounting.slot_size == 8


@pytest.mark.parametrize(
    "batch, micro, replicas, nearest",
    [
        (30, None, 4, "28 or 32."),
        (3, None, 4, "4."),
        (30, 4, 4, "16 or 32."),
        (60, 4, 4, "48 or 64, or --train.microbatch-size one of [1, 3, 5, 15]."),
        (32, 64, 1, "64, or --train.microbatch-size one of [1, 2, 4, 8, 16, 32]."),
    ],
)
def test_a_batch_that_does_not_divide_names_the_nearest_that_do(batch, micro, replicas, nearest):
    with pytest.raises(UserError, match=re.escape(f"use {nearest}")):
        account_batch(change(small(), train={"global_batch_size": batch, "microbatch_size": micro}), replicas)


EIGHT = MeshShape(1, 8, 1)
PLENTY = 1 << 40


def settled(config, mesh=EIGHT, platform="cpu", memory_bytes=PLENTY):
    return settle_reduction(*planned(config, mesh), platform, memory_bytes)


@needs_tested_jax
@pytest.mark.parametrize("policy", ["dp", "zero", "fsdp"])
def test_auto_is_exact_where_that_is_tested_and_fits(policy):
    config, why_fast = settled(change(small(), parallel={"reduction": "auto", "policy": policy}))
    assert config.parallel.reduction == "exact" and why_fast is None


@needs_tested_jax
@pytest.mark.parametrize(
    "sections, surroundings, why",
    [
        ({}, {"platform": "gpu"}, "on gpu with jax"),
        ({}, {"mesh": MeshShape(1, 16, 1)}, "cannot grow beyond 8 replicas"),
        ({"train": {"global_batch_size": 20}}, {}, "20, which does not divide into 8 virtual workers"),
        (
            {"parallel": {"policy": "fsdp", "reduction": "auto"}},
            {"memory_bytes": 1000},
            "GB beside the activations, more than half",
        ),
        (
            {"parallel": {"policy": "fsdp", "reduction": "auto"}},
            {"memory_bytes": None},
            "how much memory a device has is not known",
        ),
    ],
)
def test_auto_is_fast_elsewhere_and_says_why(sections, surroundings, why):
    config, why_fast = settled(change(small(), **{"parallel": {"reduction": "auto"}, **sections}), **surroundings)
    assert config.parallel.reduction == "fast" and why in why_fast


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_what_the_user_chose_is_kept(reduction):
    config, why_fast = settled(change(small(), parallel={"reduction": reduction}), platform="gpu")
    assert config.parallel.reduction == reduction and why_fast is None


def test_only_sizes_that_the_model_takes_are_recommended():
    """gpt's width has no divisor that is a multiple of 5, and the vocabulary may not shrink below the tokenizer's."""
    heads = [f for f in findings(*planned(change(load_recipe("gpt"), parallel={"tensor": 5}), MeshShape(1, 2, 5))) if "heads is" in f]
    assert heads and not any("make it" in f for f in heads)
    uneven = change(load_recipe("gpt"), parallel={"policy": "fsdp"}, model={"padded_vocab_size": 50257})
    (vocab,) = (f for f in findings(*planned(uneven, MeshShape(1, 8, 1))) if "vocab is" in f)
    assert "make it 50264, or" in vocab


def test_all_degrees_that_the_devices_allow_are_recommended():
    found = findings(*planned(change(load_recipe("tiny_lm"), parallel={"tensor": 3}), MeshShape(1, 8, 3)))
    assert not any("--parallel.tensor one of [1]" in f for f in found)


def test_a_policy_without_devices_to_divide_over_is_said():
    config = change(small(), parallel={"policy": "fsdp"})
    assert "which has 1 device here" in undivided_text(planned(config, MeshShape(8, 1, 1))[1])
    assert undivided_text(planned(config, MeshShape(4, 2, 1))[1]) is None
    assert undivided_text(planned(config, MeshShape(1, 1, 2))[1]) is None
    assert undivided_text(planned(change(small(), parallel={"policy": "dp"}), MeshShape(8, 1, 1))[1]) is None


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_blocks_of_moments_that_tensor_parallelism_would_cut_are_refused(moments):
    config = change(small(), model={"mlp_dim": 144}, optimizer={"moments": moments}, parallel={"tensor": 2})
    [found] = findings(*planned(config, MeshShape(1, 1, 2)))
    assert f"--optimizer.moments is {moments}" in found and "holds 72 of its 144: use --optimizer.moments float32" in found
    assert findings(*planned(change(config, model={"mlp_dim": 128}), MeshShape(1, 1, 2))) == []
    assert findings(*planned(change(config, optimizer={"moments": "float32"}), MeshShape(1, 1, 2))) == []


def test_a_copy_of_exact_mode_is_weighed_with_the_moments_that_are_kept_and_the_gradients_there_are():
    """2 bytes of 8 for the moments; of frozen parameters neither moments nor gradients."""
    from small_pi0 import small_pi0

    def fits(config, memory_bytes):
        settled = settle_reduction(*planned(config, MeshShape(1, 2, 1)), "cpu", memory_bytes)[0]
        return settled.parallel.reduction == "exact"

    def least(config):
        low, high = 0, 1 << 40
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(config, middle) else (middle, high)
        return high

    config = change(small_pi0(), parallel={"policy": "fsdp"})
    num = declare(config.model).num_params
    assert least(config) == pytest.approx(2 * num * (2 + 4 + 8 + 12 / 2), rel=0.01)
    assert least(change(config, optimizer={"moments": "int8"})) == pytest.approx(2 * num * (2 + 4 + 8 + 6 / 2), rel=0.01)
    declared = declare(change(config, model={"freeze": "vision"}).model)
    trained, stays = declared.trained.num_params, num - declared.trained.num_params
    frozen = change(config, model={"freeze": "vision"})
    assert least(frozen) == pytest.approx(2 * (trained * (2 + 4 + 8 + 6) + stays * (1 + 2)), rel=0.01)

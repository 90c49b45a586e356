import dataclasses

import pytest
from small import small

from sharder.config import UserError
from sharder.models.build import declare
from sharder.preflight import account_batch, check, exact_average_is_refused, findings, untested_exactness
from sharder.recipes import load_recipe
from sharder.sharding.mesh import MeshShape
from sharder.sharding.plan import make_plan


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


def test_all_findings_come_at_once():
    config = change(small(), parallel={"policy": "fsdp"}, data={"seq_len": 64})
    found = findings(*planned(config, MeshShape(1, 6, 1)))
    assert [any(word in f for f in found) for word in ("embed is 64", "mlp is 128", "--train.global-batch-size is 16", "--data.seq-len")] == [True] * 4
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


def test_an_unknown_name_to_replicate_is_a_finding():
    config = change(small(), parallel={"replicate": ("blocks/nothing",)})
    assert any("the model has no such parameter" in f for f in findings(*planned(config, MeshShape(1, 1, 1))))


def test_tensor_parallelism_of_a_model_without_it_is_a_finding():
    assert any("no axis that tensor parallelism divides" in f for f in findings(*planned(load_recipe("mlp"), MeshShape(1, 4, 2))))


def test_batch_accounting_multiplies_to_the_global_batch():
    accounting = account_batch(change(small(), train={"global_batch_size": 64, "microbatch_size": 2}), 4)
    assert (accounting.microbatch_size, accounting.num_replicas, accounting.num_slots) == (2, 4, 8)
    assert accounting.global_batch_size == 64 and accounting.slot_size == 8


@pytest.mark.parametrize("batch, micro, replicas, nearest", [(30, None, 4, "28 or 32"), (3, None, 4, "4"), (60, 4, 4, "48 or 64")])
def test_a_batch_that_does_not_divide_names_the_nearest_that_do(batch, micro, replicas, nearest):
    with pytest.raises(UserError, match=f"use {nearest}"):
        account_batch(change(small(), train={"global_batch_size": batch, "microbatch_size": micro}), replicas)


def test_an_untested_promise_is_said_and_a_tested_one_is_not():
    config = change(small(), parallel={"reduction": "exact"})
    assert untested_exactness(config, "cpu", "0.10.2") is None
    assert "on cuda with jax 0.10.2" in untested_exactness(config, "cuda", "0.10.2")
    assert "with jax 0.12.0" in untested_exactness(config, "cpu", "0.12.0")
    assert untested_exactness(small(), "cuda", "0.12.0") is None


def test_a_moving_average_is_refused_in_exact_mode_where_its_bits_are_not_known_to_hold():
    config = change(small(), parallel={"reduction": "exact"}, train={"ema_decay": 0.9})
    assert exact_average_is_refused(config, "0.10.2") is None
    assert "with jax 0.12.0" in exact_average_is_refused(config, "0.12.0")
    assert exact_average_is_refused(change(config, parallel={"reduction": "fast"}), "0.12.0") is None

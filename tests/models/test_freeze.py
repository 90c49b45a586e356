from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from sharder.config import UserError
from sharder.models.build import declare
from sharder.models.freeze import PRESETS, describe
from sharder.models.lora import without_lora
from sharder.recipes import load_recipe

FULL = load_recipe("pi0_lora").model


def trained(freeze: str) -> set[str]:
    declared = declare(replace(FULL, freeze=freeze))
    return set(declared.trained.params)


@pytest.mark.parametrize(
    "preset, parts",
    [
        (
            "none",
            {"vision", "llm/tokens", "llm/backbone", "llm/action", "action_in", "action_out", "state", "time_in", "time_out"},
        ),
        ("vision", {"llm/tokens", "llm/backbone", "llm/action", "action_in", "action_out", "state", "time_in", "time_out"}),
        ("backbone", {"vision", "llm/action", "action_in", "action_out", "state", "time_in", "time_out"}),
        ("vision-and-backbone", {"llm/action", "action_in", "action_out", "state", "time_in", "time_out"}),
        ("all-but-lora", {"llm/backbone", "llm/action"}),
    ],
)
def test_a_preset_leaves_these_parts(preset, parts):
    assert {"/".join(p.split("/")[: 2 if p.startswith("llm") else 1]) for p in trained(preset)} == parts


def test_language_but_lora_trains_the_image_encoder_and_low_rank_additions():
    paths = trained("language-but-lora")
    assert all(p.endswith(("lora_a", "lora_b")) for p in paths if p.startswith("llm/")) and any(
        p.startswith("vision/") for p in paths
    )


def test_frozen_parameters_are_bfloat16_and_no_others():
    declared = declare(FULL)
    assert {d.dtype for p, d in declared.params.items() if p in declared.frozen} == {"bfloat16"}
    assert {d.dtype for d in declared.trained.params.values()} == {"float32"}


def test_the_table_adds_up():
    declared = declare(FULL)
    total = describe(declared.params, declared.frozen).splitlines()[-1].replace(",", "").split()[1:]
    counts = [
        sum(int(np.prod(d.shape)) for p, d in declared.params.items() if (p in declared.frozen) == frozen)
        for frozen in (False, True)
    ]
    assert [int(x) for x in total] == [counts[0], 4 * counts[0], counts[1], 2 * counts[1]] and sum(counts) == 3_288_036_112


@pytest.mark.parametrize("preset", [p for p in PRESETS if "lora" in p])
def test_presets_of_lora_need_it(preset):
    with pytest.raises(UserError, match="lora_rank"):
        replace(load_recipe("pi0").model, freeze=preset)


def test_nothing_is_frozen_where_low_rank_additions_were_merged():
    shapes = {"weight": (1, 6, 4), "lora_a": (1, 6, 2), "lora_b": (1, 2, 4)}
    params = {f"llm/backbone/blocks/mlp/down/{name}": jnp.ones(shape) for name, shape in shapes.items()}
    assert FULL.freeze == "language-but-lora"
    merged, plain = without_lora(params, FULL)
    assert list(merged) == ["llm/backbone/blocks/mlp/down/weight"]
    assert (plain.freeze, plain.backbone.lora_rank, plain.action_expert.lora_rank) == ("none", 0, 0)

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sharder.config import ExpertConfig, Pi0Config, SiglipConfig, UserError
from sharder.models.build import declare
from sharder.models.openpi_weights import by_source, detect, openpi_shapes, sources, to_openpi, to_ours, without_value

TINY = Pi0Config(
    vision=SiglipConfig(embed_dim=12, num_layers=2, mlp_dim=20, num_heads=3, patch_size=2),
    backbone=ExpertConfig(embed_dim=10, mlp_dim=14), action_expert=ExpertConfig(embed_dim=8, mlp_dim=6), num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=6, vocab_size=11, action_dim=5, image_size=(8, 8),
)  # fmt: skip
LORA = replace(
    TINY,
    backbone=replace(TINY.backbone, lora_rank=2, lora_alpha=2.0),
    action_expert=replace(TINY.action_expert, lora_rank=3, lora_alpha=3.0),
)
CASES = {
    "pi0": TINY, "pi05": replace(TINY, variant="pi05"), "lora": LORA, "as many key-value heads": replace(TINY, num_kv_heads=4),
    "lora, as many key-value heads": replace(LORA, num_kv_heads=4),
}  # fmt: skip
cases = pytest.mark.parametrize("config", CASES.values(), ids=CASES)
FULL = {
    "pi0": Pi0Config(),
    "pi05": Pi0Config(variant="pi05"),
    "pi0_lora": Pi0Config(backbone=ExpertConfig(lora_rank=16), action_expert=ExpertConfig(1024, 4096, 32, 32.0)),
}


def shapes(config: Pi0Config) -> dict:
    return {path: decl.shape for path, decl in declare(config).params.items()}


def published(name: str) -> tuple[dict, int]:
    """The tree of the original, read off its own program: shapes by path, and the number of parameters."""
    text = (Path(__file__).parents[1] / "data" / "openpi_parameter_tree.txt").read_text()
    section = text.split(f"== {name}\n")[1].split("\n==")[0]
    rows = [line.split("\t") for line in section.splitlines() if "\t" in line]
    return {path: tuple(map(int, shape.strip("(),").split(","))) for path, shape, _ in rows}, int(
        section.split("TOTAL params ")[1].split()[0]
    )


@pytest.mark.parametrize("name", FULL)
def test_the_full_size_tree_has_the_paths_and_shapes_of_the_original(name):
    assert openpi_shapes(FULL[name], shapes(FULL[name])) == published(name)[0]


@pytest.mark.parametrize("name", FULL)
def test_the_full_size_model_has_as_many_parameters_as_the_original(name):
    assert declare(FULL[name]).num_params == published(name)[1]


@cases
def test_every_parameter_has_a_source(config):
    assert sources(config).keys() == declare(config).params.keys()


def random_params(config: Pi0Config) -> dict:
    rng = np.random.default_rng(0)
    return {path: rng.standard_normal(shape).astype(np.float32) for path, shape in shapes(config).items()}


@cases
def test_there_and_back_keeps_every_bit(config):
    ours = random_params(config)
    back = to_ours(config, to_openpi(config, ours))
    assert all(np.array_equal(back[path], x) for path, x in ours.items())


@cases
def test_converted_arrays_have_the_declared_shapes(config):
    theirs = to_openpi(config, random_params(config))
    assert {path: x.shape for path, x in theirs.items()} == openpi_shapes(config, shapes(config))


def test_a_slice_of_their_array_is_our_projection():
    rng = np.random.default_rng(1)
    theirs = {p: rng.standard_normal(s).astype(np.float32) for p, s in openpi_shapes(TINY, shapes(TINY)).items()}
    ours = to_ours(TINY, theirs)
    expected = theirs["PaliGemma/llm/layers/attn/kv_einsum_1/w"][2, 1, 0].copy()  # layer 2, value, head 0: (D, H)
    assert np.array_equal(ours["llm/action/blocks/attention/value/weight"][2, :, 0], expected)


@cases
def test_sizes_are_read_off_the_tree(config):
    assert detect(openpi_shapes(config, shapes(config))) == replace(config)


def test_a_partition_travels_to_their_dimensions():
    entries = {path: decl.axes for path, decl in declare(TINY).params.items()}
    path = "llm/backbone/blocks/attention/key/weight"
    assert sources(TINY)[path].layout(entries[path]) == ("layers", None, "kv_heads", "embed", "head_dim")


def test_arrays_that_hold_several_of_ours_are_told_apart():
    parts = by_source(TINY)["PaliGemma/llm/layers/mlp/gating_einsum"]
    assert {path.split("/")[-2]: source.index for path, source in parts.items()} == {"gate": 0, "up": 1}


def test_value_is_stripped_only_where_every_path_ends_with_it():
    assert without_value(["a/value", "b/c/value"]) == {"a/value": "a", "b/c/value": "b/c"}
    assert without_value(["a/value", "b/c"]) == {"a/value": "a/value", "b/c": "b/c"}


@pytest.mark.parametrize(
    "tree, said", [({"x": (1,)}, "no model known here"), (published("pi0_fast")[0], "pi0-FAST")], ids=["other", "fast"]
)
def test_a_tree_of_another_model_is_refused(tree, said):
    with pytest.raises(UserError, match=said):
        detect(tree)


def test_a_tree_that_lacks_a_size_is_refused_by_name():
    tree = openpi_shapes(TINY, shapes(TINY))
    del tree["PaliGemma/img/pos_embedding"]
    with pytest.raises(UserError, match="PaliGemma/img/pos_embedding"):
        detect(tree)

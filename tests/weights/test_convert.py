import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from openpi_trees import ORIGINAL, TINY, openpi_tree, write_openpi

from sharder.config import UserError, WeightsConfig
from sharder.models.build import declare, flatten
from sharder.models.openpi_weights import to_ours
from sharder.train.initial_weights import fit, load
from sharder.train.weight_files import open_weights
from sharder.weights.convert import divided_plan, export_weights, import_weights, load_all, model_of


def read_numpy(folder: Path) -> dict[str, np.ndarray]:
    with ocp.PyTreeCheckpointer() as checkpointer:
        args = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), dict(checkpointer.metadata(folder).item_metadata.tree)
        )
        return flatten(checkpointer.restore(folder, restore_args=args))


def imported(path: Path) -> dict[str, jax.Array]:
    file = open_weights(path)
    return load_all(file, model_of(file))[0]


def test_a_checkpoint_of_the_original_trainer_is_read_bit_for_bit():
    theirs = {p.removeprefix("params/").removesuffix("/value"): x for p, x in read_numpy(ORIGINAL / "params").items()}
    ours = imported(ORIGINAL)
    expected = to_ours(model_of(open_weights(ORIGINAL)), theirs)
    assert ours.keys() == expected.keys() and all(np.array_equal(ours[p], x) for p, x in expected.items())


def test_what_is_exported_has_the_paths_dtypes_and_bits_of_the_original(tmp_path):
    import_weights(ORIGINAL, tmp_path / "ours")
    export_weights(tmp_path / "ours", tmp_path / "theirs")
    was, now = read_numpy(ORIGINAL / "params"), read_numpy(tmp_path / "theirs" / "params")
    assert {p: (x.shape, x.dtype) for p, x in was.items()} == {p: (x.shape, x.dtype) for p, x in now.items()}
    assert all(np.array_equal(now[p], x) for p, x in was.items())


def test_import_of_an_export_has_the_same_fingerprint(tmp_path):
    manifests = []
    source = ORIGINAL
    for name in ("first", "second"):
        import_weights(source, tmp_path / name)
        manifests.append(json.loads((tmp_path / name / "manifest.json").read_text()))
        source = tmp_path / f"{name}_exported"
        export_weights(tmp_path / name, source)
    assert manifests[0]["fingerprint"] == manifests[1]["fingerprint"]


@pytest.mark.parametrize("value", [True, False], ids=["value", "no value"])
def test_a_trailing_value_may_be_there_or_not(tmp_path, value):
    tree = openpi_tree(TINY)
    found = imported(write_openpi(tmp_path / "x", tree, value))
    assert all(np.array_equal(found[p], x) for p, x in to_ours(TINY, tree).items())


def test_bfloat16_stays_bfloat16(tmp_path):
    import_weights(write_openpi(tmp_path / "x", openpi_tree(TINY, jax.numpy.bfloat16)), tmp_path / "ours")
    leaves = json.loads((tmp_path / "ours" / "manifest.json").read_text())["leaves"]
    assert {leaf["dtype"] for leaf in leaves.values()} == {"bfloat16"}


def test_every_leaf_is_divided_over_the_devices_as_it_is_loaded(tmp_path):
    found = imported(write_openpi(tmp_path / "x", openpi_tree(TINY)))
    plan, _ = divided_plan(declare(TINY))
    divided = {p for p, leaf in plan.leaves.items() if leaf.divided}
    shares = {p: x.addressable_shards[0].data.size / x.size for p, x in found.items()}
    assert len(divided) > 40 and {p: s for p, s in shares.items() if p in divided and s != 1 / 8} == {}


def test_theirs_is_asked_for_divided_too(tmp_path, monkeypatch):
    file = open_weights(write_openpi(tmp_path / "x", openpi_tree(TINY)))
    asked = {}
    monkeypatch.setattr(
        type(file),
        "read",
        lambda self, target: (
            asked.update(target) or {p: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for p, x in target.items()}
        ),
    )
    load_all(file, TINY)
    share = asked["PaliGemma/llm/layers/mlp/gating_einsum"].sharding.shard_shape((2, 2, 16, 32))
    assert share == (2, 2, 2, 32)


def test_a_tree_that_does_not_fit_is_refused_with_every_difference_side_by_side(tmp_path):
    tree = openpi_tree(TINY)
    del tree["PaliGemma/img/head/bias"]
    tree["PaliGemma/img/tail/bias"] = np.zeros(3, np.float32)
    tree["PaliGemma/llm/final_norm/scale"] = np.zeros(5, np.float32)
    file = open_weights(write_openpi(tmp_path / "x", tree))
    with pytest.raises(UserError) as error:
        load_all(file, TINY)
    text = str(error.value)
    assert "nothing was loaded: 1 missing, 1 unexpected, 1 of another shape" in text
    assert (
        all(path in text for path in ("img/head/bias", "img/tail/bias", "final_norm/scale"))
        and "(5,)" in text
        and "(16,)" in text
    )


@pytest.mark.parametrize("resize, action_dim, ok", [("actions=pad", 8, True), ("actions=slice", 4, True), ("actions=reinit", 4, True),
                                                    ("none", 8, False), ("actions=pad", 4, False), ("actions=slice", 8, False)])  # fmt: skip
def test_another_action_dimension_needs_a_named_surgery(tmp_path, resize, action_dim, ok):
    file, model = open_weights(write_openpi(tmp_path / "x", openpi_tree(TINY))), replace(TINY, action_dim=action_dim)
    assert fit(file, model, declare(model).params, resize).ok == ok


@pytest.mark.parametrize("action_dim", [8, 4])
def test_what_is_resized_keeps_what_both_have(tmp_path, action_dim):
    tree, model = openpi_tree(TINY), replace(TINY, action_dim=action_dim)
    file, declared = open_weights(write_openpi(tmp_path / "x", tree)), declare(model)
    plan, mesh = divided_plan(declared)
    found = load(
        file, model, declared.params, plan.shardings("storage", mesh), "actions=pad" if action_dim > 6 else "actions=slice"
    )
    kernel, both = np.asarray(found["action_out/kernel"]), min(action_dim, 6)
    assert np.array_equal(kernel[:, :both], tree["action_out_proj/kernel"][:, :both]) and (kernel[:, both:] == 0).all()


def test_weights_without_lora_begin_a_model_with_it(tmp_path):
    model = replace(TINY, backbone=replace(TINY.backbone, lora_rank=2))
    file = open_weights(write_openpi(tmp_path / "x", openpi_tree(TINY)))
    found = fit(file, model, declare(model).params, "none")
    assert found.ok and found.fresh and all("lora" in path for path in found.fresh)


def test_lora_is_merged_into_what_is_exported(tmp_path):
    model = replace(
        TINY,
        backbone=replace(TINY.backbone, lora_rank=2, lora_alpha=2.0),
        action_expert=replace(TINY.action_expert, lora_rank=2, lora_alpha=2.0),
    )
    tree = openpi_tree(model)
    export_weights(write_openpi(tmp_path / "x", tree), tmp_path / "plain", value=False)
    found = read_numpy(tmp_path / "plain" / "params")
    q = {k: tree[f"PaliGemma/llm/layers/attn/q_einsum_1/{k}"].astype(np.float64) for k in ("w", "lora_a", "lora_b")}
    np.testing.assert_allclose(
        found["params/PaliGemma/llm/layers/attn/q_einsum_1/w"], q["w"] + q["lora_a"] @ q["lora_b"], rtol=1e-5, atol=1e-5
    )
    assert not any("lora" in path for path in found)


def test_paligemma_fills_the_backbone_and_leaves_the_expert(tmp_path):
    tree = {
        p.removeprefix("PaliGemma/"): x
        for p, x in openpi_tree(TINY).items()
        if p.startswith("PaliGemma/") and "_1" not in p.replace("Dense_1", "").replace("LayerNorm_1", "")
    }
    np.savez(tmp_path / "x.npz", **{f"params/{p}": x for p, x in tree.items()})
    found = fit(open_weights(tmp_path / "x.npz"), TINY, declare(TINY).params, "none")
    assert found.ok and {p.split("/")[0] for p in found.fresh} == {
        "llm",
        "action_in",
        "action_out",
        "state",
        "time_in",
        "time_out",
    }


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no weights: give a run"):
        open_weights(tmp_path)


def test_an_existing_folder_is_never_overwritten(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "file").write_text("")
    with pytest.raises(UserError, match="exists and is not empty"):
        import_weights(ORIGINAL, tmp_path / "x")


@pytest.mark.slow
def test_one_step_from_imported_weights_comes_back_with_the_same_fingerprint(tmp_path):
    from small_pi0 import small_pi0

    from sharder.stop import StopRequest
    from sharder.train.loop import train
    from sharder.weights.convert import fingerprint_of

    config = small_pi0()
    tree = openpi_tree(replace(config.model, image_size=(8, 8)))
    source = write_openpi(tmp_path / "theirs", {p: 0.1 * x for p, x in tree.items()})
    config = replace(
        config,
        weights=WeightsConfig(path=str(source)),
        train=replace(config.train, steps=2),
        data=replace(config.data, validation_fraction=0.0),
    )
    assert train(config, tmp_path / "run", "auto", StopRequest()) == 0
    export_weights(tmp_path / "run", tmp_path / "exported")
    trained, again, before = (fingerprint_of(imported(p))[0] for p in (tmp_path / "run", tmp_path / "exported", source))
    assert trained == again != before
    export_weights(tmp_path / "run", tmp_path / "averaged", average=True)
    assert fingerprint_of(imported(tmp_path / "averaged"))[0] not in (trained, before)

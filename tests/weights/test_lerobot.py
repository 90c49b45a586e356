import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import safetensors
from openpi_trees import ORIGINAL, TINY, openpi_tree, write_openpi
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from sharder.config import Pi0Config, UserError
from sharder.models.build import declare
from sharder.models.lerobot_weights import EMBEDDING, OUTPUT, detect, lerobot_shapes
from sharder.train.initial_weights import fit, load
from sharder.train.weight_files import model_of, open_weights
from sharder.weights.convert import divided_plan, export_weights, fingerprint_of, import_weights, load_all

LANGUAGE = "model.paligemma_with_expert.paligemma.model.language_model."


def loaded(path: Path) -> dict[str, jax.Array]:
    file = open_weights(path)
    return load_all(file, model_of(file))[0]


@pytest.fixture
def exported(tmp_path) -> Path:
    """LeRobot's file of the tiny pi0."""
    export_weights(write_openpi(tmp_path / "openpi", openpi_tree(TINY)), tmp_path / "lerobot", format="lerobot")
    return tmp_path / "lerobot" / "model.safetensors"


def change(path: Path, changes: dict[str, np.ndarray | None]) -> Path:
    """Tensors set, or removed where None; the header keeps what it has."""
    with safe_open(path, framework="numpy") as file:
        header = file.metadata()
    tensors = load_file(path) | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, path, header)
    return path


@pytest.mark.parametrize("case", ["a checkpoint of the original trainer", "pi0.5 in bfloat16"])
def test_there_and_back_keeps_all_bits(tmp_path, case):
    source = ORIGINAL
    if "pi0.5" in case:
        config = replace(TINY, variant="pi05", num_kv_heads=2)
        source = write_openpi(tmp_path / "openpi", openpi_tree(config, jax.numpy.bfloat16))
    import_weights(source, tmp_path / "ours")
    export_weights(tmp_path / "ours", tmp_path / "lerobot", format="lerobot")
    import_weights(tmp_path / "lerobot", tmp_path / "back")
    was, now = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("ours", "back"))
    assert (now["fingerprint"], now["leaves"], now["model"]) == (was["fingerprint"], was["leaves"], was["model"])


def expected_tensors(config: Pi0Config, tree: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    """LeRobot's tensors outside of layers and in one of them, from openpi's tree."""
    img, llm, root = "PaliGemma/img/", "PaliGemma/llm/", "model.paligemma_with_expert."
    vision, projector = (
        root + "paligemma.model.vision_tower.vision_model.",
        root + "paligemma.model.multi_modal_projector.linear.",
    )
    time = "time_mlp" if config.variant == "pi05" else "action_time_mlp"
    found = {
        vision + "embeddings.patch_embedding.weight": tree[img + "embedding/kernel"].transpose(3, 2, 0, 1),
        vision + "embeddings.patch_embedding.bias": tree[img + "embedding/bias"],
        vision + "embeddings.position_embedding.weight": tree[img + "pos_embedding"][0],
        vision + "post_layernorm.weight": tree[img + "Transformer/encoder_norm/scale"],
        vision + "post_layernorm.bias": tree[img + "Transformer/encoder_norm/bias"],
        projector + "weight": tree[img + "head/kernel"].T, projector + "bias": tree[img + "head/bias"],
        root + "paligemma.lm_head.weight": tree[llm + "embedder/input_embedding"],
        root + "gemma_expert.lm_head.weight": np.zeros((config.vocab_size, config.action_expert.embed_dim)),
    }  # fmt: skip
    for name in ["action_in_proj", "action_out_proj", f"{time}_in", f"{time}_out"] + ["state_proj"] * (config.variant == "pi0"):
        found |= {f"model.{name}.weight": tree[f"{name}/kernel"].T, f"model.{name}.bias": tree[f"{name}/bias"]}
    block, D = {p: x[layer] for p, x in tree.items() if "encoderblock/" in p or "llm/layers/" in p}, config.vision.embed_dim
    theirs, ours = f"{vision}encoder.layers.{layer}.", img + "Transformer/encoderblock/"
    for name, part in (("layer_norm1", "LayerNorm_0"), ("layer_norm2", "LayerNorm_1")):
        found |= {f"{theirs}{name}.weight": block[f"{ours}{part}/scale"], f"{theirs}{name}.bias": block[f"{ours}{part}/bias"]}
    dense = {"mlp.fc1": "MlpBlock_0/Dense_0", "mlp.fc2": "MlpBlock_0/Dense_1"}
    dense |= {f"self_attn.{x[0]}_proj": f"MultiHeadDotProductAttention_0/{x}" for x in ("query", "key", "value")}
    dense |= {"self_attn.out_proj": "MultiHeadDotProductAttention_0/out"}
    for name, part in dense.items():
        kernel = block[f"{ours}{part}/kernel"]
        found[f"{theirs}{name}.weight"] = kernel.reshape((-1, D) if name.endswith("out_proj") else (kernel.shape[0], -1)).T
        found[f"{theirs}{name}.bias"] = block[f"{ours}{part}/bias"].reshape(-1)
    ours = llm + "layers/"
    for theirs, n in ((f"{root}paligemma.model.language_model.", ""), (f"{root}gemma_expert.model.", "_1")):
        at = f"{theirs}layers.{layer}."
        q, kv, o = (block[f"{ours}attn/{x}{n}/w"] for x in ("q_einsum", "kv_einsum", "attn_vec_einsum"))
        gate, up = block[f"{ours}mlp{n}/gating_einsum"]
        weights = {
            "self_attn.q_proj": q.transpose(0, 2, 1).reshape(-1, q.shape[1]), "self_attn.o_proj": o.reshape(-1, o.shape[2]).T,
            "self_attn.k_proj": kv[0, 0].T, "self_attn.v_proj": kv[1, 0].T,
            "mlp.gate_proj": gate.T, "mlp.up_proj": up.T, "mlp.down_proj": block[f"{ours}mlp{n}/linear"].T,
        }  # fmt: skip
        found |= {f"{at}{name}.weight": x for name, x in weights.items()}
        norms = {
            at + "input_layernorm": f"{ours}pre_attention_norm{n}",
            at + "post_attention_layernorm": f"{ours}pre_ffw_norm{n}",
        }
        for name, part in (norms | {theirs + "norm": f"{llm}final_norm{n}"}).items():
            values = tree | block
            if n and config.variant == "pi05":
                found[f"{name}.dense.weight"] = values[f"{part}/Dense_0/kernel"].T
                found[f"{name}.dense.bias"] = values[f"{part}/Dense_0/bias"]
            else:
                found[f"{name}.weight"] = values[f"{part}/scale"]
    return found


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_every_tensor_has_the_name_and_the_order_of_lerobot(tmp_path, variant):
    """As read off LeRobot 0.6.1 and openpi's conversion to torch: the table here is not that of the conversion."""
    config = replace(TINY, variant=variant)
    tree = openpi_tree(config)
    export_weights(write_openpi(tmp_path / "openpi", tree), tmp_path / "lerobot", format="lerobot")
    found = load_file(tmp_path / "lerobot" / "model.safetensors")
    expected = expected_tensors(config, tree, 0) | expected_tensors(config, tree, 1)
    assert found.keys() == expected.keys()
    assert [name for name, x in expected.items() if not np.array_equal(found[name], x)] == []


@pytest.mark.parametrize("config", [Pi0Config(), Pi0Config(variant="pi05", max_prompt_len=200)], ids=["pi0", "pi0.5"])
def test_the_full_size_model_is_told_by_its_shapes(config):
    ours = {path: decl.shape for path, decl in declare(config).params.items()}
    shapes = lerobot_shapes(config, ours, {})
    assert sum(map(np.prod, shapes.values())) == sum(map(np.prod, ours.values()))
    assert detect(shapes, action_expert=config.action_expert, max_prompt_len=config.max_prompt_len) == config


def test_other_names_for_the_same_tensors_are_known(exported, tmp_path):
    before = fingerprint_of(loaded(exported))[0]
    tensors = load_file(exported)
    table = tensors.pop("model." + OUTPUT)
    # Without the prefix, without `vision_model`, and the table under its own name beside an output projection that is not used.
    tensors = {name.removeprefix("model.").replace(".vision_model.", "."): x for name, x in tensors.items()}
    with safe_open(exported, framework="numpy") as file:
        save_file(tensors | {EMBEDDING: table, OUTPUT: 0 * table}, tmp_path / "other.safetensors", file.metadata())
    assert fingerprint_of(loaded(tmp_path / "other.safetensors"))[0] == before


def test_what_does_not_fit_is_listed_with_the_names_of_the_file_and_nothing_is_loaded(exported):
    layer = LANGUAGE + "layers.1."
    change(exported, {
        "model.state_proj.bias": None, layer + "mlp.up_proj.weight": None, layer + "mlp.up.weight": np.zeros(3, np.float32),
        layer + "mlp.gate_proj.weight": np.zeros((5, 7), np.float32), "model.time_mlp_in.bias": np.zeros(2, np.float32),
    })  # fmt: skip
    with pytest.raises(UserError) as error:
        load_all(open_weights(exported), TINY)
    text = str(error.value)
    assert "nothing was loaded: 2 missing, 2 unexpected, 1 of another shape" in text
    rows = {name: line for line in text.splitlines() for name in line.split()[:1]}
    plain = layer.removeprefix("model.")
    assert "missing" in rows["state_proj.bias"] and "missing" in rows[plain + "mlp.up_proj.weight"]
    assert "unexpected" in rows[plain + "mlp.up.weight"] and "unexpected" in rows["time_mlp_in.bias"]
    assert "(5, 7)" in rows[plain + "mlp.gate_proj.weight"] and "(32, 16)" in rows[plain + "mlp.gate_proj.weight"]


def test_another_number_of_layers_is_told_once_for_each_kind_of_tensor(exported):
    found = fit(open_weights(exported), replace(TINY, num_layers=3), declare(replace(TINY, num_layers=3)).params, "none")
    assert not found.missing and not found.unexpected and len(found.misshapen) == 18
    assert all("layers.*." in name for name in found.misshapen)


@pytest.mark.parametrize("action_dim", [8, 4])
def test_what_is_resized_keeps_what_both_have(exported, action_dim):
    file, model = open_weights(exported), replace(TINY, action_dim=action_dim)
    declared = declare(model)
    plan, mesh = divided_plan(declared)
    found = load(
        file, model, declared.params, plan.shardings("storage", mesh), "actions=pad" if action_dim > 6 else "actions=slice"
    )
    kernel, both, was = np.asarray(found["action_out/kernel"]), min(action_dim, 6), openpi_tree(TINY)["action_out_proj/kernel"]
    assert np.array_equal(kernel[:, :both], was[:, :both]) and (kernel[:, both:] == 0).all()


def test_every_device_reads_its_own_part_only(exported, monkeypatch):
    read: list[tuple[str, int]] = []

    class Part:
        def __init__(self, name: str, whole):
            self.name, self.whole = name, whole

        def __getitem__(self, index):
            array = self.whole[index]
            read.append((self.name, array.size))
            return array

    @contextmanager
    def recording(path, framework):
        with safe_open(path, framework=framework) as file:
            yield SimpleNamespace(get_slice=lambda name: Part(name, file.get_slice(name)))

    opened = open_weights(exported)
    monkeypatch.setattr(safetensors, "safe_open", recording)
    load_all(opened, TINY)
    parts = [size for name, size in read if name == LANGUAGE + "layers.1.mlp.gate_proj.weight"]
    whole = TINY.backbone.embed_dim * TINY.backbone.mlp_dim
    assert jax.device_count() == 8 and parts == [whole // 8] * 8


def test_low_rank_additions_are_merged_or_refused(tmp_path):
    model = replace(
        TINY,
        backbone=replace(TINY.backbone, lora_rank=2, lora_alpha=2.0),
        action_expert=replace(TINY.action_expert, lora_rank=2, lora_alpha=2.0),
    )
    tree = openpi_tree(model)
    source = write_openpi(tmp_path / "x", tree)
    export_weights(source, tmp_path / "lerobot", format="lerobot")
    q = {k: tree[f"PaliGemma/llm/layers/attn/q_einsum/{k}"][1].astype(np.float64) for k in ("w", "lora_a", "lora_b")}
    merged = (q["w"] + q["lora_a"] @ q["lora_b"]).transpose(0, 2, 1).reshape(-1, model.backbone.embed_dim)
    found = load_file(tmp_path / "lerobot" / "model.safetensors")
    np.testing.assert_allclose(found[LANGUAGE + "layers.1.self_attn.q_proj.weight"], merged, rtol=1e-5, atol=1e-5)
    assert not any("lora" in name for name in found)
    with pytest.raises(UserError, match="no place for low-rank additions"):
        export_weights(source, tmp_path / "other", format="lerobot", merge_lora=False)


def test_a_file_that_is_not_whole_is_refused(exported):
    exported.write_bytes(exported.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        open_weights(exported)


def test_a_file_of_another_model_is_refused(tmp_path):
    save_file({"model.embed_tokens.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="it is not LeRobot's pi0 or pi0.5"):
        model_of(open_weights(tmp_path))

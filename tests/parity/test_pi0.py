"""pi0 against transformers' PI0ForConditionalGeneration, where it is installed (make test-parity installs it).

transformers reads the file that `sharder weights export --format lerobot` writes by its own renaming of LeRobot's tensors, so
that names and layouts are checked too.
"""

import jax
import numpy as np
import pytest
from flax import nnx
from openpi_trees import openpi_tree, write_openpi

from sharder.config import ExpertConfig, Pi0Config, SiglipConfig
from sharder.models.build import declare, unflatten
from sharder.models.openpi_weights import to_ours
from sharder.train.weight_files import open_weights
from sharder.weights.convert import export_weights, fingerprint_of, load_all

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")
if not hasattr(transformers, "PI0ForConditionalGeneration"):
    pytest.skip("this transformers has no PI0ForConditionalGeneration: make test-parity", allow_module_level=True)

CONFIG = Pi0Config(
    vision=SiglipConfig(embed_dim=32, num_layers=2, mlp_dim=48, num_heads=4, patch_size=4), backbone=ExpertConfig(64, 96),
    action_expert=ExpertConfig(32, 64), num_layers=3, num_heads=8, num_kv_heads=1, head_dim=16, vocab_size=96, max_prompt_len=9,
    action_dim=6, action_horizon=5, cameras=("front", "side", "wrist"), image_size=(8, 8), compute_dtype="float32", remat="none",
    attention="reference",
)  # fmt: skip
PATCHES, IMAGE = 4, CONFIG.vocab_size


def their_config():
    def gemma(expert: ExpertConfig):
        return transformers.GemmaConfig(
            vocab_size=CONFIG.vocab_size, hidden_size=expert.embed_dim, intermediate_size=expert.mlp_dim,
            num_hidden_layers=CONFIG.num_layers, num_attention_heads=CONFIG.num_heads, num_key_value_heads=CONFIG.num_kv_heads,
            head_dim=CONFIG.head_dim,
        )  # fmt: skip

    vision = transformers.SiglipVisionConfig(
        hidden_size=CONFIG.vision.embed_dim, intermediate_size=CONFIG.vision.mlp_dim, num_hidden_layers=CONFIG.vision.num_layers,
        num_attention_heads=CONFIG.vision.num_heads, image_size=CONFIG.image_size[0], patch_size=CONFIG.vision.patch_size,
        vision_use_head=False,
    )  # fmt: skip
    width = CONFIG.backbone.embed_dim
    vlm = transformers.PaliGemmaConfig(
        vision_config=vision, text_config=gemma(CONFIG.backbone), projection_dim=width, hidden_size=width, image_token_index=IMAGE,
        vocab_size=CONFIG.vocab_size,
    )  # fmt: skip
    return transformers.PI0Config(
        vlm_config=vlm, dit_config=gemma(CONFIG.action_expert), chunk_size=CONFIG.action_horizon, max_state_dim=CONFIG.action_dim,
        max_action_dim=CONFIG.action_dim,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tree() -> dict[str, np.ndarray]:
    """Random weights in openpi's tree: also where a fresh model has zeros, which would hide what lies behind them."""
    return {path: (0.3 * x).astype(np.float32) for path, x in openpi_tree(CONFIG).items()}


@pytest.fixture(scope="module")
def theirs(tree, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pi0")
    export_weights(write_openpi(folder / "openpi", tree), folder / "lerobot", format="lerobot")
    their_config().save_pretrained(folder / "lerobot")
    model, loading = transformers.PI0ForConditionalGeneration.from_pretrained(
        str(folder / "lerobot"), dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    return model.eval()


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    """Three examples with prompts of different lengths; one lacks a camera in the middle."""
    rng, B = np.random.default_rng(1), 3
    shape = (B, CONFIG.action_horizon, CONFIG.action_dim)
    found = {f"image/{name}": rng.uniform(-1, 1, (B, 8, 8, 3)).astype(np.float32) for name in CONFIG.cameras}
    found |= {f"image_mask/{name}": np.array([True, name != "side", True]) for name in CONFIG.cameras}
    lengths = np.array([9, 4, 7])
    return found | {
        "tokens": rng.integers(1, CONFIG.vocab_size, (B, 9)).astype(np.int32), "token_mask": np.arange(9) < lengths[:, None],
        "state": rng.standard_normal(shape[::2]).astype(np.float32), "actions": rng.standard_normal(shape).astype(np.float32),
        "noise": rng.standard_normal(shape).astype(np.float32), "time": np.array([0.1, 0.55, 0.93], np.float32),
    }  # fmt: skip


def their_inputs(batch: dict[str, np.ndarray]) -> dict:
    """They have tokens of present cameras only, then the prompt, then what fills up."""
    present = np.stack([batch[f"image_mask/{name}"] for name in CONFIG.cameras], 1)
    rows = [
        [IMAGE] * (PATCHES * seen.sum()) + list(tokens[mask])
        for seen, tokens, mask in zip(present, batch["tokens"], batch["token_mask"])
    ]
    longest = max(map(len, rows))
    pixels = np.stack([batch[f"image/{name}"] for name in CONFIG.cameras], 1).transpose(0, 1, 4, 2, 3)
    return {
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
        "pixel_values": torch.tensor(pixels), "pixel_attention_mask": torch.tensor(present),
        "state": torch.tensor(batch["state"]), "noise": torch.tensor(batch["noise"]),
    }  # fmt: skip


def test_loss_and_velocity_are_those_of_transformers(tree, theirs, batch):
    @jax.jit
    def ours(params, batch):
        losses, weights, found = nnx.merge(declare(CONFIG).graphdef, params).flow_losses(batch, batch["noise"], batch["time"])
        return losses.sum() / weights.sum(), found["velocity"]

    loss, velocity = ours(unflatten(to_ours(CONFIG, tree)), batch)
    with torch.no_grad():
        found = theirs(**their_inputs(batch), timestep=torch.tensor(batch["time"]), actions=torch.tensor(batch["actions"]))
    np.testing.assert_allclose(float(loss), float(found.loss), rtol=1e-4)
    np.testing.assert_allclose(np.asarray(velocity), found.logits.numpy(), rtol=1e-3, atol=1e-4)


def test_sampled_actions_are_those_of_transformers(tree, theirs, batch):
    run = jax.jit(lambda params, batch: nnx.merge(declare(CONFIG).graphdef, params).sample(batch, batch["noise"], 10))
    ours = np.asarray(run(unflatten(to_ours(CONFIG, tree)), batch))
    expected = theirs.sample_actions(**their_inputs(batch), num_steps=10).numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-4)


def test_weights_that_transformers_saved_are_imported(tree, theirs, tmp_path):
    theirs.save_pretrained(str(tmp_path / "saved"))
    read = load_all(open_weights(tmp_path / "saved"), CONFIG)[0]
    before = load_all(open_weights(write_openpi(tmp_path / "openpi", tree)), CONFIG)[0]
    assert fingerprint_of(read)[0] == fingerprint_of(before)[0]

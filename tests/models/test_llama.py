from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sharder.config import LlamaConfig, ParallelConfig, UserError
from sharder.models.build import declare, flatten, unflatten
from sharder.models.llama import rotary_frequencies
from sharder.models.llama_weights import read_params, write_params
from sharder.recipes import load_recipe
from sharder.sharding.compute import ComputeLayout
from sharder.sharding.mesh import MeshShape, make_mesh
from sharder.sharding.plan import make_plan

TINY = LlamaConfig(
    vocab_size=20, padded_vocab_size=24, max_seq_len=8, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24, num_layers=2,
    rope_theta=100.0,
)  # fmt: skip
STRETCHED = replace(TINY, rope_factor=4.0, rope_low_freq_factor=1.0, rope_high_freq_factor=3.0, rope_original_seq_len=32)
TOKENS = np.random.default_rng(0).integers(0, 20, (4, 8)).astype(np.int32)


@cache
def random_params(config: LlamaConfig) -> dict:
    rng = np.random.default_rng(1)
    scale = lambda path: 1.0 if path.endswith("_scale") else 0.0  # noqa: E731
    draw = lambda path, d: jnp.asarray(0.3 * rng.standard_normal(d.shape) + scale(path), d.dtype)  # noqa: E731
    return unflatten({p: draw(p, d) for p, d in declare(config).params.items()})


def model(params: dict, config: LlamaConfig = TINY):
    return nnx.merge(declare(config).graphdef, params)


def reference_logits(params: dict, tokens: np.ndarray, config: LlamaConfig) -> np.ndarray:
    """In numpy, float64, one head at a time, pairs turned as complex numbers."""
    w = {path: np.asarray(x, np.float64) for path, x in flatten(params).items()}

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale

    H, T = config.head_dim, tokens.shape[1]
    frequency = config.rope_theta ** (-np.arange(0, H, 2) / H)
    if config.rope_factor is not None:
        wave = 2 * np.pi / frequency
        longest, shortest = (
            config.rope_original_seq_len / f for f in (config.rope_low_freq_factor, config.rope_high_freq_factor)
        )
        smooth = (config.rope_original_seq_len / wave - config.rope_low_freq_factor) / (
            config.rope_high_freq_factor - config.rope_low_freq_factor
        )
        mixed = (1 - smooth) * frequency / config.rope_factor + smooth * frequency
        frequency = np.where(wave < shortest, frequency, np.where(wave > longest, frequency / config.rope_factor, mixed))
    turn = np.exp(1j * np.arange(T)[:, None] * frequency)

    def rotated(x):
        z = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)

    x = w["embed/tokens"][tokens]
    future = np.triu(np.ones((T, T), bool), 1)
    for layer in range(config.num_layers):
        b = {path.removeprefix("blocks/"): a[layer] for path, a in w.items() if path.startswith("blocks/")}
        y = norm(x, b["norm1_scale"])
        for n in range(config.num_heads):
            k = n // (config.num_heads // config.num_kv_heads)
            q, keys, values = rotated(y @ b["q"][:, n]), rotated(y @ b["k"][:, k]), y @ b["v"][:, k]
            scores = np.where(future, -np.inf, q @ keys.swapaxes(1, 2) / np.sqrt(H))
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            x = x + weights / weights.sum(-1, keepdims=True) @ values @ b["attn_out"][n]
        y = norm(x, b["norm2_scale"])
        gate = y @ b["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ b["up"])) @ b["down"]
    out = w["head/out"] if "head/out" in w else w["embed/tokens"].T
    return norm(x, w["head/norm_scale"]) @ out


@pytest.mark.parametrize(
    "config", [TINY, replace(TINY, tie_embeddings=True), STRETCHED], ids=["own output", "tied", "stretched"]
)
def test_logits_are_those_of_llama(config, strict_promotion):
    found = jax.jit(lambda p, t: model(p, config)(t))(random_params(config), TOKENS)
    expected = reference_logits(random_params(config), TOKENS, config)
    np.testing.assert_allclose(found[..., :20], expected[..., :20], rtol=1e-4, atol=1e-4)


def test_stretching_touches_long_wavelengths_only():
    plain, stretched = rotary_frequencies(TINY), rotary_frequencies(STRETCHED)
    assert stretched[0] == plain[0] and stretched[-1] == pytest.approx(plain[-1] / 4)


def test_decoding_with_a_cache_equals_the_full_forward_pass():
    llama, prompt = model(random_params(TINY)), 3
    full = np.asarray(jax.jit(lambda t: llama(t))(TOKENS))
    logits, cache = jax.jit(llama.prefill)(np.where(np.arange(8) < prompt, TOKENS, 7).astype(np.int32))
    assert cache[0].shape == (2, 4, 8, 2, 8)  # key-value heads are cached, not their copies
    found, decode = [np.asarray(logits[:, prompt - 1])], jax.jit(llama.decode)
    for position in range(prompt, 8):
        logits, cache = decode(TOKENS[:, position], np.int32(position), cache)
        found.append(np.asarray(logits))
    np.testing.assert_allclose(np.stack(found, 1), full[:, prompt - 1 :], rtol=1e-4, atol=1e-4)


def loss_and_gradients(layout=None):
    batch = {"inputs": TOKENS, "targets": np.roll(TOKENS, -1, 1)}
    layout = {} if layout is None else {"layout": layout}
    loss = lambda p: model(p).losses(batch, None, **layout)[0].sum()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize("shape", [MeshShape(2, 2, 2), MeshShape(1, 2, 4)], ids=["key heads divided", "key heads whole"])
def test_dividing_heads_and_vocabulary_changes_nothing(shape):
    declared = declare(TINY)
    plan = make_plan(declared.params, declared.rules, ParallelConfig(policy="fsdp"), shape)
    assert bool(plan.whole_over_tensor) == (shape.tensor == 4)
    layout = ComputeLayout(make_mesh(shape), plan, "update")
    params = jax.device_put(random_params(TINY), unflatten(plan.shardings("storage", layout.mesh)))
    loss, gradients = loss_and_gradients(layout)(params)
    expected, expected_gradients = loss_and_gradients()(random_params(TINY))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for path, g in flatten(gradients).items():
        np.testing.assert_allclose(g, flatten(expected_gradients)[path], rtol=1e-3, atol=1e-4, err_msg=path)


@pytest.mark.parametrize("name, num_params", [("llama", 1_235_814_400), ("llama_8b", 8_030_261_248)])
def test_published_sizes_have_the_published_number_of_parameters(name, num_params):
    """Llama 3.2 1B and Llama 3.1 8B: their model cards say 1.23 B and 8 B; the sums are of the published shapes."""
    assert declare(load_recipe(name).model).num_params == num_params


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True], ids=["own output", "tied"])
def test_what_is_exported_is_imported(tmp_path, tied, dtype):
    config = replace(STRETCHED, tie_embeddings=tied, param_dtype=dtype)
    decls = declare(config).params
    params = {p: np.asarray(x) for p, x in flatten(random_params(config)).items()}
    write_params(tmp_path / "model", config, params)
    found = read_params(tmp_path / "model", config, decls)
    assert set(found) == set(params)
    for path, x in found.items():
        dim = {"embed/tokens": 0, "head/out": 1}.get(path)
        index = slice(None) if dim is None else (slice(None),) * dim + (slice(20),)  # rows of padding are not kept
        assert x.dtype == params[path].dtype and x.shape == params[path].shape
        np.testing.assert_array_equal(x[index], params[path][index], err_msg=path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_kv_heads": 4}, r"- num_key_value_heads is 2, ours 4"),
        ({"rope_theta": 5.0}, r"- rope_theta is 100.0, ours 5.0"),
        ({"rope_factor": 2.0}, r"- rope_scaling is"),
    ],
)
def test_another_models_weights_are_refused_with_what_differs(tmp_path, change, message):
    write_params(tmp_path, TINY, {p: np.asarray(x) for p, x in flatten(random_params(TINY)).items()})
    other = replace(TINY, **change)
    with pytest.raises(UserError, match=message):
        read_params(tmp_path, other, declare(other).params)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no config.json"):
        read_params(tmp_path, TINY, declare(TINY).params)


def test_a_model_is_not_overwritten(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match="holds a model already"):
        write_params(tmp_path, TINY, {})

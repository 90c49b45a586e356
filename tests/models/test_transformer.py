from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sharder.config import TransformerConfig
from sharder.models.build import declare, flatten, initial_params, unflatten
from sharder.models.layers import dropout
from sharder.models.transformer import Transformer

TINY = TransformerConfig(
    vocab_size=20, padded_vocab_size=24, max_seq_len=8, embed_dim=16, num_heads=2, mlp_dim=32, num_layers=2
)
TOKENS = np.random.default_rng(0).integers(0, 20, (3, 8)).astype(np.int32)
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 2]], np.int32)
QUICK = {"xla_backend_optimization_level": 0}
"""Half the time to compile."""


@pytest.fixture(autouse=True)
def strict(request):
    # A norm in bfloat16 promotes on purpose.
    if "bfloat16" not in request.node.name:
        request.getfixturevalue("strict_promotion")


@cache
def random_params(config: TransformerConfig) -> dict:
    """Parameters far from their initial values, so that biases count and logits are of order 1."""
    rng = np.random.default_rng(1)
    scale = lambda path: 1.0 if path.endswith("_scale") else 0.0  # noqa: E731
    draw = lambda decl: 0.2 * rng.standard_normal(decl.shape)  # noqa: E731
    return unflatten({p: jnp.asarray(draw(d) + scale(p), d.dtype) for p, d in declare(config).params.items()})


def model(params: dict, config: TransformerConfig = TINY) -> Transformer:
    return nnx.merge(declare(config).graphdef, params)


@cache
def compiled(config: TransformerConfig = TINY):
    """(params, tokens, **options) -> logits."""
    return jax.jit(lambda params, tokens, **options: model(params, config)(tokens, **options))


def logits_of(tokens: np.ndarray, config: TransformerConfig = TINY, **options) -> np.ndarray:
    return np.asarray(compiled(config)(random_params(config), tokens, **options))


def reference_logits(params: dict, tokens: np.ndarray, num_heads: int) -> np.ndarray:
    """GPT-2 in numpy, float64, one head at a time; without padded entries masked."""
    w = {path: np.asarray(x, np.float64) for path, x in flatten(params).items()}

    def norm(x, scale, bias):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias

    x = w["embed/tokens"][tokens] + w["embed/positions"][: tokens.shape[1]]
    future = np.triu(np.ones((tokens.shape[1],) * 2, bool), 1)
    for layer in range(len(w["blocks/q"])):
        b = {path.removeprefix("blocks/"): a[layer] for path, a in w.items() if path.startswith("blocks/")}
        y = norm(x, b["norm1_scale"], b["norm1_bias"])
        for n in range(num_heads):
            q, k, v = (y @ b[name][:, n] + b[f"{name}_bias"][n] for name in "qkv")
            scores = np.where(future, -np.inf, q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            x = x + weights / weights.sum(-1, keepdims=True) @ v @ b["attn_out"][n]
        x = x + b["attn_out_bias"]
        h = norm(x, b["norm2_scale"], b["norm2_bias"]) @ b["mlp_in"] + b["mlp_in_bias"]
        gelu = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + gelu @ b["mlp_out"] + b["mlp_out_bias"]
    out = w["head/out"] if "head/out" in w else w["embed/tokens"].T
    return norm(x, w["head/norm_scale"], w["head/norm_bias"]) @ out


@pytest.mark.parametrize("tied", [False, True], ids=["own output", "tied output"])
def test_logits_are_those_of_gpt2(tied):
    config = replace(TINY, tie_embeddings=tied)
    expected = reference_logits(random_params(config), TOKENS, config.num_heads)[..., :20]
    np.testing.assert_allclose(logits_of(TOKENS, config)[..., :20], expected, rtol=1e-4, atol=1e-5)


def test_padded_vocabulary_has_no_probability():
    probabilities = jax.nn.softmax(jnp.asarray(logits_of(TOKENS)), axis=-1)
    assert (np.asarray(probabilities)[..., 20:] == 0).all()


def influence(segments: np.ndarray | None = None) -> np.ndarray:
    """(T, T) booleans: whether the logits at position t have a gradient with respect to what stands at position s."""
    params, direction = random_params(TINY), jnp.asarray(np.random.default_rng(2).standard_normal(20), jnp.float32)

    def projected(positions):
        changed = params | {"embed": params["embed"] | {"positions": positions}}
        options = {} if segments is None else {"segments_BT": segments}
        return model(changed)(TOKENS[:1], **options)[0, :, :20] @ direction

    jacobian = jax.jit(jax.jacrev(projected))(params["embed"]["positions"])
    return np.asarray(jnp.abs(jacobian).sum(-1) > 0)


def test_a_position_sees_itself_and_what_came_before():
    assert np.array_equal(influence(), np.tril(np.ones((8, 8), bool)))


def test_a_document_sees_no_other():
    assert np.array_equal(influence(SEGMENTS), np.tril(SEGMENTS[0][:, None] == SEGMENTS[0][None]))


def test_a_packed_document_is_computed_as_if_alone():
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 0]], np.int32)
    packed = logits_of(TOKENS[:1], segments_BT=SEGMENTS, positions_BT=positions)
    np.testing.assert_allclose(packed[:, 3:7], logits_of(TOKENS[:1, 3:7]), rtol=1e-5, atol=1e-5)


def test_decoding_with_a_cache_equals_the_full_forward_pass():
    prompt = 3
    cached = model(random_params(TINY))
    full = logits_of(TOKENS)
    # What stands behind the prompt must not matter.
    padded = np.where(np.arange(8) < prompt, TOKENS, 7).astype(np.int32)
    logits, cache = jax.jit(cached.prefill)(padded)
    found = [np.asarray(logits[:, prompt - 1])]
    decode = jax.jit(cached.decode)
    for position in range(prompt, 8):
        logits, cache = decode(TOKENS[:, position], np.int32(position), cache)
        found.append(np.asarray(logits))
    np.testing.assert_allclose(np.stack(found, 1), full[:, prompt - 1 :], rtol=1e-5, atol=1e-5)


def keys(*numbers: int) -> jax.Array:
    return jax.vmap(jax.random.key)(jnp.array(numbers, jnp.uint32))


DROPPING = replace(TINY, dropout_rate=0.5)


def test_permuting_a_batch_permutes_what_dropout_leaves():
    order = np.array([2, 0, 1])
    found = logits_of(TOKENS[order], DROPPING, keys_B=keys(5, 6, 7)[order])
    np.testing.assert_allclose(found, logits_of(TOKENS, DROPPING, keys_B=keys(5, 6, 7))[order], rtol=1e-5, atol=1e-6)


def test_dropout_of_an_example_does_not_depend_on_its_neighbours():
    others = np.where(np.arange(3)[:, None] == 1, TOKENS, 0).astype(np.int32)
    found = logits_of(others, DROPPING, keys_B=keys(8, 6, 9))
    np.testing.assert_allclose(found[1], logits_of(TOKENS, DROPPING, keys_B=keys(5, 6, 7))[1], rtol=1e-5, atol=1e-6)


def test_another_key_drops_other_elements():
    same = np.repeat(TOKENS[:1], 3, 0)
    a, b, c = logits_of(same, DROPPING, keys_B=keys(5, 5, 6))
    assert np.array_equal(a, b) and not np.allclose(a, c, atol=0.01)


def test_without_keys_nothing_is_dropped():
    np.testing.assert_allclose(logits_of(TOKENS, DROPPING), logits_of(TOKENS), rtol=1e-6)


def test_every_layer_drops_other_elements():
    # Two equal layers that write nothing but their dropped constant: equal masks would give 0, 0 or 2, 2.
    blocks = {p: jnp.zeros_like(x) for p, x in random_params(DROPPING)["blocks"].items()}
    params = random_params(DROPPING) | {"blocks": blocks | {"mlp_out_bias": jnp.ones_like(blocks["mlp_out_bias"])}}
    seen = []

    def watched(x, keys_B, site, rate):
        out = dropout(x, keys_B, site, rate)
        if site == 1:
            jax.debug.callback(lambda kept: seen.append(np.asarray(kept)), out != 0)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sharder.models.transformer.dropout", watched)
        jax.jit(lambda p: model(p, DROPPING)(TOKENS, keys_B=keys(5, 6, 7)))(params)
        jax.effects_barrier()
    assert len(seen) == 2 and not np.array_equal(*seen)


def test_dropout_keeps_the_mean():
    found = np.asarray(dropout(jnp.ones((64, 8, 16)), keys(*range(64)), 0, 0.25))
    # 8,192 draws of 0 or 4/3: standard deviation of the mean 0.0064.
    assert set(np.unique(found)) == {np.float32(0), np.float32(1 / 0.75)} and found.mean() == pytest.approx(1, abs=0.026)


def test_places_in_a_layer_drop_other_elements():
    masks = [np.asarray(dropout(jnp.ones((1, 8, 16)), keys(3), site, 0.5)) for site in range(3)]
    assert not any(np.array_equal(masks[a], masks[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def batch(**more) -> dict:
    return {"inputs": TOKENS, "targets": np.roll(TOKENS, -1, 1), **more}


def test_loss_is_the_summed_weighted_cross_entropy():
    weights = np.random.default_rng(3).integers(0, 2, TOKENS.shape).astype(np.float32)
    data = batch(weights=weights)
    losses, sums = jax.jit(lambda p: model(p).losses(data, None))(random_params(TINY))
    logits = reference_logits(random_params(TINY), TOKENS, TINY.num_heads)[..., :20]
    log_z = np.log(np.exp(logits).sum(-1))
    entropy = log_z - np.take_along_axis(logits, data["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(losses, (entropy * weights).sum(1), rtol=1e-5)
    assert np.array_equal(sums, weights.sum(1))


def test_without_weights_every_target_counts():
    losses = jax.jit(lambda p, d: model(p).losses(d, None))
    found = [losses(random_params(TINY), d) for d in (batch(), batch(weights=np.ones(TOKENS.shape, np.float32)))]
    assert all(np.array_equal(a, b) for a, b in zip(*found))


def gradient(config: TransformerConfig):
    return jax.grad(lambda p: model(p, config).losses(batch(), None)[0].sum())


def test_recomputed_blocks_have_the_same_gradients():
    kept, recomputed = (
        flatten(jax.jit(gradient(replace(TINY, remat=remat)), compiler_options=QUICK)(random_params(TINY)))
        for remat in ("none", "block")
    )
    for path in kept:
        np.testing.assert_allclose(recomputed[path], kept[path], rtol=1e-5, atol=1e-5, err_msg=path)


def kept_per_layer(remat: str) -> int:
    """Elements that the forward pass hands to the backward pass for each layer."""
    params = jax.eval_shape(lambda: random_params(TINY))
    jaxpr = jax.make_jaxpr(gradient(replace(TINY, remat=remat)))(params)
    forward = next(e for e in jaxpr.eqns if e.primitive.name == "scan")
    return sum(v.aval.size for v in forward.outvars[1:]) // TINY.num_layers


def test_recomputed_blocks_keep_only_their_input():
    assert kept_per_layer("block") == TOKENS.size * TINY.embed_dim


def test_blocks_that_are_not_recomputed_keep_more():
    assert kept_per_layer("none") > 5 * TOKENS.size * TINY.embed_dim


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_bfloat16_logits_are_float32_and_close(param_dtype):
    config = replace(TINY, compute_dtype="bfloat16", param_dtype=param_dtype)
    params = jax.tree.map(lambda x: x.astype(jnp.dtype(param_dtype)), random_params(TINY))
    found = compiled(config)(params, TOKENS)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found[..., :20], logits_of(TOKENS)[..., :20], atol=0.1)


def test_initial_values_have_gpt2s_standard_deviations():
    config = replace(TINY, embed_dim=64, num_layers=8, mlp_dim=256, vocab_size=256, padded_vocab_size=256, max_seq_len=64)
    params = flatten(jax.jit(lambda: initial_params(config, jax.random.key(0)), compiler_options=QUICK)())
    # "Language Models are Unsupervised Multitask Learners", 2.3: what writes to the residual stream has 1/sqrt(16) of 0.02.
    expected = {"embed/tokens": 0.02} | {f"blocks/{name}": 0.02 for name in ("q", "k", "v", "mlp_in")}
    expected |= {f"blocks/{name}": 0.005 for name in ("attn_out", "mlp_out")}
    assert {path: float(np.std(params[path])) for path in expected} == pytest.approx(expected, rel=0.03)

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import small

from sharder.checkpoint.restore import restore_numpy
from sharder.config import ParallelConfig, UserError
from sharder.data.tokenize import ByteTokenizer
from sharder.models.build import declare, initial_params
from sharder.serve import generate as module
from sharder.serve.generate import check_request, choose_token, continue_tokens, encode_prompt, generate_text, make_generator
from sharder.serve.sampling import Sampling
from sharder.stop import StopRequest
from sharder.train.loop import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 60 steps on the default corpus, and its configuration."""
    config = dataclasses.replace(
        small(),
        data=dataclasses.replace(small().data, source="text", validation_fraction=0.05),
        train=dataclasses.replace(small().train, steps=60),
    )
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    train(config, run_dir, "auto", StopRequest())
    return config, run_dir


ONE = ParallelConfig(policy="dp")


@pytest.fixture(autouse=True)
def backend_is_up(monkeypatch):
    monkeypatch.setattr(module.cluster, "initialize", lambda _: None)


def load_params(declared, run_dir, step):
    return module.load_params(*module.place(small().model, ONE), run_dir, step)


def generate(generator, params, prompt, num_new, temperature=0.0, top_k=0, seed=0, length=32):
    tokens = np.zeros(length, np.int32)
    tokens[: len(prompt)] = prompt
    return np.asarray(
        generator(
            params,
            tokens,
            np.int32(0),
            np.int32(len(prompt)),
            np.int32(num_new),
            np.uint32(seed),
            np.float32(temperature),
            np.int32(top_k),
        )
    )


def test_greedy_equals_the_uncached_argmax(trained):
    config, run_dir = trained
    declared = declare(config.model)
    params = load_params(declared, run_dir, 60)
    prompt = list(b"The na")
    ours = generate(make_generator(declared.graphdef), params, prompt, 20)
    forward = jax.jit(lambda p, t: nnx.merge(declared.graphdef, p)(t[None])[0])
    expected = list(prompt)
    for _ in range(20):
        padded = np.zeros(32, np.int32)
        padded[: len(expected)] = expected
        expected.append(int(jnp.argmax(forward(params, padded)[len(expected) - 1])))
    assert ours[: len(expected)].tolist() == expected


def test_one_compilation_serves_every_request(trained):
    config, _ = trained
    declared = declare(config.model)
    params = initial_params(config.model, jax.random.key(0))
    generator = make_generator(declared.graphdef)
    for length, new, temperature, top_k in ((1, 3, 0.0, 0), (7, 20, 0.8, 50), (31, 1, 1.5, 1)):
        generate(generator, params, list(range(length)), new, temperature, top_k)
    assert generator._cache_size() == 1


@pytest.mark.parametrize("prompt_len, num_new", [(5, 80), (32, 3), (50, 20)])
def test_text_beyond_the_positions_is_read_again_from_the_last_half(trained, prompt_len, num_new):
    """Greedy, against the uncached argmax over the tokens that the rule keeps; still one compilation."""
    config, _ = trained
    declared = declare(config.model)
    params = initial_params(config.model, jax.random.key(3))
    generator = make_generator(declared.graphdef)
    prompt = np.random.default_rng(0).integers(0, 256, prompt_len).tolist()
    ours = continue_tokens(generator, params, prompt, num_new, 32, Sampling(temperature=0.0))
    forward = jax.jit(lambda p, t: nnx.merge(declared.graphdef, p)(t[None])[0])
    expected, start = list(prompt), 0
    while len(expected) < prompt_len + num_new:
        start = start if len(expected) - start < 32 else len(expected) - 16
        padded = np.zeros(32, np.int32)
        padded[: len(expected) - start] = expected[start:]
        expected.append(int(jnp.argmax(forward(params, padded)[len(expected) - start - 1])))
    assert ours == expected and generator._cache_size() == 1


def test_a_window_read_again_draws_other_numbers():
    """The key of a choice is the place in the whole text, so that no draw is used twice."""
    seen = []

    def generator(params, tokens, first, prompt_len, num_new, *_):
        seen.extend(range(int(first + prompt_len), int(first + prompt_len + num_new)))
        return tokens

    continue_tokens(generator, None, [1, 2], 100, 32, Sampling())
    assert seen == list(range(2, 102))


def test_a_prompt_that_is_not_text_is_refused():
    with pytest.raises(UserError, match="--prompt is not UTF-8: character 3"):
        encode_prompt(ByteTokenizer(), "ab\udcff")


def test_loading_replaces_a_fresh_models_logits_bit_for_bit(trained):
    config, run_dir = trained
    declared = declare(config.model)
    logits = jax.jit(lambda p, t: nnx.merge(declared.graphdef, p)(t))
    tokens = np.arange(32, dtype=np.int32)[None]
    saved = {p.removeprefix("params/"): x for p, x in restore_numpy(run_dir, 60).items() if p.startswith("params/")}
    from sharder.models.build import unflatten

    expected = np.asarray(logits(jax.device_put(unflatten(saved)), tokens))
    fresh = np.asarray(logits(initial_params(config.model, jax.random.key(0)), tokens))
    loaded = np.asarray(logits(load_params(declared, run_dir, 60), tokens))
    assert (fresh != expected).any()
    assert (loaded == expected).all()


def test_the_same_seed_gives_the_same_text_and_another_another(trained):
    config, run_dir = trained
    config = dataclasses.replace(config, parallel=ONE)
    texts = [generate_text(config, run_dir, None, "The ", 20, Sampling(temperature=1.0, seed=seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("The ")


def test_top_k_leaves_only_the_k_most_likely():
    logits = jnp.array([0.0, 3.0, 2.0, -1.0, 2.5])
    drawn = {int(choose_token(logits, jax.random.key(i), jnp.float32(5.0), jnp.int32(2))) for i in range(50)}
    assert drawn == {1, 4}
    everything = {int(choose_token(logits, jax.random.key(i), jnp.float32(50.0), jnp.int32(0))) for i in range(100)}
    assert everything == {0, 1, 2, 3, 4}


def test_sampling_follows_the_probabilities():
    logits = jnp.log(jnp.array([0.7, 0.2, 0.1]))
    choose = jax.jit(jax.vmap(lambda key: choose_token(logits, key, jnp.float32(1.0), jnp.int32(0))))
    counts = np.bincount(np.asarray(choose(jax.random.split(jax.random.key(0), 20000))), minlength=3) / 20000
    np.testing.assert_allclose(counts, [0.7, 0.2, 0.1], atol=0.02)


@pytest.mark.parametrize(
    "num_prompt, num_new, sampling, message",
    [
        (0, 5, Sampling(), "--prompt is empty"),
        (5, 0, Sampling(), "--max-new-tokens is 0"),
        (5, 5, Sampling(temperature=-1.0), "--temperature is -1.0"),
        (5, 5, Sampling(temperature=float("inf")), "--temperature is inf"),
        (5, 5, Sampling(temperature=float("nan")), "--temperature is nan"),
        (5, 5, Sampling(top_k=-1), "--top-k is -1"),
        (5, 5, Sampling(top_k=2**31), "--top-k is 2147483648"),
        (5, 5, Sampling(seed=-1), "--seed is -1"),
        (5, 5, Sampling(seed=2**32), "--seed is 4294967296"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(num_prompt, num_new, sampling, message):
    with pytest.raises(UserError, match=message):
        check_request(small().model, num_prompt, num_new, sampling)


GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(data=2, tensor=2), ParallelConfig(policy="fsdp", fsdp=4, tensor=2)],
    ids=["data 2, tensor 2", "fsdp 4, tensor 2"],
)
def test_a_mesh_gives_the_greedy_tokens_of_one_device(trained, parallel):
    config, run_dir = trained
    one, many = (
        generate_text(dataclasses.replace(config, parallel=p), run_dir, None, "The na", 20, GREEDY) for p in (ONE, parallel)
    )
    assert many == one


@pytest.mark.parametrize(
    "parallel, message",
    [
        (ParallelConfig(data=4, tensor=4), "= 16 devices, but there are 8; on a CPU add --cluster.cpu-devices 16"),
        (ParallelConfig(tensor=8), "heads is 4, which does not divide into 8"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_with_the_numbers(trained, parallel, message):
    config, run_dir = trained
    with pytest.raises(UserError, match=message):
        generate_text(dataclasses.replace(config, parallel=parallel), run_dir, None, "The na", 20, GREEDY)

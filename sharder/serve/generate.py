"""Text from a trained language model: prompt in, continuation out, compiled once for any prompt.

Shape letters: B batch (1 here), L the model's number of positions, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from sharder import checkpoint
from sharder.config import RunConfig, TransformerConfig, UserError
from sharder.data.tokenize import open_tokenizer
from sharder.models.build import Declared, declare, unflatten
from sharder.serve.sampling import Sampling
from sharder.train.saved import verify_leaves


def choose_token(logits_V: jax.Array, key: jax.Array, temperature: jax.Array, top_k: jax.Array) -> jax.Array:
    """A token id, int32; greedy where the temperature is 0. All arguments may be traced."""
    k = jnp.where(top_k == 0, logits_V.size, jnp.minimum(top_k, logits_V.size))
    threshold = jnp.sort(logits_V)[logits_V.size - k]
    kept = jnp.where(logits_V >= threshold, logits_V, -jnp.inf)
    sampled = jax.random.categorical(key, kept / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature == 0, jnp.argmax(logits_V), sampled).astype(jnp.int32)


def make_generator(graphdef: nnx.GraphDef) -> Callable[..., jax.Array]:
    """The compiled (params, tokens (L,), prompt_len, num_new, seed, temperature, top_k) -> tokens (L,).

    Lengths, seed, temperature and k are traced, so that one program serves every request.
    """

    def generate(params, tokens_L, prompt_len, num_new, seed, temperature, top_k):
        model = nnx.merge(graphdef, params)
        key = jax.random.key(seed)
        logits_BLV, cache = model.prefill(tokens_L[None])
        logits_V = jax.lax.dynamic_index_in_dim(logits_BLV[0], prompt_len - 1, keepdims=False)

        def not_done(carry):
            return carry[0] < prompt_len + num_new

        def body(carry):
            position, tokens_L, logits_V, cache = carry
            token = choose_token(logits_V, jax.random.fold_in(key, position), temperature, top_k)
            tokens_L = tokens_L.at[position].set(token)
            logits_BV, cache = model.decode(token[None], position, cache)
            return position + 1, tokens_L, logits_BV[0], cache

        return jax.lax.while_loop(not_done, body, (prompt_len, tokens_L, logits_V, cache))[1]

    return jax.jit(generate)


def check_request(config: TransformerConfig, num_prompt: int, num_new: int, sampling: Sampling) -> None:
    """Raises UserError for a request that the model cannot serve."""
    room = config.max_seq_len
    if num_prompt == 0:
        raise UserError("--prompt is empty: give at least one character.")
    if num_new < 1:
        raise UserError(f"--max-new-tokens is {num_new}, but must be at least 1.")
    if num_prompt + num_new > room:
        raise UserError(
            f"the prompt has {num_prompt} tokens and --max-new-tokens is {num_new}: {num_prompt + num_new} together, but the"
            f" model has {room} positions. Ask for at most {max(room - num_prompt, 0)} new tokens, or shorten the prompt."
        )
    if sampling.temperature < 0:
        raise UserError(f"--temperature is {sampling.temperature}, but must be at least 0.")
    if sampling.top_k < 0:
        raise UserError(f"--top-k is {sampling.top_k}, but must be at least 0 (0: no limit).")


def load_params(declared: Declared, run_dir: Path, step: int) -> dict:
    """The parameters of a checkpoint on the first device, verified; optimizer state is not read."""
    place = SingleDeviceSharding(jax.devices()[0])
    target = {
        f"params/{path}": jax.ShapeDtypeStruct(decl.shape, jnp.dtype(decl.dtype), sharding=place)
        for path, decl in declared.params.items()
    }
    leaves = checkpoint.restore(run_dir, step, target)
    verify_leaves(run_dir, step, leaves, None)
    return unflatten(leaves)["params"]


def generate_text(
    config: RunConfig, run_dir: Path, step: int | None, prompt: str, max_new_tokens: int, sampling: Sampling
) -> str:
    """Prompt and continuation. Raises UserError where the run, the prompt or the lengths do not allow it."""
    if not isinstance(config.model, TransformerConfig):
        raise UserError(f"{run_dir} is a run of {type(config.model).__name__}, which has no text to generate.")
    tokenizer = open_tokenizer(config.data.tokenizer)
    ids = tokenizer.encode(prompt)
    check_request(config.model, len(ids), max_new_tokens, sampling)
    declared = declare(config.model)
    params = load_params(declared, run_dir, checkpoint.choose_step(run_dir, step))
    tokens_L = np.zeros(config.model.max_seq_len, np.int32)
    tokens_L[: len(ids)] = ids
    request = (np.int32(len(ids)), np.int32(max_new_tokens), np.uint32(sampling.seed))
    generate = make_generator(declared.graphdef)
    tokens_L = generate(params, tokens_L, *request, np.float32(sampling.temperature), np.int32(sampling.top_k))
    return tokenizer.decode(np.asarray(tokens_L)[: len(ids) + max_new_tokens].tolist())

"""Text from a trained language model: prompt in, continuation out, compiled once for any prompt.

Shape letters: B batch (1 here), L the model's number of positions, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharder import checkpoint, cluster
from sharder.checkpoint.restore import restore
from sharder.config import LANGUAGE_MODELS, ModelConfig, ParallelConfig, RunConfig, UserError
from sharder.data.tokenize import Tokenizer, open_tokenizer
from sharder.facts import called
from sharder.models.build import declare, unflatten
from sharder.ops.layout import SINGLE, Layout
from sharder.serve.sampling import Sampling
from sharder.sharding.compute import ComputeLayout
from sharder.sharding.mesh import make_mesh, resolve_mesh_shape
from sharder.sharding.plan import Plan, make_plan
from sharder.train.own_files import with_kept_tokenizer
from sharder.train.saved import verify_leaves

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def choose_token(logits_V: jax.Array, key: jax.Array, temperature: jax.Array, top_k: jax.Array) -> jax.Array:
    """A token id, int32; greedy where the temperature is 0. All arguments may be traced."""
    k = jnp.where(top_k == 0, logits_V.size, jnp.minimum(top_k, logits_V.size))
    threshold = jnp.sort(logits_V)[logits_V.size - k]
    kept = jnp.where(logits_V >= threshold, logits_V, -jnp.inf)
    sampled = jax.random.categorical(key, kept / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature == 0, jnp.argmax(logits_V), sampled).astype(jnp.int32)


def make_generator(graphdef: nnx.GraphDef, layout: Layout = SINGLE) -> Callable[..., jax.Array]:
    """The compiled (params, tokens (L,), first, prompt_len, num_new, seed, temperature, top_k) -> tokens (L,).

    `first` is the place of tokens[0] in the whole text, which keys the choice of a token. All but the parameters' shapes is
    traced, so that one program serves every request.
    """

    def generate(params, tokens_L, first, prompt_len, num_new, seed, temperature, top_k):
        model = nnx.merge(graphdef, params)
        key = jax.random.key(seed)
        logits_BLV, cache = model.prefill(tokens_L[None], layout=layout)
        logits_V = jax.lax.dynamic_index_in_dim(logits_BLV[0], prompt_len - 1, keepdims=False)

        def not_done(carry):
            return carry[0] < prompt_len + num_new

        def body(carry):
            position, tokens_L, logits_V, cache = carry
            token = choose_token(logits_V, jax.random.fold_in(key, first + position), temperature, top_k)
            tokens_L = tokens_L.at[position].set(token)
            logits_BV, cache = model.decode(token[None], position, cache, layout=layout)
            return position + 1, tokens_L, logits_BV[0], cache

        return jax.lax.while_loop(not_done, body, (prompt_len, tokens_L, logits_V, cache))[1]

    return jax.jit(generate)


def check_request(config: ModelConfig, num_prompt: int, num_new: int, sampling: Sampling) -> None:
    """Raises UserError for a request that the model cannot serve."""
    if num_prompt == 0:
        raise UserError("--prompt is empty: give at least one character.")
    if num_new < 1:
        raise UserError(f"--max-new-tokens is {num_new}, but must be at least 1.")
    if config.max_seq_len < 2:
        raise UserError("the model has a single position (--model.max-seq-len 1), so that nothing can follow a prompt.")
    if not 0 <= sampling.temperature <= LARGEST_FLOAT32:
        raise UserError(f"--temperature is {sampling.temperature}, but must be at least 0, and finite.")
    if not 0 <= sampling.top_k < 2**31:
        raise UserError(f"--top-k is {sampling.top_k}, but must be at least 0 (0: no limit) and below 2**31.")
    if not 0 <= sampling.seed < 2**32:
        raise UserError(f"--seed is {sampling.seed}, but must be in [0, 2**32).")


def continue_tokens(
    generate: Callable[..., jax.Array], params, prompt: list[int], num_new: int, length: int, sampling: Sampling
) -> list[int]:
    """The prompt and `num_new` tokens more, from a generator of a model with `length` positions (2 or more).

    Text that fills all positions is read again from the last half of them, at positions 0 onwards, and goes on from there.
    """
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_new:
        context = tokens if len(tokens) < length else tokens[-(length // 2) :]
        new = min(len(prompt) + num_new - len(tokens), length - len(context))
        window_L = np.zeros(length, np.int32)
        window_L[: len(context)] = context
        request = (np.int32(len(tokens) - len(context)), np.int32(len(context)), np.int32(new), np.uint32(sampling.seed))
        window_L = generate(params, window_L, *request, np.float32(sampling.temperature), np.int32(sampling.top_k))
        tokens += np.asarray(window_L)[len(context) : len(context) + new].tolist()
    return tokens


def place(config: ModelConfig, parallel: ParallelConfig) -> tuple[Plan, Mesh]:
    """Plan and mesh of a model over the first data x fsdp x tensor devices (unset: 1); all replicas compute the same text.

    Raises UserError where there are fewer devices, or a dimension does not divide.
    """
    parallel = dataclasses.replace(parallel, data=parallel.data or 1, fsdp=parallel.fsdp or 1)
    count = parallel.data * parallel.fsdp * parallel.tensor
    if count > jax.device_count():
        raise UserError(
            f"--parallel.data {parallel.data} x --parallel.fsdp {parallel.fsdp} x --parallel.tensor {parallel.tensor} = {count} devices,"
            f" but there are {jax.device_count()}; on a CPU add --cluster.cpu-devices {count}."
        )
    declared = declare(config)
    shape = resolve_mesh_shape(parallel, count, count)
    plan = make_plan(declared.params, declared.rules, parallel, shape)
    bad = plan.indivisible()
    if bad:
        raise UserError(
            f"{bad[0].axis} is {bad[0].dim_size}, which does not divide into {bad[0].factor} ({bad[0].path}, shape {bad[0].shape}):"
            " choose other degrees."
        )
    return plan, make_mesh(shape, jax.devices()[:count])


def load_params(plan: Plan, mesh: Mesh, run_dir: Path, step: int) -> dict:
    """The parameters of a checkpoint in the plan's storage layout, verified; optimizer state is not read."""
    shardings = plan.shardings("storage", mesh)
    target = {
        f"params/{path}": jax.ShapeDtypeStruct(leaf.decl.shape, jnp.dtype(leaf.decl.dtype), sharding=shardings[path])
        for path, leaf in plan.leaves.items()
    }
    leaves = restore(run_dir, step, target)
    verify_leaves(run_dir, step, leaves, NamedSharding(mesh, PartitionSpec()))
    return unflatten(leaves)["params"]


def generate_text(
    config: RunConfig, run_dir: Path, step: int | None, prompt: str, max_new_tokens: int, sampling: Sampling
) -> str:
    """Prompt and continuation, on the mesh of `config.parallel`.

    Raises UserError where the run, the mesh, the prompt or the lengths do not allow it.
    """
    if not isinstance(config.model, LANGUAGE_MODELS):
        raise UserError(f"{called(run_dir)} is a run of {type(config.model).__name__}, which has no text to generate.")
    tokenizer = open_tokenizer(with_kept_tokenizer(run_dir, config).data.tokenizer)
    ids = encode_prompt(tokenizer, prompt)
    check_request(config.model, len(ids), max_new_tokens, sampling)
    step = checkpoint.choose_step(run_dir, step)
    cluster.initialize(config.cluster)
    plan, mesh = place(config.model, config.parallel)
    params = load_params(plan, mesh, run_dir, step)
    layout = ComputeLayout(mesh, plan, "storage", divide_batch=False)
    generate = make_generator(declare(config.model).graphdef, layout)
    return tokenizer.decode(continue_tokens(generate, params, ids, max_new_tokens, config.model.max_seq_len, sampling))


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Raises UserError for a prompt that is not text: the shell handed over bytes that are no UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"--prompt is not UTF-8: character {error.start + 1} cannot be decoded. Give it in UTF-8.") from None
    return list(tokenizer.encode(prompt))

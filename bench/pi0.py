"""pi0's step time, examples per second and scratch memory for each attention backend.

`python bench/pi0.py [--recipe pi0_tiny] [--rounds 5] [--block-tokens 128] [--quick]` prints JSON lines: the gradient of the loss of a
whole batch on one device, and one layer of gemma_2b (2048 wide, 8 heads of 256 on one key-value head), forward and backward. It
runs unchanged on a GPU, and then prints the share of the peak too (mfu).
"""

import argparse
import dataclasses
import statistics
import time

from lines import print_figure


def measure(function, arguments, rounds: int) -> tuple[float, int]:
    """Median seconds of a call, the first not counted, and scratch bytes of the compiled program."""
    import jax

    program = jax.jit(function).lower(*arguments).compile()
    arguments = jax.device_put(arguments)
    jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        times.append(time.perf_counter() - started)
    return statistics.median(times), program.memory_analysis().temp_size_in_bytes


def backends(call) -> list[str]:
    """Those that can serve; why the others cannot is printed."""
    import sys

    from sharder.ops.attention_backends import BACKENDS, limit

    refused = {name: reason for name in BACKENDS if (reason := limit(name, call))}
    for name, reason in refused.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)
    return [name for name in BACKENDS if name not in refused]


def whole_model(config, rounds: int) -> None:
    """Gradients of one batch, and 10 steps of sampling."""
    import jax
    import numpy as np
    from flax import nnx

    from sharder.data.synthetic_robot import SyntheticRobot
    from sharder.instrument.flops import step_flops
    from sharder.instrument.hardware import peak_flops
    from sharder.instrument.products import products_of
    from sharder.models.build import declare, initial_params
    from sharder.ops.attention_backends import describe_call

    size, model = config.train.global_batch_size, config.model
    params = jax.jit(lambda: initial_params(model, jax.random.key(0)))()
    batch = SyntheticRobot(size, model).read(np.arange(size))
    keys = jax.random.split(jax.random.key(1), size)
    shape = jax.ShapeDtypeStruct((size, 1, model.num_heads, model.head_dim), model.compute_dtype)
    for name in backends(describe_call(shape, shape)):
        graphdef = declare(dataclasses.replace(model, attention=name)).graphdef

        def loss(params, batch, keys):
            losses, weights = nnx.merge(graphdef, params).losses(batch, keys)
            return losses.sum() / weights.sum()

        seconds, scratch = measure(jax.value_and_grad(loss), (params, batch, keys), rounds)
        how = f"{model.variant}, batch {size}, {model.compute_dtype}, gradients of one batch, median of {rounds}"
        print_figure("pi0", f"gradients_{name}", seconds, "s", how)
        print_figure("pi0", f"examples_per_s_{name}", size / seconds, "examples/s", how)
        print_figure("pi0", f"scratch_{name}", scratch, "bytes", how)
        peak = peak_flops(jax.devices()[0].device_kind, model.compute_dtype)
        if peak is not None:
            print_figure(
                "pi0", f"mfu_{name}", step_flops(products_of(model, 0), size).model / seconds / peak, "share of peak", how
            )


def one_block(tokens: int, dims: tuple[int, int, int], rounds: int) -> None:
    """One layer of the backbone; `dims`: width, feed-forward, head dimension."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from sharder.config import ExpertConfig
    from sharder.models.gemma import Gemma
    from sharder.ops.attention_backends import attend, describe_call
    from sharder.ops.layout import SINGLE

    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    expert = {"backbone": ExpertConfig(dims[0], dims[1])}
    abstract = nnx.eval_shape(lambda: Gemma(expert, frozenset(), 1, (8, 1, dims[2]), 8, dtype, nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), nnx.to_pure_dict(state))
    x, mask = jnp.ones((1, tokens, dims[0]), dtype), jnp.ones((1, tokens, tokens), bool)
    shape = jax.ShapeDtypeStruct((1, tokens, 8, dims[2]), dtype)
    for name in backends(describe_call(shape, shape)):

        def loss(params, x):
            call = lambda q, k, v, mask: attend(name, q, k, v, mask, scale=dims[2] ** -0.5)  # noqa: E731
            model = nnx.merge(graphdef, params)
            out, _ = model(
                {"backbone": x}, {}, call, jnp.arange(tokens)[None], mask, name="llm", dtype=dtype, remat="none", layout=SINGLE
            )
            return jnp.square(out["backbone"].astype(jnp.float32)).sum()

        seconds, scratch = measure(jax.grad(loss, (0, 1)), (params, x), rounds)
        how = f"one layer {dims[0]} wide, {tokens} tokens, {dtype}, forward and backward, median of {rounds}"
        print_figure("pi0", f"block_{name}", seconds, "s", how)
        print_figure("pi0", f"block_scratch_{name}", scratch, "bytes", how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="pi0_tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-tokens", type=int, default=128)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    from sharder.recipes import load_recipe

    config = load_recipe(options.recipe)
    if options.quick:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=2))
    whole_model(config, 1 if options.quick else options.rounds)
    one_block(
        options.block_tokens, (64, 128, 16) if options.quick else (2048, 16384, 256), 1 if options.quick else options.rounds
    )


if __name__ == "__main__":
    main()

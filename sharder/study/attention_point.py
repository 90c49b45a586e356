"""One point of the study of attention, in a process of its own: prints seconds and scratch bytes as JSON."""

import json
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp

from sharder.ops.attention_backends import BACKENDS, describe_call, limit


def measure(backend: str, length: int, heads: list[int], batch: int, repeats: int) -> dict:
    """Causal attention, forward, and forward with the gradients of all inputs."""
    num_heads, num_kv_heads, head_dim = heads
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(batch, length, n, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads)]
    q, k, v = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes))
    refused = limit(backend, describe_call(q, k))
    if refused is not None:
        return {"refused": refused}
    mask = jnp.tril(jnp.ones((length, length), bool))[None]
    forward = partial(BACKENDS[backend], scale=head_dim**-0.5)

    def loss(q, k, v, mask):
        return jnp.square(forward(q, k, v, mask).astype(jnp.float32)).sum()

    found = {
        "machine": {
            "kind": jax.devices()[0].device_kind,
            "platform": jax.default_backend(),
            "dtype": dtype,
            "jax": jax.__version__,
        }
    }
    for name, function in (("forward", forward), ("backward", jax.grad(loss, (0, 1, 2)))):
        program = jax.jit(function).lower(q, k, v, mask).compile()
        jax.block_until_ready(program(q, k, v, mask))
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            jax.block_until_ready(program(q, k, v, mask))
            seconds.append(time.perf_counter() - started)
        found |= {f"{name}_s": seconds, f"{name}_scratch_bytes": program.memory_analysis().temp_size_in_bytes}
    return found


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))

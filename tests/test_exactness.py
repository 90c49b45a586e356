import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from small import environment, small

from sharder.config import ClusterConfig, UserError
from sharder.exactness import (
    CPU_THREADS,
    CPU_THREADS_VARIABLE,
    GPU_FLAGS,
    THREADS_PER_CPU_DEVICE,
    check_kernels,
    cpu_threads,
    nondeterministic_kernels,
    refusals,
    untested,
    with_gpu_flags,
)

FLAGS = with_gpu_flags("")


def exact(train=None, **parallel):
    config = small()
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, reduction="exact", **parallel))
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **train or {}))


def test_an_untested_promise_is_said_and_a_tested_one_is_not():
    assert untested(exact(), "cpu", "0.10.2") is None
    assert "on gpu with jax 0.10.2" in untested(exact(), "gpu", "0.10.2")
    assert "with jax 0.12.0" in untested(exact(), "cpu", "0.12.0")
    assert untested(small(), "gpu", "0.12.0") is None


def test_a_moving_average_is_refused_where_its_bits_are_not_known_to_hold():
    config = exact(train={"ema_decay": 0.9})
    assert refusals(config, 4, "0.10.2") == []
    assert "--train.ema-decay is 0.9 in exact mode, but with jax 0.12.0" in refusals(config, 4, "0.12.0")[0].message
    assert refusals(dataclasses.replace(config, parallel=small().parallel), 4, "0.12.0") == []


def test_more_simulated_devices_than_threads_are_refused():
    def devices(n):
        return dataclasses.replace(exact(), cluster=ClusterConfig(cpu_devices=n))

    most = CPU_THREADS // THREADS_PER_CPU_DEVICE
    assert refusals(devices(most), 8, "0.10.2") == []
    [found] = refusals(devices(most + 1), 8, "0.10.2")
    assert "--cluster.cpu-devices is 9 in exact mode" in found.message and "up to 8 in a process" in found.message
    assert cpu_threads(None) == cpu_threads(most) == CPU_THREADS and cpu_threads(16) == 32


PRODUCT = """
import sys, numpy as np
from sharder import cluster
from sharder.config import ClusterConfig
if sys.argv[2] == "ours":
    cluster.initialize(ClusterConfig(cpu_devices=int(sys.argv[1]), compile_cache="off"))
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
a, b = (jnp.asarray(np.random.default_rng(i).standard_normal((1024, n)), jnp.float32) for i, n in ((0, 512), (1, 16)))
print(np.asarray(jax.jit(lambda a, b: a.T @ b)(a, b)).tobytes().hex())
"""


def product(devices, setting, **extra):
    """The bits of a gradient of the MLP recipe's last layer: a product whose inner dimension is long."""
    command = [sys.executable, "-c", PRODUCT, str(devices), setting]
    return subprocess.run(command, env=environment(**extra), capture_output=True, text=True, check=True).stdout


def test_threads_do_not_decide_the_bits():
    """XLA has as many as there are cores, and devices; here as if there were two cores."""
    other = {CPU_THREADS_VARIABLE: "2"}
    assert product(1, "ours", **other) == product(8, "ours", **other)
    assert product(1, "jax's", **other) != product(8, "jax's", **other), (
        "this product does not depend on threads: the test sees nothing"
    )


@pytest.mark.parametrize(
    "config, num_replicas, message",
    [
        (exact(exact_memory="lean", policy="zero"), 4, "policy zero keeps them whole"),
        (exact(exact_memory="lean", policy="fsdp"), 1, "needs at least 2 replicas, but there is 1"),
        (exact(exact_memory="lean", policy="fsdp", train={"microbatch_size": 1}), 4, "--train.microbatch-size is 1"),
    ],
)
def test_what_lean_cannot_do_is_refused(config, num_replicas, message):
    [found] = refusals(config, num_replicas, "0.10.2")
    assert message in found.message


def test_lean_is_not_refused_where_it_holds():
    assert refusals(exact(exact_memory="lean", policy="fsdp"), 2, "0.10.2") == []
    [found] = refusals(exact(exact_memory="lean", policy="fsdp"), 2, "0.12.0")
    assert "lean has other bits on other meshes with jax 0.12.0" in found.message


def test_flags_that_the_user_set_are_left_alone():
    own = "--xla_gpu_exclude_nondeterministic_ops=false --xla_dump_to=x"
    assert with_gpu_flags(own).startswith(own)
    assert with_gpu_flags(own).count("--xla_gpu_exclude_nondeterministic_ops=") == 1
    assert with_gpu_flags(FLAGS) == FLAGS


def test_this_compiler_knows_the_flags():
    """An unknown flag ends the process."""
    import os
    import subprocess
    import sys

    code = "import jax; jax.jit(lambda x: x + 1)(1)"
    environment = os.environ | {"XLA_FLAGS": " ".join(GPU_FLAGS), "JAX_PLATFORMS": "cpu"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 0


def program(unique):
    """The text of a scatter-add, as the gradient of an embedding is one."""
    return (
        jax.jit(lambda x, i, y: x.at[i].add(y, unique_indices=unique))
        .lower(jnp.zeros((8, 4)), jnp.zeros(3, int), jnp.ones((3, 4)))
        .as_text()
    )


def test_a_scatter_with_repeated_rows_is_found_where_the_compiler_may_use_atomics():
    assert nondeterministic_kernels(program(False), "gpu", "") == ["scatter"]
    assert nondeterministic_kernels(program(True), "gpu", "") == []
    assert nondeterministic_kernels(program(False), "gpu", FLAGS) == []
    assert nondeterministic_kernels(program(False), "cpu", "") == []


def test_the_gradient_of_an_embedding_is_such_a_scatter():
    grad = jax.jit(jax.grad(lambda table, ids: table[ids].sum())).lower(jnp.zeros((8, 4)), jnp.zeros(3, int))
    assert nondeterministic_kernels(grad.as_text(), "gpu", "") == ["scatter"]


def test_cudnn_attention_is_found_unless_it_is_forced_to_be_deterministic():
    call = r'stablehlo.custom_call @__cudnn$fmhaSoftmaxBackward(%0) {backend_config = "{\22cudnn_fmha_backend_config\22: {\22force_deterministic\22: VALUE}}"}'
    assert nondeterministic_kernels(call.replace("VALUE", "false"), "gpu", FLAGS) == ["cudnn_attention_backward"]
    assert nondeterministic_kernels(call.replace("VALUE", "true"), "gpu", FLAGS) == []


def test_a_kernel_is_refused_by_name_and_accepted_by_name():
    with pytest.raises(UserError, match="scatter: the gradient of a look-up.*\n.*--parallel.allow-nondeterministic scatter"):
        check_kernels(exact(), program(False), "gpu", "")
    check_kernels(exact(allow_nondeterministic=("scatter",)), program(False), "gpu", "")

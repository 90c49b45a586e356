from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharder.config import MlpConfig, ParallelConfig, TransformerConfig
from sharder.models.build import declare, flatten, initial_params, unflatten
from sharder.ops.layout import SINGLE
from sharder.sharding.compute import ComputeLayout
from sharder.sharding.mesh import MeshShape, make_mesh
from sharder.sharding.plan import make_plan

MLP = MlpConfig(input_dim=16, hidden_dim=32, num_layers=3, output_dim=8)
# Every matrix of a layer has 4,096 elements or more, every activation fewer.
LM = TransformerConfig(vocab_size=16, padded_vocab_size=16, max_seq_len=2, embed_dim=64, num_heads=2, mlp_dim=128, num_layers=4)


def layout_of(model, policy: str, gradient: str = "storage", shape: MeshShape = MeshShape(2, 4, 1)) -> ComputeLayout:
    declared = declare(model)
    plan = make_plan(declared.params, declared.rules, ParallelConfig(policy=policy), shape)
    return ComputeLayout(make_mesh(shape), plan, gradient)


def mlp_batch(rows: int) -> dict:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    return {"inputs": draw(rows, MLP.input_dim), "targets": draw(rows, MLP.output_dim)}


def loss_of(model, batch: dict, layout):
    graphdef = declare(model).graphdef
    return lambda params: nnx.merge(graphdef, params).losses(batch, None, layout)[0].sum()


@cache
def initial_mlp() -> dict:
    return jax.jit(lambda: initial_params(MLP, jax.random.key(0)))()


@cache
def single_device_gradients() -> dict:
    params = initial_mlp()
    gradient = jax.grad(loss_of(MLP, mlp_batch(16), SINGLE))
    return flatten(jax.jit(gradient, compiler_options={"xla_backend_optimization_level": 0})(params))


@pytest.mark.parametrize("policy", ["dp", "zero", "fsdp"])
def test_gradients_are_those_of_a_single_device(policy):
    layout = layout_of(MLP, policy, "update")
    storage = unflatten(layout.plan.shardings("storage", layout.mesh))
    params = jax.device_put(initial_mlp(), storage)
    found = flatten(jax.jit(jax.grad(loss_of(MLP, mlp_batch(16), layout)))(params))
    for path, expected in single_device_gradients().items():
        np.testing.assert_allclose(found[path], expected, rtol=1e-5, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("gradient", ["storage", "update"])
@pytest.mark.parametrize("policy", ["dp", "zero", "fsdp"])
def test_gradients_come_out_in_the_gradient_layout(policy, gradient):
    layout = layout_of(MLP, policy, gradient)
    storage, wanted = (layout.plan.shardings(name, layout.mesh)["last/kernel"] for name in ("storage", gradient))

    def loss(kernel):
        whole = layout.weights("last", {"kernel": kernel}, "float32")["kernel"]
        return jnp.square(layout.activation(jnp.ones((16, 32)), ("batch", "hidden")) @ whole).sum()

    found = jax.jit(jax.grad(loss))(jax.device_put(jnp.ones((32, 8)), storage))
    assert found.sharding.is_equivalent_to(wanted, 2), found.sharding


def test_gradients_keep_the_parameters_dtype():
    layout = layout_of(MLP, "fsdp")
    loss = lambda p: layout.weights("last", {"kernel": p}, "bfloat16")["kernel"].sum()  # noqa: E731
    assert jax.eval_shape(jax.grad(loss), jnp.ones((32, 8))).dtype == jnp.float32


def test_weights_come_in_the_compute_layout_and_dtype():
    layout = layout_of(MLP, "fsdp")
    kernel = jax.device_put(jnp.ones((32, 8)), layout.plan.shardings("storage", layout.mesh)["last/kernel"])
    whole = jax.jit(lambda p: layout.weights("last", {"kernel": p}, "bfloat16")["kernel"])(kernel)
    assert whole.dtype == jnp.bfloat16 and whole.sharding.is_fully_replicated


def test_slices_of_a_scan_are_laid_out_without_their_leading_dimension():
    layout = layout_of(LM, "fsdp", shape=MeshShape(1, 4, 2))

    def body(carry, weights):
        return carry, layout.weights("blocks", weights, "float32")["mlp_in"]

    stacked = jax.device_put(jnp.ones((4, 64, 128)), layout.plan.shardings("storage", layout.mesh)["blocks/mlp_in"])
    found = jax.jit(lambda w: jax.lax.scan(body, 0, {"mlp_in": w})[1])(stacked)
    assert found.sharding.is_equivalent_to(NamedSharding(layout.mesh, P(None, None, "tensor")), 3), found.sharding


@pytest.mark.parametrize(
    "axes, spec", [(("batch", "seq", "embed"), P(("data", "fsdp"))), (("batch", "mlp"), P(("data", "fsdp"), "tensor"))]
)
def test_activations_are_divided_by_example_and_by_tensor_axis(axes, spec):
    layout = layout_of(LM, "zero", shape=MeshShape(2, 2, 2))
    found = jax.jit(lambda x: layout.activation(x, axes))(jnp.ones((8,) * len(axes)))
    assert found.sharding.is_equivalent_to(NamedSharding(layout.mesh, spec), len(axes)), found.sharding


def test_a_parameter_outside_the_plan_is_an_error():
    with pytest.raises(KeyError, match="last/other"):
        layout_of(MLP, "zero").weights("last", {"other": jnp.ones(4)}, "float32")


def largest_residual(policy: str) -> int:
    """Elements of the largest array that each layer keeps for the backward pass."""
    layout = layout_of(LM, policy)
    tokens = np.zeros((8, 2), np.int32)
    params = jax.eval_shape(lambda: initial_params(LM, jax.random.key(0)))
    jaxpr = jax.make_jaxpr(jax.grad(loss_of(LM, {"inputs": tokens, "targets": tokens}, layout)))(params)
    forward = next(e for e in jaxpr.eqns if e.primitive.name == "scan")
    return max(v.aval.size for v in forward.outvars[1:]) // LM.num_layers


def test_fsdp_keeps_no_gathered_weights_for_the_backward_pass():
    assert largest_residual("fsdp") < 4096


def test_gathered_weights_would_be_seen_among_what_is_kept():
    assert largest_residual("zero") >= 4096


@cache
def kept_bytes(policy: str) -> int:
    """Scratch memory per device that the backward pass needs beyond what it needs with everything recomputed."""

    def scratch(remat: str) -> int:
        model = MlpConfig(input_dim=8, hidden_dim=64, num_layers=16, output_dim=8, remat=remat)
        layout = layout_of(model, policy, "update", MeshShape(1, 8, 1))
        shardings = unflatten(layout.plan.shardings("storage", layout.mesh))
        batch = {"inputs": np.ones((8, 8), np.float32), "targets": np.ones((8, 8), np.float32)}
        params = jax.eval_shape(lambda: initial_params(model, jax.random.key(0)))
        compiled = jax.jit(jax.grad(loss_of(model, batch, layout)), in_shardings=(shardings,)).lower(params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    return scratch("none") - scratch("block")


WHOLE_BYTES = 16 * 64 * 64 * 4


def test_fsdp_needs_no_memory_for_whole_weights_in_the_backward_pass():
    assert kept_bytes("fsdp") < WHOLE_BYTES / 2


def test_memory_for_whole_weights_would_be_seen():
    assert kept_bytes("zero") > WHOLE_BYTES * 0.9

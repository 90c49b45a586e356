import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sharder.config import MlpConfig
from sharder.models.build import declare, flatten, unflatten

pytestmark = pytest.mark.usefixtures("strict_promotion")

CONFIG = MlpConfig(input_dim=6, hidden_dim=8, num_layers=3, output_dim=4)
RNG = np.random.default_rng(0)
INPUTS, TARGETS = RNG.standard_normal((5, 6), np.float32), RNG.standard_normal((5, 4), np.float32)
PARAMS = unflatten({path: 0.5 * RNG.standard_normal(decl.shape, np.float32) for path, decl in declare(CONFIG).params.items()})


def model(params: dict, config: MlpConfig = CONFIG):
    return nnx.merge(declare(config).graphdef, params)


def reference() -> np.ndarray:
    w = {path: np.asarray(x, np.float64) for path, x in flatten(PARAMS).items()}
    gelu = lambda h: 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))  # noqa: E731
    x = gelu(INPUTS @ w["first/kernel"] + w["first/bias"])
    for kernel, bias in zip(w["blocks/kernel"], w["blocks/bias"]):
        x = gelu(x @ kernel + bias)
    return x @ w["last/kernel"] + w["last/bias"]


def test_outputs_are_those_of_a_dense_stack():
    np.testing.assert_allclose(jax.jit(lambda p: model(p)(INPUTS))(PARAMS), reference(), rtol=1e-5, atol=1e-5)


def test_loss_is_the_mean_squared_error_of_each_example_with_weight_one():
    batch = {"inputs": INPUTS, "targets": TARGETS}
    losses, weights = jax.jit(lambda p: model(p).losses(batch, None))(PARAMS)
    np.testing.assert_allclose(losses, np.square(reference() - TARGETS).mean(1), rtol=1e-5)
    assert weights.tolist() == [1.0] * 5


def test_recomputed_blocks_have_the_same_gradients():
    batch = {"inputs": INPUTS, "targets": TARGETS}

    def gradient(remat: str):
        config = MlpConfig(input_dim=6, hidden_dim=8, num_layers=3, output_dim=4, remat=remat)
        return flatten(jax.jit(jax.grad(lambda p: model(p, config).losses(batch, None)[0].sum()))(PARAMS))

    kept, recomputed = gradient("none"), gradient("block")
    for path in kept:
        np.testing.assert_allclose(recomputed[path], kept[path], rtol=1e-5, atol=1e-6, err_msg=path)


def test_outputs_are_bfloat16_where_asked_for_and_losses_float32():
    config = MlpConfig(input_dim=6, hidden_dim=8, num_layers=3, output_dim=4, compute_dtype="bfloat16")
    batch = {"inputs": INPUTS, "targets": TARGETS}
    outputs = jax.eval_shape(lambda p: model(p, config)(INPUTS), PARAMS)
    losses, _ = jax.eval_shape(lambda p: model(p, config).losses(batch, None), PARAMS)
    assert (outputs.dtype, losses.dtype) == (jnp.bfloat16, jnp.float32)

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from small import small

from sharder.config import OptimizerConfig, ParallelConfig
from sharder.exactness import refusals
from sharder.models.build import declare, flatten, unflatten
from sharder.sharding.axes import ParamDecl
from sharder.sharding.mesh import MeshShape
from sharder.sharding.plan import make_plan
from sharder.sharding.policy import stacked_matrices
from sharder.train.matrices import orthogonalized, scale_by_factored_moments, side_spec, sides
from sharder.train.optimizer import make_optimizer, optimizer_spec
from sharder.train.state import by_path, declare_state, state_specs

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "axes, expected",
    [
        (("layers", "embed", "heads", "head_dim"), [(1,), (2, 3)]),
        (("layers", "kv_heads", "head_dim", "embed"), [(1, 2), (3,)]),
        (("layers", "heads", "head_dim"), [(1, 2)]),
        (("vocab", "embed"), [(0,), (1,)]),
        (("head_dim",), [(0,)]),
    ],
)
def test_heads_and_their_dimension_are_one_side_and_layers_are_none(axes, expected):
    assert sides(axes) == expected


QUERY = ParamDecl((3, 6, 2, 4), "float32", ("layers", "embed", "heads", "head_dim"))


def adafactor(decls: dict, gradients: list[dict], min_dim: int = 2) -> list[dict]:
    rule = scale_by_factored_moments(decls, min_dim)
    state, found = rule.init(gradients[0]), []
    for g in gradients:
        updates, state = jax.jit(rule.update)(g, state)
        found.append(updates)
    return found


def test_every_layer_is_a_matrix_of_its_own_to_adafactor():
    """Against optax on one layer's matrix at a time, which it factors as we do."""
    gradients = [{"w": RNG.standard_normal(QUERY.shape).astype(np.float32) * 10**-step} for step in range(3)]
    theirs = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=2), optax.clip_by_block_rms(1.0))
    found = adafactor({"w": QUERY}, gradients)
    for layer in range(3):
        one = [{"w": jnp.asarray(g["w"][layer].reshape(6, 8))} for g in gradients]
        state = theirs.init(one[0])
        for step, g in enumerate(one):
            updates, state = theirs.update(g, state, g)
            np.testing.assert_allclose(found[step]["w"][layer].reshape(6, 8), updates["w"], rtol=1e-5, atol=1e-6)


def test_small_matrices_keep_every_square():
    gradients = [{"w": RNG.standard_normal((4, 5)).astype(np.float32)} for _ in range(2)]
    found = adafactor({"w": ParamDecl((4, 5), "float32", ("embed", "mlp"))}, gradients, min_dim=5)
    beta = 1 - 2**-0.8
    average = beta * gradients[0]["w"] ** 2 + (1 - beta) * gradients[1]["w"] ** 2
    update = gradients[1]["w"] / np.sqrt(average)
    np.testing.assert_allclose(found[1]["w"], update / max(1, np.sqrt((update**2).mean())), rtol=1e-5)


def test_muon_makes_every_layers_matrix_nearly_orthogonal():
    g = {"w": RNG.standard_normal(QUERY.shape).astype(np.float32)}
    updates, _ = orthogonalized({"w": QUERY}, lambda x: x).update(g, optax.EmptyState())
    for layer in range(3):
        u, _, vt = np.linalg.svd(g["w"][layer].reshape(6, 8), full_matrices=False)
        found = np.asarray(updates["w"][layer]).reshape(6, 8) / (0.2 * 8**0.5)
        values = np.diag(u.T @ found @ vt.T)
        assert 0.6 < values.min() and values.max() < 1.4
        np.testing.assert_allclose(found, u @ np.diag(values) @ vt, atol=1e-3)


DECLARED = declare(small().model)


def test_muon_leaves_embeddings_norms_and_biases_to_adamw():
    state = declare_state(replace(small(), optimizer=OptimizerConfig(name="muon")), DECLARED)
    momentum = {p.split("/trace/")[1] for p in by_path(state) if "/trace/" in p}
    assert momentum == {f"blocks/{name}" for name in ("q", "k", "v", "attn_out", "mlp_in", "mlp_out")}
    moments = {p.split("/mu/")[1] for p in by_path(state) if "/mu/" in p}
    assert moments == set(DECLARED.params) - momentum


@cache
def specs_of(name: str, policy: str) -> dict:
    parallel = ParallelConfig(policy=policy)
    config = replace(small(), optimizer=OptimizerConfig(name=name, factored_min_dim=32), parallel=parallel)
    plan = make_plan(DECLARED.params, DECLARED.rules, parallel, MeshShape(1, 4, 2))
    specs = state_specs(config, DECLARED, plan)
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    flat = jax.tree_util.tree_flatten_with_path(specs.opt_state, is_leaf=is_spec)[0]
    return {
        "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path): tuple(s) for path, s in flat
    }


@pytest.mark.parametrize("name, field", [("adamw", "mu"), ("adamw", "nu"), ("muon", "trace"), ("muon", "mu")])
def test_arrays_of_a_parameters_shape_lie_in_its_update_layout(name, field):
    plan = make_plan(DECLARED.params, DECLARED.rules, ParallelConfig(policy="zero"), MeshShape(1, 4, 2))
    found = {p.split(f"/{field}/")[1]: s for p, s in specs_of(name, "zero").items() if f"/{field}/" in p}
    assert found and found == {p: tuple(plan.leaves[p].update) for p in found}


@pytest.mark.parametrize(
    "path, spec",
    [
        ("row/blocks/q", (None, "fsdp")),
        ("col/blocks/q", (None, "tensor")),
        ("row/blocks/attn_out", (None, "tensor")),
        ("col/blocks/attn_out", (None, "fsdp")),
        ("row/embed/tokens", (None, "fsdp")),
        ("col/embed/tokens", (None, None)),
        ("count", ()),
    ],
)
def test_averages_over_rows_and_columns_are_divided_as_the_side_they_run_along(path, spec):
    assert next(s for p, s in specs_of("adafactor", "zero").items() if p.endswith(path)) == spec


def test_dp_divides_no_optimizer_state_over_replicas():
    assert not any("fsdp" in str(s) for name in ("adamw", "adafactor", "muon") for s in specs_of(name, "dp").values())


def test_a_side_whose_inner_dimension_is_divided_is_whole():
    assert tuple(side_spec(QUERY, P(None, None, "tensor", "fsdp"), 1)) == (None, None)


def test_an_array_without_a_rule_is_an_error():
    plan = make_plan(
        {"w": ParamDecl((8, 6), "float32", ("embed", "mlp"))}, DECLARED.rules, ParallelConfig(), MeshShape(1, 2, 1)
    )
    with pytest.raises(AssertionError, match="no rule for opt_state/0/odd/w"):
        optimizer_spec("opt_state/0/odd/w", (8, 3), plan)


@pytest.mark.parametrize("num, spec", [(8, ("fsdp", "tensor")), (4, "fsdp"), (6, "tensor"), (3, None)])
def test_matrices_are_spread_over_as_many_devices_as_their_number_allows(num, spec):
    assert tuple(stacked_matrices(num, MeshShape(1, 4, 2))) == (spec, None, None)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_weight_decay_is_decoupled_and_masked_for_every_optimizer(name):
    config = OptimizerConfig(
        name=name, learning_rate=1.0, warmup_steps=0, decay_steps=10, weight_decay=0.25, factored_min_dim=4
    )
    params = unflatten({p: jnp.ones(d.shape) for p, d in DECLARED.params.items()})
    rule = make_optimizer(config, DECLARED)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates = flatten(jax.jit(rule.update)(zeros, rule.init(params), params)[0])
    for path, undecayed in (("blocks/q", False), ("head/out", False), ("blocks/q_bias", True), ("embed/positions", True)):
        np.testing.assert_allclose(updates[path], 0.0 if undecayed else -0.25, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("name, word", [("adafactor", "means over rows"), ("muon", "matrix products")])
def test_exact_mode_refuses_optimizers_that_sum_over_divided_dimensions(name, word):
    config = replace(small(), optimizer=OptimizerConfig(name=name), parallel=ParallelConfig(reduction="exact"))
    assert f"--optimizer.name is {name} in exact mode, but its {word}" in refusals(config, 2, "0.10.2")[0].message
    assert refusals(replace(config, parallel=ParallelConfig(reduction="fast")), 2, "0.10.2") == []
    assert refusals(replace(config, optimizer=OptimizerConfig()), 2, "0.10.2") == []

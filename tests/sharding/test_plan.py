import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

from sharder import recipes
from sharder.config import MlpConfig, ParallelConfig, RunConfig, TransformerConfig
from sharder.models.build import declare
from sharder.preflight import findings
from sharder.sharding.axes import AxisRules, ParamDecl
from sharder.sharding.mesh import MeshShape, make_mesh
from sharder.sharding.plan import LAYOUTS, Plan, bytes_per_device, make_plan
from sharder.sharding.show import explain, to_json

RULES = AxisRules(names=frozenset({"layers", "embed", "mlp"}), tensor=("mlp",), storage=("embed", "mlp"))
MODEL = TransformerConfig(
    vocab_size=20, padded_vocab_size=24, max_seq_len=8, embed_dim=16, num_heads=2, mlp_dim=32, num_layers=3
)
MESHES = [MeshShape(1, 8, 1), MeshShape(2, 4, 1), MeshShape(2, 2, 2)]


def plan_of(decls: dict, mesh: MeshShape = MeshShape(1, 4, 1), rules: AxisRules = RULES, **parallel) -> Plan:
    decls = {path: ParamDecl(shape, "float32", axes) for path, (shape, axes) in decls.items()}
    return make_plan(decls, rules, ParallelConfig(**({"policy": "fsdp"} | parallel)), mesh)


def model_plan(model, mesh: MeshShape, **parallel) -> Plan:
    declared = declare(model)
    return make_plan(declared.params, declared.rules, ParallelConfig(**parallel), mesh)


@pytest.mark.parametrize(
    "axes", [("embed", "hidden"), ("mlp", "mlp"), ("mlp",)], ids=["unknown name", "repeated name", "missing name"]
)
def test_axes_must_name_every_dimension_once_in_the_models_words(axes):
    message = r"parameter a/w: shape \(4, 4\), logical axes \('.*known: \['embed', 'layers', 'mlp'\]"
    with pytest.raises(ValueError, match=message):
        plan_of({"a/w": ((4, 4), axes)})


def test_default_policy_divides_the_optimizer_and_keeps_parameters_whole():
    leaf = make_plan({"w": ParamDecl((8,), "float32", ("embed",))}, RULES, ParallelConfig(), MeshShape(1, 4, 1)).leaves["w"]
    assert [tuple(leaf.spec(layout)) for layout in LAYOUTS] == [(None,), (None,), ("fsdp",)]


def test_indivisible_dimension_is_found_with_its_numbers():
    (found,) = plan_of({"w": ((3, 10), ("layers", "embed")), "fine": ((8,), ("embed",))}).indivisible()
    assert (found.path, found.shape, tuple(found.spec)) == ("w", (3, 10), (None, "fsdp"))
    assert (found.axis, found.dim_size, found.factor) == ("embed", 10, 4)


def test_a_small_parameter_shorter_than_the_pieces_stays_whole():
    plan = plan_of({"bias": ((12, 64), ("layers", "embed")), "w": ((1 << 14, 64), ("mlp", "embed"))}, MeshShape(1, 256, 1))
    assert plan.leaves["bias"].small and [x.path for x in plan.indivisible()] == ["w"]


def test_indivisible_in_the_update_layout_alone_is_found():
    assert [x.path for x in plan_of({"w": ((10,), ("embed",))}, policy="zero").indivisible()] == ["w"]


def test_indivisible_by_two_mesh_axes_together_is_found():
    (found,) = plan_of({"w": ((36,), ("mlp",))}, MeshShape(1, 4, 2)).indivisible()
    assert (found.dim_size, found.factor) == (36, 8)


@pytest.mark.parametrize("size, divided", [(8, False), (16, True)])
def test_a_parameter_is_not_cut_to_single_elements(size, divided):
    leaf = plan_of({"w": ((size,), ("mlp",))}, MeshShape(1, 8, 1)).leaves["w"]
    assert (leaf.divided, leaf.small) == (divided, not divided)


def test_indivisible_by_tensor_is_found_under_every_policy():
    for policy in ("dp", "zero", "fsdp"):
        found = plan_of({"w": ((8, 3), ("embed", "mlp"))}, MeshShape(1, 4, 2), policy=policy).indivisible()
        assert {(x.axis, x.dim_size, x.factor) for x in found} == {("mlp", 3, 2)}


def test_what_divides_is_no_finding():
    assert all(model_plan(MODEL, mesh, policy="fsdp").indivisible() == [] for mesh in MESHES)


def test_indivisible_dimension_is_reported_with_the_way_out():
    model = MlpConfig(input_dim=8, hidden_dim=18, num_layers=2, output_dim=8)
    config = RunConfig(model=model, parallel=ParallelConfig(policy="fsdp"))
    text = "\n".join(f.message for f in findings(config, model_plan(model, MeshShape(1, 8, 1), policy="fsdp")))
    for part in ("blocks/bias", "(2, 18)", "is 18", "into 8", "16 or 24", "--parallel.replicate"):
        assert part in text


@pytest.mark.parametrize("policy", ["dp", "zero", "fsdp"])
def test_heads_that_tensor_parallelism_cannot_divide_are_reported(policy):
    model = TransformerConfig(embed_dim=48, num_heads=3, mlp_dim=64)
    config = RunConfig(model=model, parallel=ParallelConfig(policy=policy, tensor=2))
    plan = model_plan(model, MeshShape(1, 4, 2), policy=policy, tensor=2)
    assert any("heads is 3, which does not divide into 2" in f.message for f in findings(config, plan))


def test_replicate_keeps_a_parameter_whole_in_all_layouts():
    plan = plan_of({"a": ((10, 8), ("embed", "mlp")), "b": ((8, 8), ("embed", "mlp"))}, MeshShape(1, 4, 2), replicate=("a",))
    assert [tuple(plan.leaves["a"].spec(layout)) for layout in LAYOUTS] == [(None, "tensor")] * 3


def test_replicate_touches_no_other_parameter():
    plan = plan_of({"a": ((10, 8), ("embed", "mlp")), "b": ((8, 8), ("embed", "mlp"))}, MeshShape(1, 4, 2), replicate=("a",))
    assert tuple(plan.leaves["b"].storage) == ("fsdp", "tensor")


def test_replicate_settles_an_indivisible_dimension():
    assert plan_of({"a": ((10,), ("embed",))}, replicate=("a",)).indivisible() == []


@pytest.mark.parametrize("policy, whole", [("dp", []), ("zero", ["w"]), ("fsdp", ["w"])])
def test_parameter_that_no_rule_divides_is_named(policy, whole):
    assert plan_of({"w": ((8,), ("layers",)), "v": ((8,), ("embed",))}, policy=policy).undivided() == whole


def test_nothing_is_undivided_on_one_shard():
    assert plan_of({"w": ((8,), ("layers",))}, MeshShape(4, 1, 1)).undivided() == []


@pytest.mark.parametrize("name", recipes.RECIPES)
@pytest.mark.parametrize("tensor", [1, 2])
def test_recipes_divide_every_parameter_over_eight_devices(name, tensor):
    if name == "gpt_xl" and tensor == 2:
        pytest.skip("25 heads")
    plan = model_plan(recipes.load_recipe(name).model, MeshShape(1, 8 // tensor, tensor), policy="fsdp")
    assert plan.indivisible() == [] and plan.undivided() == []


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("policy", ["dp", "zero", "fsdp"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_per_device_are_those_of_real_shards(mesh, policy, layout):
    plan = model_plan(MODEL, mesh, policy=policy)
    shardings = plan.shardings(layout, make_mesh(mesh))
    held = dict.fromkeys(range(8), 0)
    for path, leaf in plan.leaves.items():
        array = jax.device_put(np.zeros(leaf.decl.shape, leaf.decl.dtype), shardings[path])
        for shard in array.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    assert set(held.values()) == {plan.param_bytes_per_device(layout)}


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2), ("bool", 1)])
def test_bytes_count_the_dtype(dtype, size):
    assert bytes_per_device((6, 8), dtype, P(None, ("tensor", "fsdp")), MeshShape(3, 2, 4)) == 6 * size


def test_a_plan_needs_no_devices(monkeypatch):
    def no_devices(*_):
        raise AssertionError("looked for devices")

    for name in ("devices", "local_devices", "device_count"):
        monkeypatch.setattr(jax, name, no_devices)
    plan = model_plan(recipes.load_recipe("gpt").model, MeshShape(16, 64, 8), policy="fsdp")
    explain(plan), to_json(plan, {})


def test_explain_tells_every_parameter_and_its_layouts():
    plan = model_plan(MODEL, MeshShape(1, 4, 2), policy="fsdp")
    console = Console(width=250)
    with console.capture() as captured:
        console.print(explain(plan))
    rows = {line.split()[0]: line for line in captured.get().splitlines() if line.strip()}
    assert set(plan.leaves) <= set(rows)
    for part in ("layers 3 mlp 32 embed 16", "mlp/tensor embed/fsdp", "768"):  # 3 x 16 x 4 numbers of 4 bytes
        assert part in rows["blocks/mlp_out"]


def test_plan_json_counts_what_the_state_keeps():
    plan = model_plan(MODEL, MeshShape(1, 8, 1), policy="zero")
    spec = P("fsdp")
    state = {"params/w": ((16,), "bfloat16", P()), "opt_state/0/mu/w": ((16,), "float32", spec), "step": ((), "int32", P())}
    found = json.loads(json.dumps(to_json(plan, state)))
    assert found["bytes_per_device"] | {"gradients": 0} == {"params": 32, "opt_state": 8, "ema": 0, "gradients": 0}


EXAMPLE = AxisRules(names=frozenset({"embed", "mlp"}), tensor=("mlp",))


@pytest.mark.parametrize(
    "policy, shards",
    [
        ("zero", {"compute": (1024, 2048), "update": (1024, 512), "storage": (1024, 2048)}),
        ("fsdp", {"compute": (1024, 2048), "update": (1024, 512), "storage": (1024, 512)}),
    ],
)
def test_the_weight_of_the_documents_has_their_shards(policy, shards):
    """Mesh (fsdp 4, tensor 2), a weight (1024, 4096) whose `mlp` both axes divide: real shards."""
    mesh = MeshShape(1, 4, 2)
    plan = plan_of({"w": ((1024, 4096), ("embed", "mlp"))}, mesh, EXAMPLE, policy=policy)
    found = {
        layout: jax.device_put(np.zeros((1024, 4096)), plan.shardings(layout, make_mesh(mesh))["w"])
        .addressable_shards[0]
        .data.shape
        for layout in LAYOUTS
    }
    assert found == shards


def test_two_axes_on_one_mesh_axis_are_refused_with_their_sizes():
    rules = AxisRules(names=frozenset({"heads", "mlp"}), tensor=("heads", "mlp"))
    with pytest.raises(ValueError, match=r"shape \(4, 6\).*would divide heads 4 and mlp 6"):
        plan_of({"w": ((4, 6), ("heads", "mlp"))}, rules=rules)


@pytest.mark.parametrize("where", ["tensor", "storage", "replicable"])
def test_rules_for_unknown_axes_are_refused(where):
    with pytest.raises(ValueError, match=r"unknown logical axes \['width'\]; known: \['embed', 'mlp'\]"):
        plan_of({}, rules=AxisRules(**({"names": EXAMPLE.names, "tensor": ("mlp",)} | {where: ("width",)})))


GROUPED = AxisRules(
    names=frozenset({"embed", "heads", "kv_heads"}), tensor=("heads", "kv_heads"), storage=("embed",), replicable=("kv_heads",)
)
PROJECTIONS = {"q": ((8, 8), ("embed", "heads")), "k": ((8, 2), ("embed", "kv_heads"))}


@pytest.mark.parametrize("tensor, whole", [(2, {}), (4, {"kv_heads": 2}), (8, {"kv_heads": 2})])
def test_key_heads_fewer_than_the_tensor_degree_are_whole_on_purpose(tensor, whole):
    plan = plan_of(PROJECTIONS, MeshShape(1, 1, tensor), GROUPED)
    assert dict(plan.whole_over_tensor) == whole and plan.indivisible() == []
    assert tuple(plan.leaves["k"].compute) == (None, None if whole else "tensor")
    assert tuple(plan.leaves["q"].compute) == (None, "tensor")


def test_what_is_whole_on_purpose_is_told():
    plan = plan_of(PROJECTIONS, MeshShape(1, 2, 4), GROUPED)
    console = Console(width=250)
    with console.capture() as captured:
        console.print(explain(plan))
    assert (
        "whole on each of the 4 devices of a tensor group, on purpose, since 4 does not divide it: kv_heads is 2"
        in captured.get()
    )
    assert to_json(plan, {})["whole_over_tensor"] == {"kv_heads": 2}


def test_query_heads_that_do_not_divide_are_still_a_finding():
    found = plan_of({"q": ((8, 6), ("embed", "heads"))}, MeshShape(1, 1, 4), GROUPED).indivisible()
    assert [(x.axis, x.dim_size, x.factor) for x in found] == [("heads", 6, 4)]


def test_gpt_divides_its_vocabulary_in_storage_and_not_for_computation():
    leaf = model_plan(recipes.load_recipe("gpt").model, MeshShape(1, 4, 2), policy="fsdp").leaves["embed/tokens"]
    assert (tuple(leaf.storage), tuple(leaf.compute)) == (("fsdp", None), (None, None))

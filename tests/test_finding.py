"""Findings as data: each rule, and what happens when their `nearest` is applied."""

import ast
import dataclasses
import re
from pathlib import Path
from typing import Annotated

import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st
from small import small

import sharder
from sharder.config import MODEL_CONFIGS, LlamaConfig, MlpConfig, RunConfig, TransformerConfig
from sharder.finding import Refused, applied, around, as_arguments
from sharder.models.build import declare
from sharder.preflight import Surroundings, findings, num_retained, settle_mesh
from sharder.serve.options import ModelOptions
from sharder.sharding.axes import AxisRules, ParamDecl
from sharder.sharding.divisible import Machine
from sharder.sharding.mesh import MeshShape
from sharder.sharding.plan import make_plan


def change(config, **sections):
    return dataclasses.replace(config, **{s: dataclasses.replace(getattr(config, s), **f) for s, f in sections.items()})


def found(config, num_devices=8, num_local=None, **known):
    """Findings on this many devices, of one process unless `num_local` says otherwise."""
    machine = Machine(num_devices, num_local or num_devices)
    shape, mesh_error = settle_mesh(config, machine.num_devices, machine.num_local)
    declared = declare(config.model)
    plan = make_plan(declared.params, declared.rules, config.parallel, shape)
    return findings(config, plan, Surroundings(machine=machine, mesh_error=mesh_error, **known))


def rules(*args, **kwargs):
    return {finding.rule for finding in found(*args, **kwargs)}


FSDP = change(small(), parallel={"policy": "fsdp"})
EXACT = change(small(), parallel={"reduction": "exact"})
MLP = RunConfig(MlpConfig(input_dim=8, hidden_dim=16, num_layers=1, output_dim=8))
LLAMA = dataclasses.replace(
    small(), model=LlamaConfig(max_seq_len=32, embed_dim=64, num_heads=6, num_kv_heads=3, mlp_dim=128, num_layers=1)
)

# rule: a configuration that breaks it and what is known, and one beside it that does not
RULES = {
    "mesh": [(change(small(), parallel={"data": 3}), {}), (change(small(), parallel={"data": 4}), {})],
    "heads": [(change(LLAMA, parallel={"tensor": 4}), {}), (change(LLAMA, parallel={"tensor": 2}), {})],
    "dimension": [(change(FSDP, model={"mlp_dim": 130}), {}), (FSDP, {})],
    "replicate_name": [(change(FSDP, parallel={"replicate": ("no",)}), {}), (change(FSDP, parallel={"replicate": ("blocks/q",)}), {})],
    "tensor": [(change(MLP, parallel={"tensor": 2}), {}), (MLP, {})],
    "batch": [(change(small(), train={"global_batch_size": 20}), {}), (change(small(), train={"global_batch_size": 24}), {})],
    "virtual_workers": [(change(EXACT, parallel={"virtual_workers": 4}), {}), (EXACT, {})],
    "dataset": [(small(), {"num_examples": 15}), (small(), {"num_examples": 16})],
    "sequence": [(change(small(), data={"seq_len": 33}), {}), (small(), {})],
    "data": [(small(), {"data_error": "--data.path x does not exist"}), (small(), {})],
    "exact": [(change(EXACT, optimizer={"name": "muon"}), {}), (EXACT, {})],
    "remat": [(change(small(), model={"remat": "offload"}), {"platform": "cpu"}), (change(small(), model={"remat": "offload"}), {"platform": "gpu"})],
    # small() keeps 2 and writes a third
    "disk": [(small(), {"state_bytes": 100, "free_bytes": 299}), (small(), {"state_bytes": 100, "free_bytes": 300})],
    "memory": [
        (small(), {"memory_bytes": 9, "predict_bytes": lambda config: 10 if config.parallel.policy == "zero" else 5}),
        (small(), {"memory_bytes": 10, "predict_bytes": lambda config: 10}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_broken_by_what_breaks_it(rule):
    config, known = RULES[rule][0]
    assert rule in rules(config, **known)


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_is_broken_by_what_stands_beside_it(rule):
    config, known = RULES[rule][1]
    assert rules(config, **known) == set()


def mended(config, rounds=12, **where):
    """The configuration after the first finding's `nearest` was applied until there is none left."""
    for _ in range(rounds):
        left = found(config, **where)
        if not left:
            return config
        assert left[0].nearest, left[0]
        config = applied(config, left[0].nearest)
    raise AssertionError([f.message for f in found(config, **where)])


@pytest.mark.parametrize("rule", [r for r in RULES if r != "data"])
def test_what_is_nearest_mends_each_rule(rule):
    config, known = RULES[rule][0]
    assert rule not in rules(mended(config, **known), **known)


sizes = st.integers(1, 40)
MODELS = st.one_of(
    st.builds(
        lambda heads, dim, mlp, vocab: TransformerConfig(
            padded_vocab_size=256 + vocab, max_seq_len=16, embed_dim=heads * dim, num_heads=heads, mlp_dim=mlp, num_layers=1
        ),
        st.integers(1, 12), st.integers(1, 8), sizes, st.integers(0, 7),
    ),
    st.builds(
        lambda kv, group, embed, mlp: LlamaConfig(
            max_seq_len=16, embed_dim=embed, num_heads=kv * group, num_kv_heads=kv, head_dim=4, mlp_dim=mlp, num_layers=1
        ),
        st.integers(1, 4), st.integers(1, 3), sizes, sizes,
    ),
    st.builds(lambda i, h, o: MlpConfig(input_dim=i, hidden_dim=h, num_layers=1, output_dim=o), sizes, sizes, sizes),
)  # fmt: skip
DEGREES = st.one_of(st.none(), st.integers(1, 6))


@st.composite
def recipes(draw):
    parallel = {
        "policy": draw(st.sampled_from(["dp", "zero", "fsdp"])), "data": draw(DEGREES), "fsdp": draw(DEGREES),
        "tensor": draw(st.integers(1, 6)), "reduction": draw(st.sampled_from(["exact", "fast"])),
        "exact_memory": draw(st.sampled_from(["copy", "lean"])), "virtual_workers": 1 << draw(st.integers(0, 4)),
        "replicate": draw(st.sampled_from([(), ("nothing",), ("blocks/q",)])),
    }  # fmt: skip
    train = {"global_batch_size": draw(st.integers(1, 70)), "microbatch_size": draw(st.one_of(st.none(), st.integers(1, 5)))}
    data = {"seq_len": draw(st.integers(1, 24)), "num_examples": draw(st.integers(1, 99))}
    return change(dataclasses.replace(small(), model=draw(MODELS)), parallel=parallel, train=train, data=data)


@settings(max_examples=60)
@given(recipes(), st.integers(1, 3), st.integers(1, 12))
def test_applying_what_is_nearest_makes_any_recipe_pass(config, num_processes, num_local):
    for _ in range(12):
        left = found(config, num_processes * num_local, num_local, num_examples=config.data.num_examples)
        if not left:
            return
        config = applied(config, left[0].nearest)
    raise AssertionError([f.message for f in left])


@given(st.integers(1, 500), st.integers(1, 60))
def test_the_multiples_around_a_number_are_the_two_next_to_it(value, unit):
    assert set(around(value, unit)) == {n for n in range(unit, value + unit + 1, unit) if abs(n - value) < unit}


def test_findings_of_one_cause_are_told_once():
    left = found(change(LLAMA, parallel={"tensor": 4}, data={"seq_len": 64}))
    assert [f.path for f in left if f.rule == "heads"] == ["blocks/attn_out", "blocks/q"]
    assert str(Refused(left)).startswith("2 reasons why") and str(Refused(left)).count("heads is 6") == 1


def test_a_dimension_is_told_with_path_shape_layout_and_factor():
    [finding] = [f for f in found(change(FSDP, model={"mlp_dim": 130})) if f.path == "blocks/mlp_in_bias"]
    assert (finding.shape, finding.spec, finding.factor, finding.set_at) == (
        (2, 130),
        (None, ("tensor", "fsdp")),
        8,
        "--parallel.fsdp",
    )
    assert finding.nearest == {"--model.mlp-dim": 128}


def undivided(replicate=()):
    """A plan under which one weight has no dimension for fsdp."""
    rules = AxisRules(names=frozenset({"layers", "embed"}), tensor=(), storage=("embed",))
    decls = {"gate": ParamDecl((8,), "float32", ("layers",)), "w": ParamDecl((8, 16), "float32", ("layers", "embed"))}
    config = change(FSDP, parallel={"replicate": replicate})
    return config, make_plan(decls, rules, config.parallel, MeshShape(1, 4, 1))


def test_a_weight_that_would_be_whole_although_the_policy_divides_is_a_finding():
    [finding] = findings(*undivided())
    assert (finding.rule, finding.path, finding.nearest) == ("replicated", "gate", {"--parallel.replicate": ["gate"]})


def test_a_weight_accepted_by_name_may_be_whole():
    assert findings(*undivided(("gate",))) == []


@pytest.mark.parametrize(
    "options",
    [
        {"--parallel.tensor": 4, "--model.mlp-dim": 96},
        {"--parallel.replicate": ["a", "b/c"]},
        {"--train.microbatch-size": None},
    ],
)
def test_options_mean_on_the_command_line_what_they_mean_when_applied(options):
    default = change(small(), train={"microbatch_size": 2})
    parsed = tyro.cli(
        tyro.conf.AvoidSubcommands[Annotated[RunConfig, tyro.conf.arg(name="")]], args=as_arguments(options), default=default
    )
    assert parsed == applied(default, options) != default


@pytest.mark.parametrize("tensor, local", [(3, 8), (16, 8)])
def test_a_tensor_group_that_leaves_its_process_is_a_finding_beside_others(tensor, local):
    config = change(small(), parallel={"tensor": tensor}, data={"seq_len": 64})
    assert {"mesh", "sequence"} <= rules(config, 16, local)


@pytest.mark.parametrize("keep_last, keep_every, num", [(2, None, 3), (1, None, 2), (2, 20, 8)])
def test_checkpoints_that_lie_on_disk_at_once(keep_last, keep_every, num):
    config = change(small(), train={"steps": 100}, checkpoint={"every": 5, "keep_last": keep_last, "keep_every": keep_every})
    assert num_retained(config) == num


@pytest.mark.parametrize("free, passes", [(799, False), (800, True)])
def test_checkpoints_kept_for_good_count(free, passes):
    config = change(small(), train={"steps": 100}, checkpoint={"every": 5, "keep_every": 20})
    known = {"state_bytes": 100, "free_bytes": free}
    assert (rules(config, **known) == set()) == passes
    assert rules(mended(config, **known), **known) == set()


def test_a_disk_without_room_for_two_is_for_the_user_to_mend():
    [finding] = found(small(), state_bytes=100, free_bytes=199)
    assert finding.rule == "disk" and finding.nearest == {} and "another --run-dir" in finding.message


def resolves(option: str) -> bool:
    """As an option of train, or of serve for a model that no run describes."""
    section, name = option.removeprefix("--").replace("-", "_").split(".")
    kinds = {f.name: f.type for f in dataclasses.fields(RunConfig)}
    classes = [*MODEL_CONFIGS.values(), ModelOptions] if section == "model" else [kinds[section]] if section in kinds else []
    return any(name in (f.name for f in dataclasses.fields(cls)) for cls in classes)


def test_every_option_that_a_message_recommends_exists():
    """In all strings of the package: findings, errors and helps."""
    named = set()
    for path in Path(sharder.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= set(re.findall(r"--[a-z][a-z-]*\.[a-z][a-z0-9-]*", node.value))
    assert len(named) > 30 and {option for option in named if not resolves(option.rstrip("-"))} == set()


@pytest.mark.parametrize("rule", RULES)
def test_every_option_of_a_finding_exists(rule):
    config, known = RULES[rule][0]
    for finding in found(config, **known):
        assert all(map(resolves, [*finding.nearest, *re.findall(r"--[a-z-]+\.[a-z-]+[a-z]", finding.message)]))


def test_memory_is_saved_with_any_degree_that_divides_not_only_with_the_largest():
    """Six replicas, and sizes that six does not divide: two of them hold a part each."""
    config = change(small(), parallel={"policy": "fsdp", "data": 6, "fsdp": 1, "tensor": 2}, train={"global_batch_size": 24})
    fits = lambda c: 1 if (c.parallel.data, c.parallel.fsdp) == (3, 2) else 100  # noqa: E731
    (finding,) = (f for f in found(config, 12, memory_bytes=10, predict_bytes=fits) if f.rule == "memory")
    assert finding.nearest == {"--parallel.policy": "fsdp", "--parallel.data": 3, "--parallel.fsdp": 2, "--parallel.tensor": 2}

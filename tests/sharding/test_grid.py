import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from sharder.config import ParallelConfig, TransformerConfig, UserError
from sharder.models.build import declare
from sharder.sharding.figure import draw
from sharder.sharding.grid import batch_parts, find_leaf, shards, show, strategy_bytes
from sharder.sharding.mesh import MeshShape, make_mesh
from sharder.sharding.plan import make_plan

MODEL = TransformerConfig(padded_vocab_size=256, max_seq_len=32, embed_dim=64, num_heads=4, mlp_dim=128, num_layers=2)
PARALLEL = ParallelConfig(policy="fsdp", tensor=2)
MESH = MeshShape(1, 4, 2)


def plan(mesh=MESH, parallel=PARALLEL):
    declared = declare(MODEL)
    return make_plan(declared.params, declared.rules, parallel, mesh)


@pytest.mark.parametrize("mesh", [MeshShape(2, 2, 2), MeshShape(1, 4, 2), MeshShape(8, 1, 1)], ids=str)
@pytest.mark.parametrize(
    "spec",
    [(None, None), ("fsdp", "tensor"), (("tensor", "fsdp"), None), (("data", "fsdp"),), (None, ("fsdp", "tensor"))],
    ids=str,
)
def test_shards_are_those_that_jax_makes(mesh, spec):
    sharding = NamedSharding(make_mesh(mesh), PartitionSpec(*spec))
    numbers = {device: number for number, device in enumerate(sharding.mesh.devices.flat)}
    wanted = {
        numbers[device]: tuple(s.indices(size)[:2] for s, size in zip(slices, (16, 24)))
        for device, slices in sharding.devices_indices_map((16, 24)).items()
    }
    assert {d: shard.slices for shard in shards((16, 24), PartitionSpec(*spec), mesh) for d in shard.devices} == wanted


def test_the_batch_is_divided_over_replicas_and_copied_in_a_tensor_group():
    assert [(str(s), s.devices) for s in batch_parts(8, MESH)][:2] == [("[0:2]", (0, 1)), ("[2:4]", (2, 3))]


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_replicated_and_fsdp_bytes_are_those_of_the_plans(devices):
    shape = MeshShape(1, devices, 1)
    found = strategy_bytes(plan(shape), PARALLEL)
    assert found["replicated"] == 4 * declare(MODEL).num_params
    if devices == 8:
        assert found["fsdp 8"] == plan(shape, ParallelConfig(policy="fsdp")).param_bytes_per_device("storage")


def test_two_dimensional_bytes_are_those_of_arrays_so_placed():
    grid = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    size = 0
    for decl in declare(MODEL).params.values():
        last = ("rows", "columns")[-len(decl.shape) :]
        spec = [axis if n % grid.shape[axis] == 0 else None for n, axis in zip(decl.shape[-2:], last)]
        spec = PartitionSpec(*[None] * (len(decl.shape) - len(spec)), *spec)
        size += jax.device_put(np.zeros(decl.shape, decl.dtype), NamedSharding(grid, spec)).addressable_shards[0].data.nbytes
    assert strategy_bytes(plan(), PARALLEL)["2-D: 4 x 2"] == size


def test_the_picture_tells_parameter_layouts_batch_and_strategies():
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(show(plan(), PARALLEL, 16, "blocks/mlp_in"))
    text = console.export_text()
    for part in ("blocks/mlp_in", "update", "[0:2, 16:32, 64:128]", "16 examples of a slot", "fsdp 4 x tensor 2", "█"):
        assert part in text


def test_without_a_path_the_largest_parameter_is_shown():
    assert find_leaf(plan(), None).path in ("blocks/mlp_in", "blocks/mlp_out", "embedding/table", "token_embedding")


def test_an_unknown_parameter_is_refused_with_those_that_there_are():
    with pytest.raises(UserError, match="--param is 'no'.*blocks/mlp_in"):
        find_leaf(plan(), "no")


@pytest.mark.parametrize("name, begins", [("a.svg", b"<?xml"), ("sub/a.png", b"\x89PNG")])
def test_the_figure_is_written_in_the_format_of_its_name(tmp_path, name, begins):
    draw(plan(), PARALLEL, 16, "blocks/mlp_in", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_figure_of_another_format_is_refused(tmp_path):
    with pytest.raises(UserError, match="must end with one of .svg, .png, .pdf"):
        draw(plan(), PARALLEL, 16, None, tmp_path / "a.txt")

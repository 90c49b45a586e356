"""Collectives read off programs that XLA compiled for eight CPU devices, and off text in the forms that other backends print."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharder.config import ParallelConfig, TransformerConfig
from sharder.instrument.collectives import axes_of, read_traffic
from sharder.models.build import declare, unflatten
from sharder.sharding.compute import ComputeLayout
from sharder.sharding.mesh import AXES, MeshShape, make_mesh
from sharder.sharding.plan import make_plan

SHAPE = {"data": 2, "tensor": 4}
B, D, F = 8, 64, 128


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def traffic_of(mesh, fn, specs, *shapes, out=None):
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, spec)) for s, spec in zip(shapes, specs)]
    out = None if out is None else NamedSharding(mesh, out)
    text = jax.jit(fn, out_shardings=out).lower(*arguments).compile().as_text()
    return read_traffic(text, dict(mesh.shape), [0] * mesh.size)


def test_a_column_sharded_product_communicates_nothing(mesh):
    traffic = traffic_of(mesh, jnp.dot, (P("data"), P(None, "tensor")), (B, D), (D, F), out=P("data", "tensor"))
    assert traffic.collectives == ()


def test_a_row_sharded_product_takes_one_all_reduce(mesh):
    traffic = traffic_of(mesh, jnp.dot, (P("data", "tensor"), P("tensor")), (B, F), (F, D), out=P("data"))
    (reduce,) = traffic.collectives
    assert (reduce.kind, reduce.axes, reduce.payload_bytes) == ("all-reduce", ("tensor",), B // 2 * D * 4)
    assert reduce.received_bytes == 2 * reduce.payload_bytes * 3 / 4


def test_the_forward_pass_of_a_pair_takes_one_all_reduce(mesh):
    mlp = lambda x, a, b: jax.nn.gelu(x @ a) @ b  # noqa: E731
    traffic = traffic_of(mesh, mlp, (P("data"), P(None, "tensor"), P("tensor")), (B, D), (D, F), (F, D), out=P("data"))
    assert [(c.kind, c.axes) for c in traffic.collectives] == [("all-reduce", ("tensor",))]


def test_an_explicit_psum_is_the_automatic_all_reduce_bit_for_bit(mesh):
    specs = (P("data", "tensor"), P("tensor"))
    explicit = jax.shard_map(lambda x, w: jax.lax.psum(x @ w, "tensor"), mesh=mesh, in_specs=specs, out_specs=P("data"))
    assert [c.kind for c in traffic_of(mesh, explicit, specs, (B, F), (F, D)).collectives] == ["all-reduce"]
    keys = jax.random.split(jax.random.key(7))
    x, w = (jax.device_put(jax.random.normal(k, s), NamedSharding(mesh, p)) for k, s, p in zip(keys, ((B, F), (F, D)), specs))
    automatic = jax.jit(jnp.dot, out_shardings=NamedSharding(mesh, P("data")))
    assert np.array_equal(jax.jit(explicit)(x, w), automatic(x, w))


def block_traffic(num_layers, differentiate=False):
    """Traffic of a transformer's blocks over fsdp 2 x tensor 4 with whole weights."""
    config = TransformerConfig(max_seq_len=16, embed_dim=D, num_heads=4, mlp_dim=F, num_layers=num_layers)
    declared, shape = declare(config), MeshShape(1, 2, 4)
    plan, mesh = make_plan(declared.params, declared.rules, ParallelConfig("dp", tensor=4), shape), make_mesh(shape)
    layout = ComputeLayout(mesh, plan, "update")

    def losses(params, tokens):
        batch = {"inputs": tokens, "targets": tokens}
        return nnx.merge(declared.graphdef, params).losses(batch, None, layout)[0].sum()

    shardings = plan.shardings("storage", mesh)
    params = unflatten({p: jax.ShapeDtypeStruct(d.shape, d.dtype, sharding=shardings[p]) for p, d in declared.params.items()})
    tokens = jax.ShapeDtypeStruct((B, 16), jnp.int32, sharding=NamedSharding(mesh, P(("data", "fsdp"))))
    fn = jax.grad(losses) if differentiate else losses
    return read_traffic(jax.jit(fn).lower(params, tokens).compile().as_text(), dict(zip(AXES, (1, 2, 4))), [0] * 8)


def test_the_forward_pass_of_a_block_takes_two_all_reduces():
    of_tensor = lambda n: sum(c.executions for c in block_traffic(n).collectives if c.axes == ("tensor",))  # noqa: E731
    assert of_tensor(3) == 3 * 2


def test_what_is_inside_a_loop_counts_once_for_each_trip():
    def scanned(x, ws):
        inner = lambda x, w: jax.lax.scan(lambda x, _: (jnp.sin(x @ w @ w.T), None), x, None, length=3)[0]  # noqa: E731
        return jax.lax.scan(lambda x, w: (inner(x, w), None), x, ws)[0]

    mesh = Mesh(np.array(jax.devices()), ("tensor",), axis_types=(AxisType.Auto,))
    traffic = traffic_of(mesh, scanned, (P(), P(None, None, "tensor")), (B, D), (5, D, F), out=P())
    assert sum(c.executions for c in traffic.collectives if c.kind == "all-reduce") == 15 and not traffic.unknown_loops


def program(instruction: str, extra: str = "") -> str:
    return f"{extra}\nENTRY %main (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n  {instruction}\n}}\n"


def only(text: str, shape=None, hosts=None):
    (found,) = read_traffic(text, shape or SHAPE, hosts or [0] * 8).collectives
    return found


def test_a_combined_collective_counts_all_its_arrays():
    text = program(
        "%r = (f32[8]{0}, bf16[4,2]{1,0}, /*index=2*/f32[]) all-reduce(%p, %p, %p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"
    )
    found = only(text)
    assert (found.num_arrays, found.payload_bytes, found.axes) == (3, 8 * 4 + 8 * 2 + 4, ("data", "tensor"))


def test_an_asynchronous_start_counts_only_what_comes_out():
    start = "%s = ((bf16[3]{0}, f32[2]{0}), (bf16[12]{0}, f32[8]{0})) all-gather-start(%p, %p), replica_groups=[2,4]<=[8], dimensions={0}"
    done = '%d = (bf16[12]{0}, f32[8]{0}) all-gather-done(%s), metadata={op_name="jit(step)/attention/gather"}'
    found = only(program(f"{start}\n  {done}"))
    assert (found.payload_bytes, found.axes, found.scope) == (12 * 2 + 8 * 4, ("tensor",), "attention/gather")


def test_a_scatter_counts_its_whole_input():
    start = "%s = ((f32[64]{0}), f32[16]{0}) reduce-scatter-start(%p), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add"
    found = only(program(start))
    assert found.payload_bytes == 64 * 4 and found.received_bytes == 64 * 4 * 3 / 4


@pytest.mark.parametrize(
    "groups, axes",
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",)),
        ("replica_groups={}", ("data", "tensor")),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("tensor",)),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ("data",)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", ("data",)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", ("tensor",)),
        ("replica_groups={{0,3},{1,2},{4,7},{5,6}}", ("irregular",)),
    ],
)
def test_groups_are_told_by_mesh_axis_in_every_notation(groups, axes):
    assert only(program(f"%r = f32[8]{{0}} all-reduce(%p), {groups}, to_apply=%add")).axes == axes


def test_a_permutation_is_told_by_mesh_axis():
    assert axes_of(np.array([[0, 1], [1, 2], [2, 3], [3, 0]]), SHAPE, is_permute=True) == ("tensor",)


def test_what_crosses_hosts_is_what_a_host_lacks():
    text = program("%g = f32[64]{0} all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}")
    found = only(text, hosts=[0, 0, 0, 0, 1, 1, 1, 1])
    # Each host lacks half of the 256 bytes; its four members share that.
    assert found.across_bytes == 256 / 2 / 4 and found.received_bytes == 256 * 7 / 8


def test_a_loop_of_unknown_length_is_named_and_counted_once():
    body = "%body (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n  %r = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add\n}\n"
    condition = "%cond (x: f32[8]) -> pred[] {\n  %x = f32[8]{0} parameter(0)\n}\n"
    traffic = read_traffic(program("%w = f32[8]{0} while(%p), condition=%cond, body=%body", body + condition), SHAPE, [0] * 8)
    assert traffic.unknown_loops == ("w",) and traffic.collectives[0].executions == 1


def test_a_loop_without_a_known_count_takes_the_bound_of_its_condition():
    body = "%body (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n  %r = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add\n}\n"
    condition = "%cond (x: f32[8]) -> pred[] {\n  %c = s32[]{:T(128)} constant(12)\n}\n"
    assert only(program("%w = f32[8]{0} while(%p), condition=%cond, body=%body", body + condition)).executions == 12

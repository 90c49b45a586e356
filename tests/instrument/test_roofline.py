import math

import jax
import jax.numpy as jnp
import pytest

from sharder.instrument.bound import GATHER, REDUCE, hosts_of_axes
from sharder.instrument.hardware import ACCELERATORS
from sharder.instrument.roofline import count_work, predict, split_bounds
from sharder.sharding.mesh import MeshShape

H100 = ACCELERATORS["h100"]


def work_of(fn, *shapes, slots=1):
    share = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))
    return count_work(share, slots, 0, H100, "bfloat16")


def test_a_product_takes_the_longer_of_arithmetic_and_memory():
    large, small = work_of(jnp.dot, (8192, 8192), (8192, 8192)), work_of(jnp.dot, (8, 8192), (8192, 8))
    assert large.compute_s == pytest.approx(2 * 8192**3 / 989.4e12)
    assert small.compute_s == pytest.approx(2 * (2 * 8 * 8192 + 64) / 3.35e12)


def test_a_loop_counts_its_body_once_for_each_trip():
    loop = lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=5)[0]  # noqa: E731
    assert work_of(loop, (64, 64), (64, 64), slots=3).flops == 3 * 5 * 2 * 64**3


@pytest.mark.parametrize(
    "axes, mesh, found",
    [
        (("tensor",), MeshShape(1, 32, 8), (8, 1)),
        (("fsdp",), MeshShape(1, 256, 1), (256, 32)),
        (("fsdp",), MeshShape(32, 8, 1), (8, 1)),
        (("data",), MeshShape(32, 8, 1), (32, 32)),
        (("fsdp",), MeshShape(1, 64, 4), (64, 32)),
        (("data", "fsdp"), MeshShape(32, 4, 2), (128, 32)),
    ],
)
def test_members_and_hosts_of_a_group(axes, mesh, found):
    assert hosts_of_axes(axes, mesh, 8) == found


def test_hybrid_sharding_gathers_inside_hosts_and_reduces_parts_across():
    inside, across = split_bounds({(GATHER, ("fsdp",)): 70.0, (REDUCE, ("data",)): 62.0}, MeshShape(32, 8, 1), 8)
    assert (inside, across) == pytest.approx((70.0, 62.0))


def test_a_link_without_a_known_rate_gives_no_time():
    work = work_of(jnp.dot, (64, 64), (64, 64))
    assert predict(work, 0.0, 1.0, ACCELERATORS["v5e"]) is None
    time = predict(work, 450e9, 50e9, H100)
    assert math.isclose(time.hidden_s, 1.0) and math.isclose(time.exposed_s, 2.0 + work.compute_s)

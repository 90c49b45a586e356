"""What the programs of exact mode communicate, compiled for eight CPU devices, against a hand calculation."""

import math

import jax
import pytest
from small import needs_tested_jax, small

from sharder.finding import applied
from sharder.instrument.bound import GATHER, OTHER, REDUCE
from sharder.instrument.machine import predict_step, read_exact
from sharder.train.abstract import compile_exact
from sharder.train.description import describe_step
from sharder.train.setup import prepare

pytestmark = needs_tested_jax

FLAGS = 64
"""Bytes of whether to stop."""
EXACT = applied(small(), {"--parallel.reduction": "exact", "--parallel.virtual-workers": 16})


def compiled(hosts=(0,) * 8, **parallel):
    config = applied(EXACT, {f"--parallel.{name.replace('_', '-')}": value for name, value in parallel.items()})
    setup = prepare(config, jax.devices())
    found = read_exact(predict_step(describe_step(config, 8, 8, "cpu"), None, 8), compile_exact(setup), list(hosts), None)
    # Small parameters, which do not divide into 8, send all terms to all: they are left out of the hand calculation.
    divided = sum(math.prod(x.decl.shape) for x in setup.plan.leaves.values() if x.divided)
    return {p.name: p for p in found.purposes}, found, 4 * divided


@pytest.mark.parametrize("policy", ["fsdp", pytest.param("zero", marks=pytest.mark.slow)])
def test_every_slot_sums_like_a_reduce_scatter_and_parameters_are_gathered_once(policy):
    purposes, found, size = compiled(policy=policy)
    # Two slots of one worker on each replica.
    assert purposes[REDUCE].received_bytes == pytest.approx(2 * 7 / 8 * size, rel=0.05)
    assert purposes[REDUCE].received_bytes <= 1.05 * purposes[REDUCE].bound_bytes
    assert purposes[GATHER].received_bytes == pytest.approx(7 / 8 * size, rel=0.05)
    assert purposes[OTHER].received_bytes < 1 << 16 and found.warnings == []


@pytest.mark.slow
def test_whole_gradients_are_summed_like_an_all_reduce_and_nothing_is_gathered():
    purposes, _, _ = compiled(policy="dp")
    assert purposes[REDUCE].received_bytes == pytest.approx(purposes[REDUCE].bound_bytes, rel=0.05)
    assert purposes[GATHER].received_bytes < FLAGS


@pytest.mark.slow
def test_blocks_are_gathered_twice_in_every_slot_where_no_device_has_a_copy():
    purposes, _, _ = compiled(policy="fsdp", exact_memory="lean")
    assert purposes[GATHER].received_bytes == pytest.approx(purposes[GATHER].bound_bytes, rel=0.05)
    assert purposes[REDUCE].received_bytes == pytest.approx(purposes[REDUCE].bound_bytes, rel=0.05)


def test_pieces_of_every_other_host_cross():
    """Two hosts of four devices, state divided inside: half of each gradient comes from the other host, and no parameter."""
    purposes, _, size = compiled([0] * 4 + [1] * 4, policy="fsdp", data=2, fsdp=4)
    assert purposes[GATHER].received_bytes > 1 << 18 and purposes[GATHER].across_bytes < FLAGS
    # The all-to-all, and the gather over data that makes a quarter whole.
    assert purposes[REDUCE].across_bytes == pytest.approx(2 * (size / 2 + size / 4 / 2), rel=0.05)

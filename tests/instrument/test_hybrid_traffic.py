"""Hybrid sharding: what crosses hosts where state is divided inside a host and copied across, against a hand calculation."""

import math

import jax
import pytest
from small import small

from sharder.finding import applied
from sharder.instrument.bound import GATHER, REDUCE
from sharder.instrument.machine import predict_step, read_compiled
from sharder.train.abstract import lower_abstract
from sharder.train.description import describe_step
from sharder.train.setup import prepare


def test_parts_of_gradients_cross_hosts_and_weights_do_not():
    """Two hosts of four devices, by a program compiled for eight simulated ones."""
    config = applied(small(), {"--parallel.policy": "fsdp", "--parallel.data": 2, "--parallel.fsdp": 4})
    program = lower_abstract(prepare(config, jax.devices())).compile()
    step = describe_step(config, 8, 4)
    found = read_compiled(predict_step(step, None, 4), program, [0] * 4 + [1] * 4, None)
    gather, reduce = ({p.name: p for p in found.purposes}[name] for name in (GATHER, REDUCE))
    # A few digests of 8 bytes cross.
    assert gather.received_bytes > 1 << 18 and gather.across_bytes < 64
    # An all-reduce of each device's quarter between two hosts: it sends and receives one half of it, twice.
    quarter = 4 * sum(math.prod(x.decl.shape) for x in step.plan.leaves.values()) / 4
    assert reduce.across_bound_bytes == quarter
    # The CPU sums whole gradients inside hosts and slices them; between hosts it sums the parts.
    assert reduce.across_bytes == pytest.approx(quarter, rel=0.02)
    assert found.traffic.inside_bytes + found.traffic.across_bytes == found.traffic.received_bytes

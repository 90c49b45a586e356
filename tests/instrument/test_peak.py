"""Ceilings: the datasheet's where there is one, else measured."""

import jax.numpy as jnp
import pytest

from sharder.instrument import peak


def test_a_cpus_peak_is_measured_once():
    found = peak.matrix_ceiling("float32")
    assert found.source == "measured" and found.value > 1e8 and peak.matrix_ceiling("float32") is found


def test_an_accelerators_peak_is_that_of_its_datasheet(monkeypatch):
    peak.matrix_ceiling.cache_clear()
    monkeypatch.setattr(peak, "peak_flops", lambda kind, dtype: 989.4e12)
    try:
        assert peak.matrix_ceiling("bfloat16") == peak.Ceiling(989.4e12, "datasheet")
    finally:
        peak.matrix_ceiling.cache_clear()


def test_a_copy_counts_what_is_read_and_what_is_written():
    assert peak.measure_copy_rate(0.01) > 1e7


@pytest.mark.parametrize("budget_s", [0.0, 0.05])
def test_at_least_one_call_is_timed(budget_s):
    assert 0 < peak._least_seconds(lambda x: x + 1, (jnp.ones(3),), budget_s) < 10

import pytest

from sharder.instrument.flops import step_flops_6nd, utilisation
from sharder.instrument.hardware import peak_flops


def test_a_step_is_six_operations_per_parameter_and_token():
    assert step_flops_6nd(124_439_808, 512 * 1024) == 6 * 124_439_808 * 524_288


def test_utilisation_is_the_share_of_all_devices_peak():
    """Half of what eight devices of 1 TFLOP/s could do in two seconds."""
    assert utilisation(8e12, 2.0, 1e12, 8) == pytest.approx(0.5)


def test_without_a_known_peak_there_is_no_utilisation():
    assert utilisation(8e12, 2.0, None, 8) is None


@pytest.mark.parametrize(
    "kind, dtype, peak", [("NVIDIA H200", "bfloat16", 989.4e12), ("NVIDIA H200", "float32", None), ("cpu", "bfloat16", None)]
)
def test_an_unknown_peak_stays_unknown(kind, dtype, peak):
    assert peak_flops(kind, dtype) == peak

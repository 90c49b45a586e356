import pytest

from sharder.instrument.hardware import ACCELERATORS, find_accelerator, peak_flops


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200", "v4", "v5e", "v5p", "v6e"])
def test_every_accelerator_has_what_a_prediction_needs(name):
    accelerator = ACCELERATORS[name]
    assert all(
        [
            accelerator.peak_flops["bfloat16"],
            accelerator.memory_bytes,
            accelerator.memory_bytes_per_s,
            accelerator.inside_bytes_per_s,
        ]
    )


def test_device_kinds_are_told_apart():
    kinds = [k for a in ACCELERATORS.values() for k in a.device_kinds]
    assert (
        len(kinds) == len(set(kinds))
        and find_accelerator("TPU v5").name == "v5p"
        and find_accelerator("TPU v5 lite").name == "v5e"
    )


def test_the_variant_with_less_memory_has_the_arithmetic_and_not_the_memory():
    assert peak_flops("NVIDIA A100-SXM4-40GB", "bfloat16") == 312e12 and find_accelerator("NVIDIA A100-SXM4-40GB") is None

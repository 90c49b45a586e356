"""What accelerators can do, from public documents. Unknown stays None; a guess would falsify every prediction and every MFU.

Rates are those of dense arithmetic, per device; bandwidths are bytes/s per device **in one direction**. Documents:

- A100: "NVIDIA A100 Tensor Core GPU" datasheet (June 2021), SXM columns; "NVIDIA DGX A100" datasheet (2020): one 200 Gb/s
  ConnectX-6 per GPU.
- H100, H200: "NVIDIA H100 Tensor Core GPU" datasheet (2023) and "NVIDIA H200 Tensor Core GPU" datasheet (2024), SXM columns,
  halved where they count sparsity; "NVIDIA DGX H100/H200" datasheets: one 400 Gb/s ConnectX-7 per GPU.
- B200: "NVIDIA DGX B200" datasheet (2024), an eighth of the system, halved where it counts sparsity; 400 Gb/s ConnectX-7 per GPU.
- GPU memory: what the driver reports as total, in bytes, after the specifications published with openxla/xla (2024 to 2026).
- TPU v5e, v5p, v6e: docs.cloud.google.com/tpu/docs/v5e, /v5p and /v6e (read November 2026): half of the bidirectional
  interconnect figure. v4: the comparison in "Introducing Cloud TPU v5p and AI Hypercomputer" (Google Cloud blog, December 2023).

NVLink figures in the datasheets count both directions: half of 600, 900, 900 and 1800 GB/s.
"""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Accelerator:
    name: str
    """As in --topology."""
    device_kinds: tuple[str, ...]
    """What jax calls the device."""
    peak_flops: dict[str, float]
    """Matrix products, FLOP/s by compute dtype."""
    memory_bytes: int | None
    memory_bytes_per_s: float | None
    inside_bytes_per_s: float | None
    """NVLink inside a host; the interconnect of a whole TPU slice, all its links together."""
    across_bytes_per_s: float | None
    """Network between hosts; for TPU between slices, which no document gives per chip for all."""

    @property
    def is_tpu(self) -> bool:
        return self.name.startswith("v")


ACCELERATORS: dict[str, Accelerator] = {
    a.name: a
    for a in (
        Accelerator("a100", ("NVIDIA A100-SXM4-80GB",), {"bfloat16": 312e12}, 85_100_068_864, 2.039e12, 300e9, 25e9),
        Accelerator("h100", ("NVIDIA H100 80GB HBM3",), {"bfloat16": 989.4e12}, 84_942_979_072, 3.35e12, 450e9, 50e9),
        Accelerator(
            "h200", ("NVIDIA H200", "NVIDIA H200 141GB HBM3e"), {"bfloat16": 989.4e12}, 151_397_597_184, 4.8e12, 450e9, 50e9
        ),
        Accelerator("b200", ("NVIDIA B200",), {"bfloat16": 2250e12}, 191_514_411_008, 8e12, 900e9, 50e9),
        Accelerator("v4", ("TPU v4",), {"bfloat16": 275e12}, 32 * GIB, 1.228e12, 300e9, None),
        Accelerator("v5e", ("TPU v5 lite", "TPU v5e"), {"bfloat16": 197e12}, 16 * GIB, 0.819e12, 200e9, None),
        Accelerator("v5p", ("TPU v5", "TPU v5p"), {"bfloat16": 459e12}, 95 * GIB, 2.765e12, 600e9, None),
        Accelerator("v6e", ("TPU v6 lite", "TPU v6e"), {"bfloat16": 918e12}, 32 * GIB, 1.638e12, 400e9, None),
    )
}

# A variant with half the memory and the same arithmetic (A100 datasheet); it is no topology of its own.
_SAME_ARITHMETIC = {"NVIDIA A100-SXM4-40GB": "a100"}


def find_accelerator(device_kind: str) -> Accelerator | None:
    """The accelerator that jax calls so, or None."""
    return next((a for a in ACCELERATORS.values() if device_kind in a.device_kinds), None)


def peak_flops(device_kind: str, compute_dtype: str) -> float | None:
    """Peak FLOP/s of one device for matrix products of this dtype, or None where no source says.

    Float32 has none: how far its products are rounded is a setting of the compiler, and the rate depends on it.
    """
    accelerator = find_accelerator(device_kind) or ACCELERATORS.get(_SAME_ARITHMETIC.get(device_kind, ""))
    return None if accelerator is None else accelerator.peak_flops.get(compute_dtype)

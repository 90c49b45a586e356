"""Peak arithmetic rates of accelerators by jax's device kind. Unknown stays None; a guess would falsify every MFU."""

# Dense bfloat16 matrix products, FLOP/s per device.
PEAK_BFLOAT16_FLOPS: dict[str, float] = {
    "NVIDIA A100-SXM4-40GB": 312e12,  # NVIDIA A100 datasheet, June 2021
    "NVIDIA A100-SXM4-80GB": 312e12,  # same
    "NVIDIA H100 80GB HBM3": 989.4e12,  # NVIDIA H100 datasheet (SXM, without sparsity)
    "NVIDIA H200": 989.4e12,  # NVIDIA H200 datasheet (SXM, without sparsity)
    "TPU v4": 275e12,  # Google Cloud TPU documentation, v4
    "TPU v5 lite": 197e12,  # same, v5e
    "TPU v5": 459e12,  # same, v5p
    "TPU v6 lite": 918e12,  # same, v6e
}


def peak_flops(device_kind: str, compute_dtype: str) -> float | None:
    """Peak FLOP/s of one device for matrix products of this dtype, or None where no source says."""
    return PEAK_BFLOAT16_FLOPS.get(device_kind) if compute_dtype == "bfloat16" else None

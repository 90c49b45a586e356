"""Arithmetic of a training step, counted analytically."""


def step_flops_6nd(num_params: int, num_tokens: int) -> float:
    """6 N D: forward 2 and backward 4 FLOPs per parameter and token (arXiv:2001.08361, section 2.1).

    All parameters count, embeddings too; attention's product of queries and keys does not.
    """
    return 6.0 * num_params * num_tokens


def utilisation(flops: float, step_time_s: float, peak_flops: float | None, num_devices: int) -> float | None:
    """Share of the devices' peak that `flops` in `step_time_s` amounts to, or None without a known peak."""
    return None if peak_flops is None else flops / (step_time_s * peak_flops * num_devices)

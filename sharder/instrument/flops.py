"""Arithmetic of a training step, counted analytically."""

from sharder.config import Pi0Config


def step_flops_6nd(num_params: int, num_tokens: int) -> float:
    """6 N D: forward 2 and backward 4 FLOPs per parameter and token (arXiv:2001.08361, section 2.1).

    All parameters count, embeddings too; attention's product of queries and keys does not.
    """
    return 6.0 * num_params * num_tokens


def utilisation(flops: float, step_time_s: float, peak_flops: float | None, num_devices: int) -> float | None:
    """Share of the devices' peak that `flops` in `step_time_s` amounts to, or None without a known peak."""
    return None if peak_flops is None else flops / (step_time_s * peak_flops * num_devices)


def pi0_example_flops(config: Pi0Config) -> float:
    """Forward and backward of one example of pi0 or pi0.5: every matrix product, attention included, embeddings and recomputation not.

    A product of (n, d) with (d, f) takes 2 n d f; the backward pass takes twice the forward's.
    """
    vision, cameras = config.vision, len(config.cameras)
    patches = config.image_size[0] * config.image_size[1] // vision.patch_size**2
    D, F = vision.embed_dim, vision.mlp_dim
    encoder = vision.num_layers * (4 * D * D + 2 * D * F + 2 * patches * D) + 3 * vision.patch_size**2 * D + D * config.backbone.embed_dim
    prefix = cameras * patches + config.max_prompt_len
    suffix = config.action_horizon + (config.variant == "pi0")
    total = cameras * patches * encoder
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    for expert, tokens in ((config.backbone, prefix), (config.action_expert, suffix)):
        weights = expert.embed_dim * H * (2 * N + 2 * K) + 3 * expert.embed_dim * expert.mlp_dim
        total += config.num_layers * tokens * (weights + 2 * (prefix + suffix) * N * H)
    small = config.action_expert.embed_dim
    total += config.action_horizon * small * (2 * config.action_dim + (3 if config.variant == "pi0" else 0) * small)
    return 3.0 * 2.0 * total

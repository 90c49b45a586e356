"""A weight, and the low-rank addition that can be trained in its stead (arXiv:2106.09685)."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from sharder.config import ExpertConfig, Pi0Config
from sharder.models.layers import normal, param, zeros
from sharder.ops.linear import linear

EINSUMS = {
    ("embed", "heads", "head_dim"): ("BTD,DNR->BTNR", "BTNR,NRH->BTNH"),
    ("embed", "kv_heads", "head_dim"): ("BTD,DNR->BTNR", "BTNR,NRH->BTNH"),
    ("heads", "head_dim", "embed"): ("BTNH,NHR->BTNR", "BTNR,NRD->BTD"),
    ("embed", "mlp"): ("BTD,DR->BTR", "BTR,RF->BTF"),
    ("mlp", "embed"): ("BTF,FR->BTR", "BTR,RD->BTD"),
}
"""By the axes of the weight: how the two factors are applied. Every head has factors of its own."""


def factor_axes(axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Axes of the two factors of a weight: its last axis, or its first but heads, becomes the rank."""
    if len(axes) == 2:
        return (axes[0], "rank"), ("rank", axes[1])
    if axes[0] == "embed":
        return (axes[0], axes[1], "rank"), (axes[1], "rank", axes[2])
    return (axes[0], axes[1], "rank"), (axes[0], "rank", axes[2])


class Projection(nnx.Module):
    """x (B, T, in...) to (B, T, out...), without bias."""

    def __init__(self, shape, axes, num_contracted: int, expert: ExpertConfig, dtype: str, rngs: nnx.Rngs):
        fan_in = math.prod(shape[:num_contracted])
        self.weight = param(rngs, normal(fan_in**-0.5), dtype, shape, axes)
        self.axes, self.num_contracted, self.rank = axes, num_contracted, expert.lora_rank
        if expert.lora_rank:
            self.lora_scale = expert.lora_alpha / expert.lora_rank
            sizes = dict(zip(axes, shape)) | {"rank": expert.lora_rank}
            first, second = factor_axes(axes)
            # The second factor begins at zero, so that training begins at the weight itself.
            self.lora_a = param(rngs, normal(fan_in**-0.5), dtype, tuple(sizes[a] for a in first), first)
            self.lora_b = param(rngs, zeros, dtype, tuple(sizes[a] for a in second), second)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = linear(x, self.weight[...], num_contracted=self.num_contracted)
        if not self.rank:
            return y
        into, out_of = EINSUMS[self.axes]
        return y + jnp.einsum(out_of, jnp.einsum(into, x, self.lora_a[...]), self.lora_b[...]) * self.lora_scale


MERGE = {
    "query": "LDNR,LNRH->LDNH", "key": "LDNR,LNRH->LDNH", "value": "LDNR,LNRH->LDNH", "out": "LNHR,LNRD->LNHD",
    "gate": "LDR,LRF->LDF", "up": "LDR,LRF->LDF", "down": "LFR,LRD->LFD",
}  # fmt: skip
"""By the name of a stacked projection: the product of its factors."""


def without_lora(params: Mapping[str, jax.Array], model: Pi0Config) -> tuple[dict[str, jax.Array], Pi0Config]:
    """The same function without low-rank additions: they are added to the weights, in float32."""
    scales = {"backbone": model.backbone, "action": model.action_expert}

    def merge(weights, first, second):
        found = {}
        for path, weight in weights.items():
            expert = scales[path.split("/")[1]]
            product = jnp.einsum(MERGE[path.split("/")[-2]], first[path].astype(jnp.float32), second[path].astype(jnp.float32))
            found[path] = (weight.astype(jnp.float32) + product * (expert.lora_alpha / expert.lora_rank)).astype(weight.dtype)
        return found

    paths = [p.removesuffix("lora_a") + "weight" for p in params if p.endswith("/lora_a")]
    parts = [{p: params[p.removesuffix("weight") + name] for p in paths} for name in ("weight", "lora_a", "lora_b")]
    merged = jax.jit(merge, out_shardings={p: params[p].sharding for p in paths})(*parts)
    plain = {p: x for p, x in params.items() if not p.endswith(("/lora_a", "/lora_b"))} | merged
    none = {name: dataclasses.replace(getattr(model, name), lora_rank=0) for name in ("backbone", "action_expert")}
    return plain, dataclasses.replace(model, freeze="none", **none)

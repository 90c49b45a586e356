"""The names and shapes of openpi's parameter tree, and ours, both ways.

openpi keeps keys and values (and both inputs of the gated feed-forward) in one array, and heads before the model
dimension. Here every projection is an array of its own with the model dimension first. Nothing but slices, stacks and
transposes lies between the two, so every conversion keeps all bits.

Letters: L layers, N query heads, K key-value heads, D model dimension, H head dimension, F feed-forward, R rank.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharder.config import ExpertConfig, Pi0Config, SiglipConfig, UserError

Shapes = Mapping[str, tuple[int, ...]]
Array = Any
IMG, LLM = "PaliGemma/img/", "PaliGemma/llm/"


@dataclass(frozen=True)
class Source:
    """Where a parameter of ours stands in openpi's tree."""

    path: str
    axis: int | None = None
    """The dimension along which it is one of several."""
    index: int = 0
    """Which of them."""
    order: tuple[int, ...] | None = None
    """Dimensions of theirs (without `axis`) in our order."""

    def take(self, theirs: Array) -> Array:
        part = theirs if self.axis is None else theirs[(slice(None),) * self.axis + (self.index,)]
        return part if self.order is None else part.transpose(self.order)

    def untake(self, ours: Array) -> Array:
        """Ours in their order, still without `axis`."""
        return ours if self.order is None else ours.transpose(tuple(np.argsort(self.order)))

    def layout(self, entries: Iterable, fill: object = None) -> tuple:
        """What belongs to our dimensions (a size, a partition), by their dimensions; `fill` for `axis`."""
        entries = tuple(entries)
        theirs = list(entries if self.order is None else (entries[i] for i in np.argsort(self.order)))
        if self.axis is not None:
            theirs.insert(self.axis, fill)
        return tuple(theirs)


HEADS_FIRST = (0, 2, 1, 3)
"""(L, N, D, H) to (L, D, N, H)."""


def _vision() -> dict[str, Source]:
    block = IMG + "Transformer/encoderblock/"
    found = {
        "patches/kernel": Source(IMG + "embedding/kernel"),
        "patches/bias": Source(IMG + "embedding/bias"),
        "patches/positions": Source(IMG + "pos_embedding", axis=0),
        "head/norm_scale": Source(IMG + "Transformer/encoder_norm/scale"),
        "head/norm_bias": Source(IMG + "Transformer/encoder_norm/bias"),
        "head/kernel": Source(IMG + "head/kernel"),
        "head/bias": Source(IMG + "head/bias"),
    }
    for ours, theirs in (("norm1", "LayerNorm_0"), ("norm2", "LayerNorm_1")):
        found |= {f"blocks/{ours}_{part}": Source(f"{block}{theirs}/{part}") for part in ("scale", "bias")}
    dense = {"mlp_in": "MlpBlock_0/Dense_0", "mlp_out": "MlpBlock_0/Dense_1"}
    dense |= {name: f"MultiHeadDotProductAttention_0/{name}" for name in ("query", "key", "value", "out")}
    for ours, theirs in dense.items():
        found |= {f"blocks/{ours}": Source(f"{block}{theirs}/kernel"), f"blocks/{ours}_bias": Source(f"{block}{theirs}/bias")}
    return {f"vision/{path}": source for path, source in found.items()}


def _attention(suffix: str, shared: bool, lora: bool) -> dict[str, Source]:
    """Projections of one expert; `shared`: as many key-value heads as heads, for which openpi has one array of three."""
    attn = LLM + "layers/attn/"
    found = {}
    for part in ("weight", "lora_a", "lora_b") if lora else ("weight",):
        name = {"weight": "w"}.get(part, part)
        order = None if part == "lora_b" else HEADS_FIRST  # (L, N, R, H) is ours too
        q, kv, qkv = (f"{attn}{stem}{suffix}/{name}" for stem in ("q_einsum", "kv_einsum", "qkv_einsum"))
        found[f"query/{part}"] = Source(qkv, 1, 0, order) if shared else Source(q, order=order)
        for index, ours in enumerate(("key", "value")):
            found[f"{ours}/{part}"] = Source(qkv, 1, index + 1, order) if shared else Source(kv, 1, index, order)
        found[f"out/{part}"] = Source(f"{attn}attn_vec_einsum{suffix}/{name}")
    return found


def _expert(name: str, suffix: str, adaptive: bool, shared: bool, lora: bool) -> dict[str, Source]:
    layers = LLM + "layers/"
    found = {f"blocks/attention/{path}": source for path, source in _attention(suffix, shared, lora).items()}
    mlp = f"{layers}mlp{suffix}/"
    for part in ("weight", "lora_a", "lora_b") if lora else ("weight",):
        ending = "" if part == "weight" else f"_{part}"
        found |= {f"blocks/mlp/{x}/{part}": Source(f"{mlp}gating_einsum{ending}", 1, i) for i, x in enumerate(("gate", "up"))}
        found[f"blocks/mlp/down/{part}"] = Source(f"{mlp}linear{ending}")
    norms = {
        "blocks/attention_norm": f"{layers}pre_attention_norm{suffix}", "blocks/mlp_norm": f"{layers}pre_ffw_norm{suffix}",
        "final_norm": f"{LLM}final_norm{suffix}",
    }  # fmt: skip
    for ours, theirs in norms.items():
        parts = {"kernel": "Dense_0/kernel", "bias": "Dense_0/bias"} if adaptive else {"scale": "scale"}
        found |= {f"{ours}/{part}": Source(f"{theirs}/{their_part}") for part, their_part in parts.items()}
    return {f"llm/{name}/{path}": source for path, source in found.items()}


def sources(config: Pi0Config) -> dict[str, Source]:
    """For every parameter of the model, by its path: where openpi keeps it."""
    adaptive, shared = config.variant == "pi05", config.num_kv_heads == config.num_heads
    dense = {"action_in": "action_in_proj", "action_out": "action_out_proj"}
    if adaptive:
        dense |= {"time_in": "time_mlp_in", "time_out": "time_mlp_out"}
    else:
        dense |= {"state": "state_proj", "time_in": "action_time_mlp_in", "time_out": "action_time_mlp_out"}
    found = {f"{ours}/{part}": Source(f"{theirs}/{part}") for ours, theirs in dense.items() for part in ("kernel", "bias")}
    found |= _vision() | {"llm/tokens": Source(LLM + "embedder/input_embedding")}
    found |= _expert("backbone", "", False, shared, config.backbone.lora_rank > 0)
    found |= _expert("action", "_1", adaptive, shared, config.action_expert.lora_rank > 0)
    return dict(sorted(found.items()))


def by_source(config: Pi0Config) -> dict[str, dict[str, Source]]:
    """The same by openpi's path: which of ours come from it."""
    found: dict[str, dict[str, Source]] = {}
    for path, source in sources(config).items():
        found.setdefault(source.path, {})[path] = source
    return dict(sorted(found.items()))


def openpi_shapes(config: Pi0Config, ours: Shapes) -> dict[str, tuple[int, ...]]:
    """Shapes of openpi's tree for the shapes of our parameters."""
    return {
        theirs: next(iter(parts.values())).layout(ours[next(iter(parts))], len(parts))
        for theirs, parts in by_source(config).items()
    }


def to_ours(config: Pi0Config, theirs: Mapping[str, Array]) -> dict[str, Array]:
    """All of our parameters, by path."""
    return {path: source.take(theirs[source.path]) for path, source in sources(config).items()}


def to_openpi(config: Pi0Config, ours: Mapping[str, Array], xp=np) -> dict[str, Array]:
    """openpi's tree, by path; `xp` is numpy or jax.numpy."""
    found = {}
    for theirs, parts in by_source(config).items():
        arrays = [source.untake(ours[path]) for path, source in sorted(parts.items(), key=lambda item: item[1].index)]
        axis = next(iter(parts.values())).axis
        found[theirs] = arrays[0] if axis is None else xp.stack(arrays, axis=axis)
    return found


def without_value(paths: Iterable[str]) -> dict[str, str]:
    """openpi's trainer writes `.../kernel/value`, released trees `.../kernel`: the plain path of each."""
    paths = list(paths)
    ends = all(path.endswith("/value") for path in paths)
    return {path: path.removesuffix("/value") if ends else path for path in paths}


def detect(shapes: Shapes, **known) -> Pi0Config:
    """The model whose tree has these shapes; what no shape tells (cameras, horizon, ...) is the default or `known`.

    Raises UserError for a tree that is not of pi0 or pi0.5.
    """
    if not any(p in shapes for p in ("state_proj/kernel", "time_mlp_in/kernel")):
        what = "pi0-FAST or PaliGemma" if LLM + "embedder/input_embedding" in shapes else "no model known here"
        raise UserError(f"the tree has neither state_proj nor time_mlp_in, so it is not of pi0 or pi0.5 but of {what}.")
    try:
        return _detect(shapes, known)
    except (KeyError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"the tree is not whole: {error} is missing or has another number of dimensions.") from error


def _detect(shapes: Shapes, known: dict) -> Pi0Config:
    attn = LLM + "layers/attn/"
    if attn + "qkv_einsum/w" in shapes:
        layers, _, heads, _, head_dim = shapes[attn + "qkv_einsum/w"]
        kv_heads = heads
    else:
        layers, heads, _, head_dim = shapes[attn + "q_einsum/w"]
        kv_heads = shapes[attn + "kv_einsum/w"][2]

    def expert(suffix: str) -> ExpertConfig:
        mlp_dim, embed_dim = shapes[f"{LLM}layers/mlp{suffix}/linear"][1:]
        rank = shapes.get(f"{LLM}layers/mlp{suffix}/linear_lora_a", (0,))[-1]
        # No shape tells alpha; openpi's own variants have alpha = rank.
        return ExpertConfig(embed_dim, mlp_dim, rank, float(rank or 16))

    block = IMG + "Transformer/encoderblock/"
    vision_layers, _, vision_heads, _ = shapes[block + "MultiHeadDotProductAttention_0/query/kernel"]
    patch, _, _, vision_dim = shapes[IMG + "embedding/kernel"]
    side = round(shapes[IMG + "pos_embedding"][1] ** 0.5)
    sizes = {
        "variant": "pi0" if "state_proj/kernel" in shapes else "pi05",
        "vision": SiglipConfig(vision_dim, vision_layers, shapes[block + "MlpBlock_0/Dense_0/kernel"][2], vision_heads, patch),
        "backbone": expert(""), "action_expert": expert("_1"), "num_layers": layers, "num_heads": heads, "num_kv_heads": kv_heads,
        "head_dim": head_dim, "vocab_size": shapes[LLM + "embedder/input_embedding"][0], "action_dim": shapes["action_in_proj/kernel"][0],
        "image_size": (side * patch, side * patch),
    }  # fmt: skip
    return Pi0Config(**(sizes | known))

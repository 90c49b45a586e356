"""Normalisation of states and actions, and norm_stats.json, the file that openpi keeps its statistics in."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from sharder.config import UserError

Normalization = Literal["z_score", "quantile", "none"]
EPSILON = 1e-6
"""Added to the standard deviation, and to the range of the quantiles (openpi)."""
FIELDS = ("mean", "std", "q01", "q99")


@dataclass(frozen=True)
class NormStats:
    """Of one feature, float64 (dimensions,); q01 and q99 may be missing."""

    mean: np.ndarray
    std: np.ndarray
    q01: np.ndarray | None = None
    q99: np.ndarray | None = None

    def as_dict(self) -> dict:
        return {name: None if getattr(self, name) is None else getattr(self, name).tolist() for name in FIELDS}


def read_norm_stats(path: str | Path) -> dict[str, NormStats]:
    """Statistics by feature from norm_stats.json, or from a folder that holds it. Raises UserError naming the field."""
    path = Path(path)
    path = path / "norm_stats.json" if path.is_dir() else path
    try:
        tree = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing. `sharder data stats` writes it.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    features = tree.get("norm_stats") if isinstance(tree, dict) else None
    if not isinstance(features, dict) or not features:
        raise UserError(f"{path}, field norm_stats, is missing or empty.")
    return {name: _read_feature(f"{path}, field norm_stats.{name}", values) for name, values in features.items()}


def _read_feature(where: str, values: object) -> NormStats:
    found = {}
    for name in FIELDS:
        value = values.get(name) if isinstance(values, dict) else None
        if value is None and name in ("q01", "q99"):
            found[name] = None
            continue
        try:
            found[name] = np.array(value, np.float64)
        except (TypeError, ValueError):
            found[name] = np.empty(())
        if found[name].ndim != 1 or not np.isfinite(found[name]).all():
            raise UserError(f"{where}.{name}, is no list of finite numbers.")
    sizes = {len(x) for x in found.values() if x is not None}
    if len(sizes) != 1:
        raise UserError(f"{where}: mean, std, q01 and q99 have different lengths, {sorted(sizes)}.")
    return NormStats(**found)


def write_norm_stats(path: Path, stats: dict[str, NormStats]) -> None:
    """Writes `path`, or norm_stats.json in the folder `path`."""
    path = path if path.suffix == ".json" else path / "norm_stats.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"norm_stats": {name: s.as_dict() for name, s in stats.items()}}, indent=2))


def _offset_and_scale(stats: NormStats, how: Normalization, least_range: float) -> tuple[np.ndarray, np.ndarray]:
    """Normalised is (x - offset) / scale."""
    if how == "z_score":
        return stats.mean, stats.std + EPSILON
    if stats.q01 is None or stats.q99 is None:
        raise UserError(
            "quantile normalisation needs q01 and q99, which these statistics do not have. Use z_score, or compute them anew."
        )
    half = np.maximum(stats.q99 - stats.q01, least_range) + EPSILON
    if least_range:
        middle = (stats.q01 + stats.q99) / 2
        return np.where(stats.q99 - stats.q01 < least_range, middle, stats.q01 + half / 2), half / 2
    return stats.q01 + half / 2, half / 2


def normalize(
    x: np.ndarray, stats: NormStats, how: Normalization, clip: float | None = None, least_range: float = 0.0
) -> np.ndarray:
    """x (..., D) normalised, float32; statistics of more dimensions are cut, dimensions without statistics stay.

    z_score: (x - mean) / (std + 1e-6). quantile: (x - q01) / (q99 - q01 + 1e-6) * 2 - 1, where a range below `least_range`
    counts as that range around its middle. `clip`: largest absolute value.
    """
    if how == "none":
        return x.astype(np.float32)
    offset, scale = _offset_and_scale(stats, how, least_range)
    size = min(x.shape[-1], len(offset))
    found = x.astype(np.float64)
    found[..., :size] = (found[..., :size] - offset[:size]) / scale[:size]
    if clip is not None:
        found[..., :size] = np.clip(found[..., :size], -clip, clip)
    return found.astype(np.float32)


def unnormalize(x: np.ndarray, stats: NormStats, how: Normalization, least_range: float = 0.0) -> np.ndarray:
    """Inverse of `normalize` (but for clipping), float32."""
    if how == "none":
        return x.astype(np.float32)
    offset, scale = _offset_and_scale(stats, how, least_range)
    size = min(x.shape[-1], len(offset))
    found = x.astype(np.float64)
    found[..., :size] = found[..., :size] * scale[:size] + offset[:size]
    return found.astype(np.float32)

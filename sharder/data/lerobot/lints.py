"""What makes a dataset train badly although nothing about it is wrong.

Each finding has a kind, the feature, and a sentence with the numbers.
"""

import hashlib
from dataclasses import asdict, dataclass

import numpy as np

from sharder.data.lerobot.info import read_json, read_json_lines
from sharder.data.lerobot.source import LeRobotSource

EXPLODED = 20.0
"""Largest absolute value that quantile normalisation should give; in a dataset of ordinary shape it stays below 5."""


@dataclass(frozen=True)
class Lint:
    kind: str
    feature: str
    message: str

    def as_dict(self) -> dict:
        return asdict(self)


def lint(source: LeRobotSource, state: str | None, action: str | None) -> list[Lint]:
    """All findings, in the order of the features."""
    found = []
    for name in (state, action):
        if name is not None:
            found += lint_ranges(name, source.columns[name], dimension_names(source, name))
            found += lint_stored_range(source, name)
    if state is not None and action is not None:
        found += lint_delta_actions(source, state, action)
    return (
        found
        + lint_timestamps(source)
        + lint_duplicates(source, [n for n in (state, action) if n is not None])
        + lint_video_times(source)
    )


def dimension_names(source: LeRobotSource, feature: str) -> list[str]:
    names, size = source.info.features[feature].names, source.info.features[feature].size
    return [f"{d} ({names[d]})" for d in range(size)] if names and len(names) == size else [str(d) for d in range(size)]


def lint_ranges(feature: str, values: np.ndarray, names: list[str]) -> list[Lint]:
    """Dimensions that hardly move, and those that quantile normalisation would blow up."""
    found = []
    for d, name in enumerate(names):
        x = values[:, d].astype(np.float64)
        low, high = np.quantile(x, (0.01, 0.99))
        largest = np.abs((np.array([x.min(), x.max()]) - low) / (high - low + 1e-6) * 2 - 1).max()
        if x.std() <= 1e-4 * max(1.0, abs(x.mean())):
            found.append(
                Lint(
                    "near-constant",
                    feature,
                    f"dimension {name} hardly moves: standard deviation {x.std():.3g} around {x.mean():.6g}.",
                )
            )
        if largest > EXPLODED:
            found.append(
                Lint(
                    "exploding-quantiles", feature,
                    f"dimension {name}: 98 % of the values lie within {high - low:.3g} ({low:.6g} to {high:.6g}), so that quantile"
                    f" normalisation gives values up to {largest:.3g}. Use z-score normalisation, clip, or a least range for this dimension.",
                )
            )  # fmt: skip
    return found


def stored_range(source: LeRobotSource, feature: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Minimum and maximum (size,) that the dataset's own statistics give."""
    meta = source.info.root / "meta"
    rows = []
    if (meta / "stats.json").is_file():
        rows = [read_json(meta / "stats.json").get(feature)]
    elif (meta / "episodes_stats.jsonl").is_file():
        rows = [(row.get("stats") or {}).get(feature) for row in read_json_lines(meta / "episodes_stats.jsonl")]
    rows = [row for row in rows if isinstance(row, dict) and "min" in row and "max" in row]
    if not rows:
        return None
    size = source.info.features[feature].size
    low, high = (np.array([np.reshape(row[k], -1) for row in rows], np.float64) for k in ("min", "max"))
    return (low.min(0), high.max(0)) if low.shape[1] == size else None


def lint_stored_range(source: LeRobotSource, feature: str) -> list[Lint]:
    """Values outside of the range that the dataset's own statistics give: they are then statistics of other data."""
    bounds = stored_range(source, feature)
    if bounds is None:
        return []
    low, high = bounds
    slack = 1e-6 * np.maximum(1.0, np.abs(high - low))
    values = source.columns[feature]
    outside = (values < low - slack) | (values > high + slack)
    return [
        Lint(
            "out-of-range",
            feature,
            f"dimension {name}: {share:.2%} of the values lie outside of the stored range {low[d]:.6g} to {high[d]:.6g}.",
        )
        for d, (name, share) in enumerate(zip(dimension_names(source, feature), outside.mean(0)))
        if share > 0
    ]


def lint_delta_actions(source: LeRobotSource, state: str, action: str) -> list[Lint]:
    """Actions that follow the change of the state rather than the state itself."""
    s, a = (source.columns[n].astype(np.float64) for n in (state, action))
    inside = np.ones(len(s) - 1, bool)
    inside[source.starts[1:] - 1] = False
    change, after, act = np.diff(s, axis=0)[inside], s[1:][inside], a[:-1][inside]
    of_change, of_state = [], []
    for d in range(min(s.shape[1], a.shape[1])):
        if min(act[:, d].std(), change[:, d].std(), after[:, d].std()) > 1e-6:
            of_change.append(np.corrcoef(act[:, d], change[:, d])[0, 1])
            of_state.append(np.corrcoef(act[:, d], after[:, d])[0, 1])
    if not of_change or not (np.median(of_change) > 0.5 and np.median(of_change) > np.median(np.abs(of_state)) + 0.2):
        return []
    return [
        Lint(
            "delta-actions", action,
            f"actions look like changes already: their correlation with the change of {state} is {np.median(of_change):.2f}, with"
            f" {state} itself {np.median(of_state):.2f} (medians over {len(of_change)} dimensions). Do not make them relative once more.",
        )
    ]  # fmt: skip


def lint_timestamps(source: LeRobotSource) -> list[Lint]:
    """Timestamps that are more than half a frame away from frame_index / fps."""
    times, frames = source.columns["timestamp"].astype(np.float64), source.columns["frame_index"]
    # Real clocks may begin anywhere; what counts is the time since the episode's first frame.
    begin = np.repeat(times[source.starts], source.lengths)
    wrong = np.flatnonzero(np.abs(times - begin - frames / source.fps) > 0.5 / source.fps)
    if not wrong.size:
        return []
    e = int(source.episode_of(wrong[:1])[0])
    return [
        Lint(
            "timestamp-gaps", "timestamp",
            f"{wrong.size} of {source.num_frames} timestamps are more than half a frame away from frame_index / fps, the first in episode"
            f" {source.episodes.indices[e]}, frame {frames[wrong[0]]}: {times[wrong[0]]:.4f} s. Frames are found by their number all the same.",
        )
    ]  # fmt: skip


def lint_duplicates(source: LeRobotSource, names: list[str]) -> list[Lint]:
    """Episodes that have the same numbers throughout."""
    seen: dict[bytes, int] = {}
    pairs = []
    for e, (start, length) in enumerate(zip(source.starts.tolist(), source.lengths.tolist())):
        parts = [np.ascontiguousarray(source.columns[n][start : start + length]) for n in names]
        key = hashlib.sha256(b"".join(part.tobytes() for part in parts)).digest()
        if names and key in seen:
            pairs.append(f"{source.episodes.indices[e]} = {source.episodes.indices[seen[key]]}")
        seen.setdefault(key, e)
    if not pairs:
        return []
    more = f" and {len(pairs) - 5} more" if len(pairs) > 5 else ""
    return [
        Lint(
            "duplicated-episodes",
            "episode_index",
            f"{len(pairs)} episodes repeat an earlier one: {', '.join(pairs[:5])}{more}.",
        )
    ]


def lint_video_times(source: LeRobotSource) -> list[Lint]:
    """from_timestamp of a v3.0 dataset that has drifted away from where the frames are."""
    found = []
    for camera, files in source.episodes.videos.items():
        moved = np.flatnonzero(files.first_frame != source.first_frames(camera))
        if moved.size:
            found.append(
                Lint("video-drift", camera, f"from_timestamp of {moved.size} episodes is off by a frame or more, first in episode"
                     f" {source.episodes.indices[moved[0]]}; frames are found by the lengths of the episodes instead.")
            )  # fmt: skip
    return found

"""Examples for a robot policy from recorded episodes: pictures, state, prompt, and the chunk of actions that follows."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from sharder.config import UserError
from sharder.data.chunks import chunk_rows, chunk_weights, pad_last, relative_actions
from sharder.data.dataset import Batch
from sharder.data.frames import Wanted
from sharder.data.normalize import Normalization, NormStats, normalize
from sharder.data.pictures import Pictures
from sharder.data.robots import Robot
from sharder.data.statistics import Block, exact_statistics

STATISTICS_FRAMES = 4096
"""Frames of a block when statistics are computed; bounds the memory."""

EncodePrompts = Callable[[list[str], np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(prompts, normalised states (n, S)) to tokens int32 and mask bool, (n, L) both."""


class Source(Protocol):
    """Recorded episodes. Frames are numbered through all of them: frame t of episode e is starts[e] + t."""

    name: str
    num_frames: int
    cameras: tuple[str, ...]
    lengths: np.ndarray
    starts: np.ndarray
    columns: dict[str, np.ndarray]
    """Numbers, (frames, size)."""
    fingerprint: str

    def prompts(self, frames: np.ndarray) -> list[str]: ...

    def pictures(self, camera: str, frames: np.ndarray) -> list[tuple[np.ndarray, Wanted]]:
        """What to decode for frames (n,), file by file: (places in `frames`, what stands there)."""
        ...


@dataclass(frozen=True)
class Shapes:
    """What the model takes."""

    cameras: tuple[str, ...]
    height_width: tuple[int, int]
    action_dim: int
    """Of states and actions, filled up with zeros."""
    action_horizon: int


@dataclass(frozen=True)
class Scaling:
    """How states and actions are normalised."""

    stats: dict[str, NormStats]
    """Of `state` and `actions`."""
    how: Normalization
    clip: float | None = None
    least_range: float = 0.0

    def __call__(self, name: str, x: np.ndarray) -> np.ndarray:
        if self.how == "none":
            return x.astype(np.float32)
        if name not in self.stats:
            raise UserError(f"the statistics have no {name!r}, only {', '.join(self.stats)}.")
        return normalize(x, self.stats[name], self.how, self.clip, self.least_range)


@dataclass(frozen=True)
class Numbers:
    """States and chunks of actions in the policy's units, before normalisation. Pictures play no part."""

    source: Source
    robot: Robot
    horizon: int

    def check(self) -> "Numbers":
        """Raises UserError where a column or camera is missing, or a number is not finite."""
        keys = self.robot.dataset
        for name in (*keys.state, keys.action):
            if name not in self.source.columns:
                raise UserError(
                    f"{self.source.name} has no column {name!r}, only {', '.join(self.source.columns)}. Set --robot.state and --robot.action."
                )
            finite = np.isfinite(self.source.columns[name]).all(1)
            if not finite.all():
                frame = int(np.argmin(finite))
                e = int(np.searchsorted(self.source.starts, frame, side="right")) - 1
                raise UserError(
                    f"{self.source.name}, column {name}, frame {frame - self.source.starts[e]} of episode {e}, holds a number that is not finite."
                )
        for camera in keys.cameras.values():
            if camera not in self.source.cameras:
                raise UserError(
                    f"{self.source.name} has no camera {camera!r}, only {', '.join(self.source.cameras) or 'none'}. Set --robot.cameras."
                )
        if len(self.robot.relative) > min(
            self.state(np.zeros(1, np.int64)).shape[1], self.source.columns[keys.action].shape[1]
        ):
            raise UserError(
                f"--robot.relative names {len(self.robot.relative)} dimensions, more than {keys.action} or the state of {self.source.name} has."
            )
        return self

    def state(self, frames: np.ndarray) -> np.ndarray:
        """float32 (n, S)."""
        parts = [self.source.columns[name][frames] for name in self.robot.dataset.state]
        return self.robot.encode_state(np.concatenate(parts, axis=1).astype(np.float32))

    def actions(self, frames: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float32 (n, H, A), and which steps lie past the end of the episode, bool (n, H)."""
        rows, is_pad = chunk_rows(frames, self.horizon, self.source.starts, self.source.lengths)
        actions = self.robot.encode_actions(self.source.columns[self.robot.dataset.action][rows].astype(np.float32))
        return (relative_actions(actions, state, self.robot.relative) if any(self.robot.relative) else actions), is_pad

    def statistics(self, episodes: np.ndarray) -> dict[str, NormStats]:
        """Exact statistics of `state` and `actions` over all frames and chunks of these episodes, filled-up steps included."""
        lengths, starts = self.source.lengths[episodes], self.source.starts[episodes]
        frames = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
        blocks = [slice(at, at + STATISTICS_FRAMES) for at in range(0, len(frames), STATISTICS_FRAMES)]
        weights = chunk_weights(self.horizon, lengths)

        def states() -> Iterator[Block]:
            return ((self.state(frames[block]), None) for block in blocks)

        def actions() -> Iterator[Block]:
            for block in blocks:
                if any(self.robot.relative):
                    chunks, _ = self.actions(frames[block], self.state(frames[block]))
                    yield chunks.reshape(-1, chunks.shape[-1]), None
                else:  # a row's value does not depend on the chunk: it counts as often as it occurs
                    rows = self.source.columns[self.robot.dataset.action][frames[block]].astype(np.float32)
                    yield self.robot.encode_actions(rows), weights[block]

        return {"state": exact_statistics(states), "actions": exact_statistics(actions)}


class RobotDataset:
    """Some frames of a source as examples: the batch that `sharder.models.pi0` describes."""

    def __init__(
        self, numbers: Numbers, frames: np.ndarray, shapes: Shapes, scaling: Scaling, pictures: Pictures,
        encode_prompts: EncodePrompts, prompt: str | None = None, name_of_prompts: str = "",
    ):  # fmt: skip
        """`frames`: those that are examples; `prompt`: in place of the tasks. Raises UserError where the model is too small."""
        self.numbers, self.frames, self.shapes, self.scaling = numbers, frames, shapes, scaling
        self.pictures, self.encode_prompts, self.prompt, self.name_of_prompts = (
            pictures,
            encode_prompts,
            prompt,
            name_of_prompts,
        )
        first = frames[:1]
        self.state_dim = numbers.state(first).shape[1]
        self.num_actions = numbers.source.columns[numbers.robot.dataset.action].shape[1]
        largest = max(self.state_dim, self.num_actions)
        if largest > shapes.action_dim:
            raise UserError(
                f"{numbers.source.name} has states of {self.state_dim} and actions of {self.num_actions} numbers, but --model.action-dim"
                f" is {shapes.action_dim}. Raise it to {largest} or more."
            )
        what = (
            numbers.source.fingerprint,
            hashlib.sha256(frames.astype("<i8").tobytes()).hexdigest(),
            replace_functions(numbers.robot),
        )
        stats = {name: s.as_dict() for name, s in sorted(scaling.stats.items())}
        what += (shapes, stats, scaling.how, scaling.clip, scaling.least_range, prompt, name_of_prompts)
        self.fingerprint = hashlib.sha256(repr(("robot 1", *what)).encode()).hexdigest()

    @property
    def norm_stats(self) -> dict[str, NormStats]:
        """What a policy that is trained on this needs to be used."""
        return self.scaling.stats

    def with_frames(self, frames: np.ndarray) -> "RobotDataset":
        """The same, over other frames."""
        return RobotDataset(
            self.numbers, frames, self.shapes, self.scaling, self.pictures, self.encode_prompts, self.prompt, self.name_of_prompts
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.frames)

    def read(self, ids: np.ndarray) -> Batch:
        """`image/<camera>` uint8 (n, height, width, 3) and `image_mask/<camera>` (n,), `tokens` and `token_mask` (n, L), `state` (n, A),
        `actions` (n, H, A), `action_is_pad` (n, H), `action_dim_mask` (n, A).

        Raises UserError where a picture cannot be decoded.
        """
        frames, size = self.frames[ids], self.shapes.action_dim
        state = self.numbers.state(frames)
        actions, is_pad = self.numbers.actions(frames, state)
        state, actions = self.scaling("state", state), self.scaling("actions", actions)
        source = self.numbers.source
        prompts = [self.prompt] * len(frames) if self.prompt is not None else source.prompts(frames)
        tokens, token_mask = self.encode_prompts(prompts, state)
        batch = self._read_pictures(frames)
        batch |= {
            "tokens": tokens,
            "token_mask": token_mask,
            "state": pad_last(state, size),
            "actions": pad_last(actions, size),
        }
        batch["action_is_pad"] = is_pad
        batch["action_dim_mask"] = np.broadcast_to(np.arange(size) < self.num_actions, (len(frames), size)).copy()
        return batch

    def _read_pictures(self, frames: np.ndarray) -> Batch:
        source, jobs, owners, batch = self.numbers.source, [], [], {}
        for camera in self.shapes.cameras:
            key = self.numbers.robot.dataset.cameras.get(camera)
            batch[f"image_mask/{camera}"] = np.full(len(frames), key is not None)
            batch[f"image/{camera}"] = np.zeros((len(frames), *self.shapes.height_width, 3), np.uint8)
            for places, wanted in source.pictures(key, frames) if key is not None else ():
                jobs.append(wanted)
                owners.append((camera, places))
        for (camera, places), pictures in zip(owners, self.pictures.read(jobs)):
            batch[f"image/{camera}"][places] = pictures
        return batch

    def close(self) -> None:
        self.pictures.close()


def replace_functions(robot: Robot) -> Robot:
    """The robot with its functions named, so that its text is the same in every process."""
    names = {
        name: getattr(getattr(robot, name), "__qualname__", "?")
        for name in ("encode_state", "encode_actions", "decode_actions")
    }
    return replace(robot, **names)


def held_out_episodes(indices: np.ndarray, fraction: float) -> np.ndarray:
    """Which of these episodes (n,) are for validation, bool: those whose number has the smallest hash, at least one and not all.

    The number of an episode decides, so that more episodes move few of the old ones across.
    """
    if fraction == 0 or len(indices) < 2:
        return np.zeros(len(indices), bool)
    count = min(len(indices) - 1, max(1, round(fraction * len(indices))))
    keys = [hashlib.sha256(f"episode {index}".encode()).digest() for index in indices.tolist()]
    chosen = sorted(range(len(keys)), key=keys.__getitem__)[:count]
    found = np.zeros(len(indices), bool)
    found[chosen] = True
    return found


def frames_of(source: Source, episodes: np.ndarray) -> np.ndarray:
    """All frames of these episodes, int64."""
    return np.concatenate(
        [np.arange(s, s + n) for s, n in zip(source.starts[episodes], source.lengths[episodes])] or [np.zeros(0, np.int64)]
    )

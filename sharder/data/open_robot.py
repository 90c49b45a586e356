"""From a run's configuration to examples for a robot policy: which dataset, which robot, which statistics, which episodes."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from sharder.agreement import decide
from sharder.config import DataConfig, MixturePart, Pi0Config, RobotConfig, RunConfig, UserError
from sharder.data.chunks import expand_mask
from sharder.data.lerobot.source import CHECKED_VIDEOS, open_lerobot
from sharder.data.mixture import Mixture
from sharder.data.normalize import NormStats, read_norm_stats
from sharder.data.pictures import Pictures, default_workers
from sharder.data.prompts import PromptEncoder, open_prompt_tokenizer
from sharder.data.rlds.source import is_rlds, open_rlds
from sharder.data.robot_dataset import Numbers, RobotDataset, Scaling, Shapes, Source, frames_of, held_out_episodes
from sharder.data.robots import Keys, Robot, generic, known

STATE_NAMES = ("observation.state", "state", "observation/state", "observation/proprio")
ACTION_NAMES = ("action", "actions")
HUB = "hf://"
STATISTICS_TIMEOUT_S = 3600
"""How long the other processes wait for the statistics that process 0 computes."""


def open_robot(config: RunConfig) -> tuple[RobotDataset | Mixture, RobotDataset | Mixture | None]:
    """Training examples, and those of the held-out episodes; None where nothing is held out. Raises UserError."""
    data, model = config.data, config.model
    assert isinstance(model, Pi0Config) and (data.path or data.mixture)
    if data.path and data.mixture:
        raise UserError(
            f"--data.path is {data.path}, but the recipe has a mixture of {len(data.mixture)} datasets: give one of them."
        )
    shapes = Shapes(model.cameras, tuple(model.image_size), model.action_dim, model.action_horizon)
    prompts = PromptEncoder(
        open_prompt_tokenizer(data.tokenizer, model.vocab_size), model.variant == "pi05", model.max_prompt_len, model.vocab_size
    )
    workers = default_workers() if data.workers is None else data.workers
    pictures = Pictures(shapes.height_width, workers, data.cache_mb << 20)
    parts = data.mixture or (MixturePart(data.path, source=data.source, robot=config.robot),)
    opened = [open_part(part, data, shapes, prompts, pictures, model.variant) for part in parts]
    if not data.mixture:
        return opened[0]
    weights = [part.weight for part in parts]
    held_out = [(v, w) for (_, v), w in zip(opened, weights) if v is not None]
    validation = Mixture([v for v, _ in held_out], [w for _, w in held_out]) if held_out else None
    return Mixture([t for t, _ in opened], weights), validation


def open_part(
    part: MixturePart, data: DataConfig, shapes: Shapes, prompts: PromptEncoder, pictures: Pictures, variant: str
) -> tuple[RobotDataset, RobotDataset | None]:
    """One dataset, divided by episodes."""
    source = open_source(part.path, part.source)
    numbers = Numbers(source, make_robot(part.robot, source, shapes.cameras), shapes.action_horizon).check()
    chosen = choose_episodes(part.robot.episodes, source)
    scaling = make_scaling(part.robot, numbers, chosen, variant)
    held_out = held_out_episodes(chosen, data.validation_fraction)
    warn_of_cut_prompts(source, prompts, part.robot.prompt, numbers.state(np.zeros(1, np.int64)).shape[1])

    def dataset(episodes: np.ndarray) -> RobotDataset:
        return RobotDataset(
            numbers, frames_of(source, episodes), shapes, scaling, pictures, prompts, part.robot.prompt, prompts.name
        )

    return dataset(chosen[~held_out]), dataset(chosen[held_out]) if held_out.any() else None


def open_source(path: str, kind: str = "auto", check_pictures: bool = True) -> Source:
    """A LeRobot dataset or RLDS shards; auto: by what lies there. Raises UserError, also for videos that are too short."""
    folder = download(path) if path.startswith(HUB) else Path(path).expanduser()
    if kind in ("auto", "synthetic"):
        if not folder.is_dir():
            raise UserError(f"--data.path {path}: there is no folder {folder}.")
        kind = "lerobot" if (folder / "meta").is_dir() else "rlds" if is_rlds(folder) else ""
    if kind == "lerobot":
        return open_lerobot(folder, check_videos=CHECKED_VIDEOS if check_pictures else 0)
    if kind == "rlds":
        return open_rlds(folder)
    raise UserError(f"--data.path {path} is neither a LeRobot dataset (meta/info.json) nor RLDS (*-train.tfrecord-*).")


def download(path: str) -> Path:
    """Where the hub's client keeps the dataset of hf://OWNER/NAME, after fetching what is new. Raises UserError."""
    name = path.removeprefix(HUB)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"--data.path {path} is no name of a dataset: hf://OWNER/NAME.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"--data.path {path} is on a hub, whose client is not installed: install sharder-jax[hub], or give a local folder."
        ) from None
    try:
        return Path(snapshot_download(name, repo_type="dataset"))
    except Exception as error:
        raise UserError(
            f"--data.path {path} cannot be downloaded: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from None


def make_robot(config: RobotConfig, source: Source, model_cameras: tuple[str, ...]) -> Robot:
    """The robot that the configuration names, with the keys that it gives in place of the robot's own."""
    if config.policy == "generic":
        state = config.state or tuple(n for n in STATE_NAMES if n in source.columns)[:1]
        action = config.action or next((n for n in ACTION_NAMES if n in source.columns), None)
        if not state or action is None:
            have, what = ", ".join(source.columns), "--robot.action" if state else "--robot.state"
            raise UserError(f"{source.name} has none of the usual names for {what}; set it to one of {have}.")
        robot = generic(source.cameras, state, action, model_cameras)
    else:
        robot = known(config.policy, config.adapt_to_pi)
    keys = robot.dataset
    cameras = dict(entry.split("=", 1) for entry in config.cameras) or {
        k: v for k, v in keys.cameras.items() if v in source.cameras
    }
    unknown = sorted(set(cameras) - set(model_cameras))
    if unknown and config.cameras:
        raise UserError(f"--robot.cameras names {unknown[0]!r}, but --model.cameras are {', '.join(model_cameras)}.")
    left_out = [c for c in source.cameras if c not in cameras.values()]
    if left_out:
        note(
            f"{source.name}: no place for {', '.join(left_out)}; the model sees {', '.join(f'{k}={v}' for k, v in cameras.items()) or 'nothing'}"
        )
    keys = Keys(cameras, config.state or keys.state, config.action or keys.action)
    relative = robot.relative if config.relative is None else expand_mask(config.relative)
    # A place that was masked in training stays masked when the policy is used.
    asked = {place: robot.request.cameras.get(place, name) for place, name in cameras.items()}
    request = keys if config.policy == "generic" else replace(robot.request, cameras=asked)
    return replace(robot, dataset=keys, request=request, relative=relative)


def make_scaling(config: RobotConfig, numbers: Numbers, episodes: np.ndarray, variant: str) -> Scaling:
    """Statistics from a file, or over these episodes; process 0 computes for all, so that all have the same bits."""
    how = {"pi0": "z_score", "pi05": "quantile"}[variant] if config.normalization == "auto" else config.normalization
    if config.norm_stats is not None:
        stats = read_norm_stats(config.norm_stats)
    elif how == "none":
        stats = {}
    else:

        def compute() -> dict:
            return {name: s.as_dict() for name, s in numbers.statistics(episodes).items()}

        found = decide(compute, STATISTICS_TIMEOUT_S)
        stats = {
            name: NormStats(**{k: None if v is None else np.array(v, np.float64) for k, v in s.items()})
            for name, s in found.items()
        }
    return Scaling(stats, how, config.clip, config.least_range)


def choose_episodes(text: str | None, source: Source) -> np.ndarray:
    """Places of the chosen episodes, int64, ascending: `0:100,205` is 0 to 99 and 205. Raises UserError."""
    count = len(source.lengths)
    if text is None:
        return np.arange(count)
    chosen = set()
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", piece)
        first, stop = (int(match[1]), int(match[2]) if match[2] else int(match[1]) + 1) if match else (0, 0)
        if not first < stop <= count:
            raise UserError(
                f"--robot.episodes {text!r}: {piece.strip()!r} is no range of episodes 0 to {count - 1} of {source.name}; write 0:100,205."
            )
        chosen |= set(range(first, stop))
    return np.array(sorted(chosen), np.int64)


def warn_of_cut_prompts(source: Source, prompts: PromptEncoder, prompt: str | None, state_dim: int) -> None:
    texts = {prompt} if prompt is not None else set(source.prompts(source.starts))
    longest = max((prompts.num_tokens(text, state_dim) for text in texts), default=0)
    if longest > prompts.length:
        note(f"{source.name}: prompts of up to {longest} tokens are cut to --model.max-prompt-len {prompts.length}")


def note(text: str) -> None:
    """To standard error, by process 0."""
    import jax

    if jax.process_index() == 0:
        print(f"note: {text}", file=sys.stderr, flush=True)

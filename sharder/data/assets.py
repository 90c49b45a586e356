"""What a robot policy needs beside its weights: norm_stats.json, as openpi has it, and robot.json, how to ask it."""

import json
import shutil
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path

from sharder.config import UserError
from sharder.data.chunks import expand_mask
from sharder.data.lerobot.info import SCENE
from sharder.data.lerobot.source import LeRobotSource
from sharder.data.mixture import Mixture
from sharder.data.normalize import Normalization, write_norm_stats
from sharder.data.robot_dataset import RobotDataset
from sharder.data.robots import Keys, Robot, known, same
from sharder.data_config import RobotPolicy
from sharder.fields import check_fields

ROBOT, STATS = "robot.json", "norm_stats.json"


@dataclass(frozen=True)
class Usage:
    """How a policy is asked: robot.json."""

    policy: RobotPolicy = "generic"
    cameras: tuple[str, ...] = ()
    """MODEL=REQUEST for each camera."""
    state: tuple[str, ...] = ("state",)
    """Keys in a request whose numbers, one after the other, are the state."""
    relative: tuple[int, ...] = ()
    """Lengths of stretches of actions that the policy gives relative to the state, negative where it does not."""
    adapt_to_pi: bool = True
    normalization: Normalization = "none"
    clip: float | None = None
    least_range: float = 0.0
    prompt: str | None = None
    """Where a request has none."""
    state_dim: int | None = None
    """Numbers of a state; None: not known."""
    num_actions: int | None = None
    """Numbers of an action; None: as many as the statistics have."""
    model_cameras: tuple[str, ...] | None = None
    """In the order in which the model sees them; like the next two, no shape of its weights tells."""
    action_horizon: int | None = None
    max_prompt_len: int | None = None

    def __post_init__(self):
        check_fields(self, ROBOT)

    def robot(self) -> Robot:
        """As a server asks it; nothing is known of a dataset."""
        cameras = dict(entry.split("=", 1) for entry in self.cameras)
        keys = Keys(cameras, self.state, "actions")
        robot = Robot("generic", keys, keys) if self.policy == "generic" else known(self.policy, self.adapt_to_pi)
        return replace(robot, request=keys, relative=expand_mask(self.relative))


def compress_mask(mask: tuple[bool, ...]) -> tuple[int, ...]:
    """Inverse of `expand_mask`."""
    stretches = [(value, len(list(group))) for value, group in groupby(mask)]
    return tuple(length if value else -length for value, length in stretches)


def usual_names(policy: RobotPolicy, model_cameras: tuple[str, ...]) -> dict[str, tuple]:
    """Fields of a Usage as requests to a robot have them; generic: the model's own cameras, and `state`."""
    if policy == "generic":
        return {"cameras": tuple(f"{place}={place}" for place in model_cameras), "state": ("state",), "relative": ()}
    robot = known(policy)
    cameras = tuple(f"{place}={key}" for place, key in robot.request.cameras.items() if place in model_cameras)
    return {"cameras": cameras, "state": robot.request.state, "relative": compress_mask(robot.relative)}


def usage_of(dataset: RobotDataset) -> Usage:
    """How a policy that is trained on this is asked."""
    numbers, scaling = dataset.numbers, dataset.scaling
    robot = numbers.robot
    tasks = set(numbers.source.prompts(numbers.source.starts))
    return Usage(
        policy=robot.name, cameras=tuple(f"{place}={name}" for place, name in robot.request.cameras.items()), state=robot.request.state,
        relative=compress_mask(robot.relative), adapt_to_pi=robot.encode_state is not same, normalization=scaling.how, clip=scaling.clip,
        least_range=scaling.least_range, prompt=dataset.prompt if dataset.prompt is not None else tasks.pop() if len(tasks) == 1 else None,
        state_dim=dataset.state_dim, num_actions=dataset.num_actions, model_cameras=dataset.shapes.cameras,
        action_horizon=dataset.shapes.action_horizon, max_prompt_len=dataset.encode_prompts.length,
    )  # fmt: skip


def write_assets(folder: Path, training: RobotDataset | Mixture) -> None:
    """The files of a dataset, or of every part of a mixture in a folder of its number."""
    parts = training.parts if isinstance(training, Mixture) else (training,)
    for number, part in enumerate(parts):
        own = folder / str(number) if isinstance(training, Mixture) else folder
        if part.norm_stats:
            write_norm_stats(own, part.norm_stats)
        own.mkdir(parents=True, exist_ok=True)
        (own / ROBOT).write_text(json.dumps(asdict(usage_of(part)), indent=2))
        source = part.numbers.source
        if isinstance(source, LeRobotSource) and (scene := source.info.root / "meta" / SCENE).is_file():
            shutil.copy(scene, own)


def read_usage(folder: Path) -> Usage | None:
    """None where there is no robot.json. Raises UserError where it cannot be read."""
    path = folder / ROBOT
    try:
        values = json.loads(path.read_text())
        unknown = sorted(set(values) - {f.name for f in fields(Usage)})
        if unknown:
            raise UserError(f"it has {unknown[0]!r}, which this version does not know")
        return Usage(**values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None


def assets_beside(path: Path) -> Path | None:
    """The folder `assets` of a run, of weights (or beside their file), or of a checkpoint's run; None where there is none."""
    path = path.resolve()
    path = path.parent if path.is_file() else path
    places = [
        path,
        *([path.parents[1]] if path.parent.name == "checkpoints" else []),
        *([path.parent] if path.name == "params" else []),
    ]
    return next((place / "assets" for place in places if (place / "assets").is_dir()), None)


def find_assets(root: Path) -> Path | None:
    """The one folder at or below `root` that holds assets; None where there is none. Raises UserError where there are several."""
    found = sorted({path.parent for name in (ROBOT, STATS) for path in root.rglob(name)})
    if len(found) > 1:
        raise UserError(
            f"{root} holds the statistics of several robots: choose one of {', '.join(map(str, found))} with --assets."
        )
    return found[0] if found else None


def carry_assets(path: Path, out: Path, asset_id: str | None = None) -> None:
    """Copies what lies with the weights at `path` to `out`/assets, or to `out`/assets/`asset_id`. Raises UserError as `find_assets`."""
    root = assets_beside(path)
    if root is None:
        return
    if asset_id is None:
        shutil.copytree(root, out / "assets")
    elif (found := find_assets(root)) is not None:
        shutil.copytree(found, out / "assets" / asset_id)

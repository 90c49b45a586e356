"""The command line of `sharder data`: parses, calls, prints."""

import json
from pathlib import Path
from typing import Annotated

import tyro

from sharder.config import UserError
from sharder.options import parse


def inspect(arguments: list[str]) -> int:
    """Show what is in a LeRobot dataset, and what could make it train badly."""

    def command(
        path: tyro.conf.Positional[str],
        frames: str = "",
        chunk: int = 10,
        sheet: Path | None = None,
        json: Annotated[bool, tyro.conf.arg(name="json")] = False,  # noqa: A002
    ) -> tuple:
        """
        Args:
            path: Folder of the dataset, or hf://OWNER/NAME.
            frames: Frames to show in full, by number: 0,25,416.
            chunk: Steps of the chunk of actions that is shown with a frame.
            sheet: PNG for a sheet of pictures; unset: NAME-sheet.png here, and none with --json.
            json: Print JSON, and nothing else.
        """
        return path, frames, chunk, sheet, json

    path, frames, chunk, sheet, as_json = parse(
        command, args=arguments, prog="sharder data inspect", description=inspect.__doc__
    )
    if chunk < 1:
        raise UserError(f"--chunk is {chunk}, but must be at least 1.")
    from sharder.data.lerobot.inspect import contact_sheet, describe
    from sharder.data.lerobot.source import open_lerobot

    if path.startswith("hf://"):
        from sharder.data.open_robot import download

        path = download(path)
    source = open_lerobot(path, check_videos=None)
    found = describe(source, parse_frames(frames), chunk)
    if sheet is None and not as_json:
        sheet = Path(f"{Path(path).resolve().name}-sheet.png")
    if sheet is not None and source.cameras:
        contact_sheet(source, sheet)
    if as_json:
        print(json.dumps(found))
        return 0
    from sharder.data.show import show

    show(found, sheet if source.cameras else None)
    return 0


def stats(arguments: list[str]) -> int:
    """Compute the statistics of states and actions, exactly and without decoding video, and write norm_stats.json."""
    from sharder.config import RobotConfig

    def command(
        path: tyro.conf.Positional[str],
        horizon: int = 50,
        out: Path | None = None,
        compare: Path | None = None,
        json: Annotated[bool, tyro.conf.arg(name="json")] = False,  # noqa: A002
        robot: RobotConfig = RobotConfig(),
    ) -> tuple:
        """
        Args:
            path: Folder of a LeRobot dataset or of RLDS shards, or hf://OWNER/NAME.
            horizon: Steps of a chunk of actions, as --model.action-horizon.
            out: Folder or file for norm_stats.json; unset: nothing is written.
            compare: norm_stats.json of a checkpoint, to be told how this dataset differs.
            json: Print JSON, and nothing else.
        """
        return path, horizon, out, compare, json, robot

    path, horizon, out, compare, as_json, robot = parse(
        command, args=arguments, prog="sharder data stats", description=stats.__doc__
    )
    if horizon < 1:
        raise UserError(f"--horizon is {horizon}, but must be at least 1.")
    from sharder.data.compare_stats import compare_stats
    from sharder.data.normalize import read_norm_stats, write_norm_stats
    from sharder.data.open_robot import choose_episodes, make_robot, open_source
    from sharder.data.robot_dataset import Numbers
    from sharder.data.robots import MODEL_CAMERAS

    source = open_source(path, check_pictures=False)
    numbers = Numbers(source, make_robot(robot, source, MODEL_CAMERAS), horizon).check()
    found = numbers.statistics(choose_episodes(robot.episodes, source))
    findings = [] if compare is None else compare_stats(found, read_norm_stats(compare))
    if out is not None:
        write_norm_stats(out, found)
    if as_json:
        print(json.dumps({"norm_stats": {n: s.as_dict() for n, s in found.items()}, "findings": findings}))
        return 0
    from sharder.data.show import show_stats

    show_stats(f"{path}: {source.num_frames} frames, chunks of {horizon}", found, findings)
    return 0


def parse_frames(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UserError(f"--frames is {text!r}, but must be numbers with commas between, as 0,25,416.") from None


COMMANDS = {"inspect": inspect, "stats": stats}


def data(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in COMMANDS:
        rows = "\n".join(f"  {name:9} {command.__doc__}" for name, command in COMMANDS.items())
        if arguments and arguments[0] in ("-h", "--help"):
            print(f"usage: sharder data COMMAND ...\n\n{rows}")
            return 0
        raise UserError(f"sharder data needs one of {', '.join(COMMANDS)}:\n{rows}")
    return COMMANDS[arguments[0]](arguments[1:])

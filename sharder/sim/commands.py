"""The command lines of recording and of evaluation in closed loop: parse, call, print."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sharder.config import ClusterConfig, ParallelConfig, UserError, require
from sharder.options import parse
from sharder.serve.options import ModelOptions, RobotOptions, SamplingOptions
from sharder.sim.options import Trials
from sharder.sim.record import Recording

SIMULATORS = ("metaworld",)


def record(arguments: list[str]) -> int:
    """Record demonstrations of scripted experts in a simulator, as a LeRobot dataset."""
    if not arguments or arguments[0] not in (*SIMULATORS, "-h", "--help"):
        raise UserError(f"sharder data record needs the name of a simulator: {', '.join(SIMULATORS)}.")

    def command(
        out: Path, tasks: str = "reach-v3", recording: Annotated[Recording, tyro.conf.arg(name="")] = Recording()
    ) -> tuple:
        """
        Args:
            out: Folder of the new dataset.
            tasks: Tasks with commas between, as reach-v3,push-v3.
        """
        return out, tasks, recording

    rest = arguments[1:] if arguments[0] in SIMULATORS else arguments
    out, tasks, recording = parse(command, args=rest, prog="sharder data record metaworld", description=record.__doc__)
    from sharder.sim.record import record as run

    run(dataclasses.replace(recording, tasks=split_tasks(tasks)), out)
    return 0


def split_tasks(tasks: str) -> tuple[str, ...]:
    return tuple(t.strip() for t in tasks.split(",") if t.strip())


def evaluate(arguments: list[str]) -> int:
    """Let a policy do tasks in a simulator, and print how often it succeeds."""

    def command(
        run: tyro.conf.Positional[Path],
        sim: Literal["metaworld"],
        tasks: str = "reach-v3",
        step: int | None = None,
        assets: Path | None = None,
        trials: Annotated[Trials, tyro.conf.arg(name="")] = Trials(),
        as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
        sampling: SamplingOptions = SamplingOptions(),
        model: ModelOptions = ModelOptions(),
        robot: RobotOptions = RobotOptions(),
        tokenizer: Annotated[str | None, tyro.conf.arg(name="data.tokenizer")] = None,
        # One device, however the run was trained.
        parallel: ParallelConfig = ParallelConfig(policy="dp"),
        cluster: ClusterConfig = ClusterConfig(),
    ) -> tuple:
        """
        Args:
            run: A run, one of its checkpoints, imported weights, or a checkpoint of openpi, as sharder serve takes it.
            sim: The simulator.
            tasks: Tasks with commas between, as reach-v3,push-v3.
            step: Checkpoint of a run; unset: the latest.
            assets: Folder with norm_stats.json (and robot.json); unset: that of the run or checkpoint.
            as_json: Print the result as JSON.
            tokenizer: tokenizer.json or .model of the prompts; unset: the run's own, else as in training.
            parallel: How devices share the work; unset degrees are 1.
        """
        return (
            (run, step, assets),
            (split_tasks(tasks), trials, as_json),
            (model, robot, sampling, parallel, tokenizer),
            cluster,
        )

    parsed = parse(command, args=arguments, prog="sharder eval", description=evaluate.__doc__)
    where, (tasks, trials, as_json), how, cluster_config = parsed
    require(len(tasks) >= 1, "tasks", "", "one or more names, as reach-v3")
    from sharder import cluster
    from sharder.serve.opening import find, open_policy
    from sharder.sim import metaworld
    from sharder.sim.evaluate import evaluate_policy
    from sharder.sim.moving_picture import write_gif

    found, say = find(*where), (lambda line: None) if as_json else (lambda line: print(line, flush=True))
    scene = trials.scene(metaworld.read_scene(found.assets))
    for task in tasks:  # says what is missing before weights are read
        metaworld.open_world(task, scene)[0].close()
    cluster.initialize(cluster_config)
    told, episodes = evaluate_policy(open_policy(found, *how), tasks, trials, scene, say)
    video = trials.video or (where[0] / "figures" / "closed_loop.gif" if (where[0] / "config.json").is_file() else None)
    told |= {"policy": found.name, "video": str(video) if video and episodes else None}
    if told["video"]:
        write_gif(video, episodes)
    if as_json:
        print(json.dumps(told))
    else:
        shown, gif = "black pictures" if trials.blank_images else "pictures", told["video"] or "no GIF"
        print(f"{found.name}: {shown} after every {told['replan_every']} of {told['action_horizon']} actions; {gif}")
    return 0

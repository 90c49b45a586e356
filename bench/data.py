"""Reading robot data: frames a second in order and at random, statistics, memory, and the time that a step waits.

Prints one JSON line for each figure. The dataset is made on the spot: two cameras, AV1, a key frame every second frame. With
--oracle PYTHON, an interpreter that has LeRobot's own reader (lerobot, or the package lerobot-dataset) and torch, the same frames
are read by that as well, in the same run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import numpy as np

CAMERAS = {"observation.images.front": (96, 128), "observation.images.wrist": (96, 128)}
ORACLE = """
import json, sys, time
import numpy as np
try:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
except ImportError:
    from ledataset.datasets.lerobot_dataset import LeRobotDataset
root, ids = sys.argv[1], json.loads(sys.argv[2])
dataset = LeRobotDataset("local/bench", root=root, **json.loads(sys.argv[3]))
dataset[0]
began = time.perf_counter()
for i in ids:
    dataset[i]
print(json.dumps(len(ids) / (time.perf_counter() - began)))
"""


def make_dataset(root: Path, num_episodes: int, length: int) -> None:
    from sharder.data.lerobot.write import DatasetWriter, Encoding

    rng = np.random.default_rng(0)
    features = {"observation.state": [f"s{i}" for i in range(14)], "action": [f"a{i}" for i in range(14)]}
    writer = DatasetWriter(root, 30, features, CAMERAS, encoding=Encoding("libsvtav1"))
    for e in range(num_episodes):
        t, y, x = np.ogrid[:length, :96, :128]
        base = np.sin((x + 2 * t + 9 * e) / 17) + np.cos((y - t) / 11)
        frames = np.stack([base, -base, base * np.sin(t / 9)], -1)
        frames = ((frames + 2) * 63 + rng.integers(0, 9, frames.shape)).astype(np.uint8)
        numbers = {n: rng.standard_normal((length, 14)).astype(np.float32) for n in features}
        writer.add_episode(numbers, {c: frames for c in CAMERAS}, "do it")
    writer.close()


def open_dataset(root: Path, num_workers: int, cache_bytes: int = 0, size=(96, 128)):
    from sharder.data.lerobot.source import open_lerobot
    from sharder.data.pictures import Pictures
    from sharder.data.robot_dataset import Numbers, RobotDataset, Scaling, Shapes, frames_of
    from sharder.data.robots import generic

    source = open_lerobot(root)
    shapes = Shapes(("base_0_rgb", "left_wrist_0_rgb"), size, 14, 50)
    numbers = Numbers(source, generic(source.cameras, ("observation.state",), "action", shapes.cameras), 50)
    no_prompts = lambda prompts, states: (np.zeros((len(prompts), 1), np.int32), np.ones((len(prompts), 1), bool))  # noqa: E731
    everything = frames_of(source, np.arange(len(source.lengths)))
    return RobotDataset(numbers, everything, shapes, Scaling({}, "none"), Pictures(size, num_workers, cache_bytes), no_prompts)


def examples_per_s(dataset, ids: np.ndarray, batch: int = 32) -> float:
    dataset.read(ids[:batch])  # opens the files
    began = time.perf_counter()
    for at in range(0, len(ids), batch):
        dataset.read(ids[at : at + batch])
    return len(ids) / (time.perf_counter() - began)


def oracle_per_s(python: str, root: Path, ids: np.ndarray, options: dict) -> float:
    command = [python, "-c", ORACLE, str(root), json.dumps(ids.tolist()), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise RuntimeError(f"the other reader ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def statistics_seconds(folder: Path, num_frames: int, relative: bool) -> float:
    """From parquet files on the disk to statistics of states and chunks of 50 actions, 14 dimensions each."""
    import dataclasses

    from sharder.data.lerobot.source import open_lerobot
    from sharder.data.robot_dataset import Numbers
    from sharder.data.robots import expand_mask, generic

    began = time.perf_counter()
    source = open_lerobot(folder)
    robot = generic((), ("observation.state",), "action")
    if relative:
        robot = dataclasses.replace(robot, relative=expand_mask((6, -1, 6, -1)))
    Numbers(source, robot, 50).check().statistics(np.arange(len(source.lengths)))
    assert source.num_frames == num_frames
    return time.perf_counter() - began


def make_numbers(folder: Path, num_frames: int, length: int = 1000) -> None:
    """A dataset without pictures."""
    from sharder.data.lerobot.write import DatasetWriter

    rng = np.random.default_rng(1)
    features = {"observation.state": [f"s{i}" for i in range(14)], "action": [f"a{i}" for i in range(14)]}
    writer = DatasetWriter(folder, 30, features, {})
    for _ in range(num_frames // length):
        writer.add_episode({n: rng.standard_normal((length, 14)).astype(np.float32) for n in features}, {}, "do it")
    writer.close()


def resident_bytes(pids: list[int]) -> int:
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def memory_growth(dataset, num_batches: int) -> float:
    """Percent by which resident memory grew from a tenth of the batches to the end, over this process and its workers."""
    pids = [os.getpid(), *(w.process.pid for w in dataset.pictures._workers)]
    rng = np.random.default_rng(2)
    for number in range(num_batches):
        dataset.read(rng.integers(0, len(dataset), 8))
        if number == num_batches // 10:
            before = resident_bytes(pids)
    return 100 * (resident_bytes(pids) / before - 1)


def data_wait_share(root: Path, steps: int) -> tuple[float, float]:
    """(percent of the time of a step of pi0_tiny that it waits for its batch, seconds of a step), medians."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sharder", "train", "pi0_tiny", "--data.path", str(root), "--run-dir", f"{folder}/run"]
        command += [
            "--train.steps",
            str(steps),
            "--train.validate-every",
            "0",
            "--train.validation-batches",
            "1",
            "--checkpoint.every",
            "0",
        ]
        command += ["--cluster.cpu-devices", "1", "--model.action-dim", "14"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        records = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    records = [r for r in records if "step_time_s" in r][len(records) // 4 :]
    step = float(np.median([r["step_time_s"] for r in records]))
    return 100 * float(np.median([r["data_wait_s"] for r in records])) / step, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small data and few steps, to see that everything works")
    parser.add_argument("--oracle", metavar="PYTHON", help="an interpreter with LeRobot's own reader")
    parser.add_argument("--no-training", action="store_true", help="leave out the figure that trains pi0_tiny")
    given = parser.parse_args()
    episodes, length, count, frames, batches, steps = (
        (3, 40, 64, 4000, 40, 6) if given.quick else (20, 200, 1024, 1_000_000, 10_000, 60)
    )
    load = round(os.getloadavg()[0], 2)
    if load > 0.5:
        print(f"warning: the load of this machine is {load} already: rates will be too low", file=sys.stderr)

    def show(figure: str, value: float, unit: str, how: str) -> None:
        facts = {
            "python": sys.version.split()[0],
            "av": metadata.version("av"),
            "cpu_count": os.cpu_count(),
            "load_before": load,
        }
        print(
            json.dumps({"bench": "data", "figure": figure, "value": float(f"{value:.6g}"), "unit": unit, "how": how, **facts}),
            flush=True,
        )

    with tempfile.TemporaryDirectory(prefix="bench-data-") as folder:
        root, numbers = Path(folder) / "videos", Path(folder) / "numbers"
        make_dataset(root, episodes, length)
        how = f"{episodes} episodes of {length}, 2 cameras of 96 x 128, AV1, key frame every 2; examples of 2 pictures and 50 actions"
        rng = np.random.default_rng(3)
        at_random, in_order = rng.integers(0, episodes * length, count), np.arange(min(count, episodes * length))
        dataset = open_dataset(root, 0)
        random_rate = examples_per_s(dataset, at_random)
        show("random_examples_per_s", random_rate, "1/s", f"one process, no cache, batches of 32; {how}")
        show(
            "sequential_examples_per_s",
            examples_per_s(dataset, in_order),
            "1/s",
            f"one process, no cache, batches of 32; {how}",
        )
        cached = open_dataset(root, 0, cache_bytes=1 << 30)
        examples_per_s(cached, at_random)
        show(
            "cached_examples_per_s",
            examples_per_s(cached, at_random),
            "1/s",
            f"one process, all pictures decoded before; {how}",
        )
        if given.oracle:
            options = {"delta_timestamps": {"action": [i / 30 for i in range(50)]}}
            theirs = oracle_per_s(given.oracle, root, at_random, options)
            show("lerobot_random_examples_per_s", theirs, "1/s", f"LeRobot's own reader, one process, the same examples; {how}")
            show(
                "ratio_to_lerobot", random_rate / theirs, "", "random access, ours over theirs, one process each; aim 3 or more"
            )
        pooled = open_dataset(root, 2, cache_bytes=4 << 20)
        show(
            "memory_growth",
            memory_growth(pooled, batches),
            "%",
            f"resident, with 2 workers, from batch {batches // 10} to {batches} of 8; aim below 5",
        )
        pooled.close()
        make_numbers(numbers, frames)
        for name, relative in (("absolute", False), ("relative", True)):
            seconds = statistics_seconds(numbers, frames, relative)
            what = f"{frames} frames, 14 + 14 dimensions, all chunks of 50 {name} actions, exact; aim below 60"
            show(f"statistics_{name}_s", seconds, "s", what)
            show(f"statistics_{name}_frames_per_s", frames / seconds, "1/s", what)
        if not given.no_training:
            share, step = data_wait_share(root, steps)
            show(
                "data_wait_share", share, "%", f"of a step of pi0_tiny, median over the last 3/4 of {steps} steps; aim below 2"
            )
            show("step_s", step, "s", "of pi0_tiny on that dataset, 1 CPU device")


if __name__ == "__main__":
    main()

"""What is in a dataset: counts, features, lengths, chosen frames, findings, and a sheet of pictures."""

from pathlib import Path

import numpy as np

from sharder.config import UserError
from sharder.data.chunks import chunk_rows
from sharder.data.frames import FrameReader
from sharder.data.lerobot.lints import lint
from sharder.data.lerobot.source import LeRobotSource

STATE_NAMES = ("observation.state", "state")
ACTION_NAMES = ("action", "actions")


def find_feature(source: LeRobotSource, names: tuple[str, ...]) -> str | None:
    """The first of the names that the dataset has as numbers."""
    return next((n for n in names if n in source.columns), None)


def describe(source: LeRobotSource, frames: tuple[int, ...] = (), chunk: int = 10) -> dict:
    """Everything that `sharder data inspect --json` prints. Raises UserError for a frame that is not there."""
    state, action = find_feature(source, STATE_NAMES), find_feature(source, ACTION_NAMES)
    info = source.info
    return {
        "path": str(info.root),
        "codebase_version": info.version,
        "robot_type": info.robot_type,
        "num_episodes": info.num_episodes,
        "num_frames": info.num_frames,
        "fps": info.fps,
        "features": {
            n: {"dtype": f.dtype, "shape": list(f.shape), "names": list(f.names) if f.names else None}
            for n, f in info.features.items()
        },
        "tasks": {str(index): text for index, text in sorted(source.tasks.items())},
        "cameras": list(source.cameras),
        "episodes": [
            {"episode_index": int(i), "length": int(n), "dataset_from_index": int(s), "dataset_to_index": int(s + n)}
            for i, n, s in zip(source.episodes.indices, source.lengths, source.starts)
        ],
        "lints": [found.as_dict() for found in lint(source, state, action)],
        "frames": [describe_frame(source, index, state, action, chunk) for index in frames],
    }


def describe_frame(source: LeRobotSource, index: int, state: str | None, action: str | None, chunk: int) -> dict:
    """The numbers of one frame, and of its pictures the mean and the means of 4 x 4 blocks, in grey levels."""
    if not 0 <= index < source.num_frames:
        raise UserError(f"--frames: there is no frame {index}; {source.name} has frames 0 to {source.num_frames - 1}.")
    frame = np.array([index])
    columns = source.columns
    found = {
        "index": index,
        "episode_index": int(columns["episode_index"][index]),
        "frame_index": int(columns["frame_index"][index]),
        "timestamp": float(columns["timestamp"][index]),
        "task_index": int(columns["task_index"][index]),
        "task": source.prompts(frame)[0],
    }
    if state is not None:
        found["state"] = columns[state][index].tolist()
    if action is not None:
        rows, is_pad = chunk_rows(frame, chunk, source.starts, source.lengths)
        found["action"] = columns[action][index].tolist()
        found["action_chunk"] = columns[action][rows[0]].tolist()
        found["is_pad"] = is_pad[0].tolist()
    found["cameras"] = {camera: describe_picture(read_pictures(source, camera, frame)[0]) for camera in source.cameras}
    return found


def describe_picture(picture: np.ndarray) -> dict:
    blocks = [np.array_split(band, 4, axis=1) for band in np.array_split(picture.astype(np.float64), 4, axis=0)]
    return {
        "shape": list(picture.shape),
        "mean": float(picture.mean()),
        "mean_rgb": picture.mean((0, 1)).tolist(),
        "grid4x4": [[block.mean((0, 1)).tolist() for block in row] for row in blocks],
    }


def read_pictures(
    source: LeRobotSource, camera: str, frames: np.ndarray, reader: FrameReader | None = None
) -> list[np.ndarray]:
    """Frames (n,) of a camera at their own size, uint8 (height, width, 3) each."""
    reader = reader or FrameReader()
    found: list = [None] * len(frames)
    for places, wanted in source.pictures(camera, frames):
        for place, picture in zip(places.tolist(), reader.read(wanted)):
            found[place] = picture
    return found


def contact_sheet(
    source: LeRobotSource, path: Path, num_episodes: int = 6, num_columns: int = 6, cell_height: int = 96
) -> None:
    """Writes a PNG: for every camera a block, with a row of evenly spaced frames of each of some episodes."""
    from PIL import Image, ImageDraw

    chosen = np.unique(np.linspace(0, len(source.lengths) - 1, num_episodes).astype(int))
    label, gap, reader, bands = 14, 4, FrameReader(), []
    for camera in source.cameras:
        for e in chosen.tolist():
            within = np.linspace(0, source.lengths[e] - 1, num_columns).astype(np.int64)
            pictures = [Image.fromarray(p) for p in read_pictures(source, camera, source.starts[e] + within, reader)]
            cells = [p.resize((max(1, round(p.width * cell_height / p.height)), cell_height)) for p in pictures]
            band = Image.new("RGB", (sum(c.width + gap for c in cells), cell_height + label), "white")
            title = f"{camera}  episode {source.episodes.indices[e]}  {source.lengths[e]} frames  {source.prompts(source.starts[e : e + 1])[0]}"
            ImageDraw.Draw(band).text((2, 1), title.encode("latin-1", "replace").decode("latin-1"), fill="black")
            left = 0
            for cell in cells:
                band.paste(cell, (left, label))
                left += cell.width + gap
            bands.append(band)
    sheet = Image.new("RGB", (max(b.width for b in bands), sum(b.height + gap for b in bands)), "white")
    top = 0
    for band in bands:
        sheet.paste(band, (0, top))
        top += band.height + gap
    try:
        sheet.save(path, "PNG")
    except OSError as error:
        raise UserError(f"--sheet {path} cannot be written: {error.strerror or error}.") from None

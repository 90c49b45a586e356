"""Every number and picture of datasets that LeRobot wrote, against what LeRobot reads; and of others made on the spot."""

import numpy as np
import pytest
from datasets import FOLDER, NAMES, copy, make

from sharder.data.chunks import chunk_rows
from sharder.data.frames import FrameReader
from sharder.data.lerobot.inspect import read_pictures
from sharder.data.lerobot.source import open_lerobot
from sharder.data.lerobot.write import Encoding

COLUMNS = {
    "state": "observation.state", "action": "action", "timestamp": "timestamp", "episode_index": "episode_index",
    "frame_index": "frame_index", "task_index": "task_index", "reward": "next.reward", "success": "next.success",
}  # fmt: skip


def expected(name: str) -> dict[str, np.ndarray]:
    return np.load(FOLDER / f"{name}.expected.npz")


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_lerobot(name):
    source, want = open_lerobot(FOLDER / name), expected(name)
    for key, column in COLUMNS.items():
        found = source.columns[column]
        assert np.array_equal(found.reshape(want[f"all_{key}"].shape), want[f"all_{key}"]), column


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_flags_are_those_of_lerobot(name):
    source, want = open_lerobot(FOLDER / name), expected(name)
    rows, is_pad = chunk_rows(np.arange(source.num_frames), 10, source.starts, source.lengths)
    assert np.array_equal(source.columns["action"][rows], want["all_action_chunk"])
    assert np.array_equal(is_pad, want["all_action_is_pad"])


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_those_of_lerobot(name):
    source, want = open_lerobot(FOLDER / name), expected(name)
    for camera in source.cameras:
        found = read_pictures(source, camera, want["pick"])
        difference = np.abs(np.stack(found).astype(int) - want[f"pick_frames/{camera}"]).max()
        assert difference <= (2 if camera in source.episodes.videos else 0)


@pytest.mark.parametrize("name", NAMES)
def test_every_frame_is_the_right_one(name):
    source, want = open_lerobot(FOLDER / name), expected(name)
    for camera in source.cameras:
        means = [p.mean() for p in read_pictures(source, camera, np.arange(source.num_frames))]
        assert np.abs(np.array(means) - want[f"all_mean/{camera}"]).max() <= 0.5


VARIANTS = {
    "h264": (Encoding("libx264", crf=10), 25),
    "h264_b_frames": (Encoding("libx264", crf=10, key_frame_every=12, max_b_frames=2), 25),
    "av1": (Encoding("libsvtav1", crf=20), 60),
    "png": (Encoding("png"), 50),
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tmp_path_factory):
    """Several files, chunks and cameras, frames that are not square."""
    encoding, fps = VARIANTS[request.param]
    root = tmp_path_factory.mktemp("made") / request.param
    numbers, pictures = make(root, fps=fps, encoding=encoding, frames_per_file=20, files_per_chunk=2)
    return open_lerobot(root), numbers, pictures


def test_random_access_finds_the_frame_that_was_written(variant):
    source, _, pictures = variant
    order = np.random.default_rng(1).permutation(source.num_frames)
    for camera, raw in pictures.items():
        found = np.stack(read_pictures(source, camera, order)).astype(int)
        own = np.abs(found - raw[order]).mean((1, 2, 3))
        nearest = np.abs(found[:, None] - raw[None]).mean((2, 3, 4)).argmin(1)
        assert np.array_equal(nearest, order) and own.max() < 8, (camera, own.max())


def test_random_and_sequential_access_give_the_same_pictures(variant):
    source, _, _ = variant
    order = np.random.default_rng(2).permutation(source.num_frames)
    for camera in source.cameras:
        in_order = np.stack(read_pictures(source, camera, np.arange(source.num_frames)))
        reader = FrameReader()
        one_by_one = np.stack([read_pictures(source, camera, order[i : i + 1], reader)[0] for i in range(len(order))])
        assert np.array_equal(one_by_one, in_order[order])


def test_files_and_chunks_are_put_in_order(variant):
    source, numbers, _ = variant
    assert len(source.episodes.data.paths) >= 3 and "chunk-001" in str(source.episodes.data.paths[-1])
    assert all(np.array_equal(source.columns[name], values) for name, values in numbers.items())


def test_drifted_timestamps_do_not_move_frames(tmp_path):
    import pyarrow.parquet as pq

    make(tmp_path / "d", encoding=Encoding("libx264", crf=10), cameras={"cam": (32, 32)})
    before = open_lerobot(tmp_path / "d")
    file = before.episodes.file
    table = pq.read_table(file)
    name = "videos/cam/from_timestamp"
    drifted = [t + 0.05 * e for e, t in enumerate(table[name].to_pylist())]  # 1.5 frames an episode
    pq.write_table(table.set_column(table.column_names.index(name), name, [drifted]), file)
    after = open_lerobot(tmp_path / "d")
    assert not np.array_equal(after.episodes.videos["cam"].first_frame, before.episodes.videos["cam"].first_frame)
    assert np.array_equal(after.first_frames("cam"), before.first_frames("cam"))


def test_version_2_0_is_read(tmp_path):
    root = copy("v21_video", tmp_path)
    info = root / "meta" / "info.json"
    info.write_text(info.read_text().replace('"v2.1"', '"v2.0"'))
    (root / "meta" / "episodes_stats.jsonl").unlink()
    assert open_lerobot(root).num_frames == 417


def test_the_cache_is_bounded_and_changes_nothing(variant):
    source, _, _ = variant
    camera, order = source.cameras[0], np.random.default_rng(3).integers(0, source.num_frames, 120)
    frame_bytes = 24 * 40 * 3
    reader = FrameReader(cache_bytes=10 * frame_bytes)
    for at in range(0, 120, 12):
        found = np.stack(read_pictures(source, camera, order[at : at + 12], reader))
        assert reader.cached_bytes <= 10 * frame_bytes
        assert np.array_equal(found, np.stack(read_pictures(source, camera, order[at : at + 12])))


def test_the_fingerprint_sees_a_changed_number_and_a_changed_picture(tmp_path):
    make(tmp_path / "a")
    make(tmp_path / "b")
    make(tmp_path / "c", seed=1)
    make(tmp_path / "d", cameras={"observation.images.top": (24, 40), "observation.images.wrist": (32, 26)})
    a, b, c, d = (open_lerobot(tmp_path / name).fingerprint for name in "abcd")
    assert a == b and len({a, c, d}) == 3

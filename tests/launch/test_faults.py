"""What a fault does to a run's folder."""

from sharder.launch.faults import corrupt_newest


def checkpoint(run_dir, step):
    where = run_dir / "checkpoints" / str(step)
    (where / "params" / "d").mkdir(parents=True)
    (where / "params" / "d" / "data").write_bytes(bytes(100))
    (where / "manifest.json").write_text("{}")
    return where / "params" / "d" / "data"


def test_the_newest_checkpoint_is_corrupted_and_never_the_only_one(tmp_path):
    """A run of whose checkpoints none is good stops: that is no fault that it could survive."""
    assert corrupt_newest(tmp_path) is None
    older = checkpoint(tmp_path, 5)
    assert corrupt_newest(tmp_path) is None and older.read_bytes() == bytes(100)
    newer = checkpoint(tmp_path, 10)
    assert corrupt_newest(tmp_path) == newer
    assert older.read_bytes() == bytes(100) != newer.read_bytes()

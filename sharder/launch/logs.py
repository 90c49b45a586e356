"""The folder for logs, heartbeats and the lock of a launch."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sharder.config import UserError
from sharder.facts import is_run


@contextlib.contextmanager
def log_folder(run_dir: Path | None) -> Iterator[Path]:
    """RUN_DIR/logs, or without a run a temporary folder; nothing of it is left where no run was begun."""
    if run_dir is None:
        with tempfile.TemporaryDirectory(prefix="sharder-logs-") as folder:
            yield Path(folder)
        return
    existed = is_run(run_dir)
    made = [path for path in (run_dir / "logs", run_dir, *run_dir.parents) if not path.exists()]
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {run_dir} cannot be used: {error.strerror}. Choose another folder.") from None
    try:
        yield run_dir / "logs"
    finally:
        for beat in (run_dir / "logs").glob("heartbeat_*"):
            beat.unlink()
        if not existed and not (run_dir / "config.json").exists():
            remove_logs(run_dir / "logs", made)


def remove_logs(log_dir: Path, made: list[Path]) -> None:
    """The logs of a run that was never begun, and the folders made for them."""
    for log in log_dir.glob("process_*.log"):
        log.unlink()
    for path in made:
        try:
            path.rmdir()
        except OSError:  # something else is in it
            return

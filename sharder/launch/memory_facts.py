"""What the kernel says about processes that it ended for lack of memory."""

from pathlib import Path


def count_oom_kills() -> int:
    """Of this process's control group and of the machine, so far: a number that grows by each, 0 where nothing is known."""
    counts = [_field(path, "oom_kill") for path in (*_group_files(), Path("/proc/vmstat"))]
    return sum(counts)


def _group_files() -> list[Path]:
    """memory.events (control groups v2) or memory.oom_control (v1) of this process."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            found.append(Path("/sys/fs/cgroup" + group) / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(Path("/sys/fs/cgroup/memory" + group) / "memory.oom_control")
    return found


def _field(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0

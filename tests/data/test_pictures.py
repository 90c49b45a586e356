"""Pictures by worker processes, which end with their parent."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from datasets import make
from small import environment

from sharder.config import UserError
from sharder.data.frames import Wanted
from sharder.data.lerobot.source import open_lerobot
from sharder.data.pictures import Pictures, divide


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("made") / "d"
    make(root, frames_per_file=20)
    return open_lerobot(root)


def jobs(source, frames: np.ndarray) -> list[Wanted]:
    return [wanted for camera in source.cameras for _, wanted in source.pictures(camera, frames)]


def alive(pid: int) -> bool:
    """Whether the process runs; one that ended and was not waited for does not count."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s: float = 20) -> bool:
    until = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("parts", [1, 2, 5, 40])
def test_every_row_is_in_one_piece(parts):
    rng = np.random.default_rng(parts)
    asked = [Wanted(f"f{i}", None, rng.integers(0, 9, n)) for i, n in enumerate((7, 1, 0, 12))]
    pieces = divide(asked, parts)
    for number, job in enumerate(asked):
        places = [p for piece in pieces for n, ps, wanted in piece if n == number for p in ps.tolist()]
        assert sorted(places) == list(range(len(job.rows)))
    sizes = [sum(len(ps) for _, ps, _ in piece) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1


def test_workers_give_the_same_pictures_as_this_process(source):
    frames = np.random.default_rng(0).integers(0, source.num_frames, 30)
    alone = Pictures((16, 16)).read(jobs(source, frames))
    pool = Pictures((16, 16), num_workers=2, cache_bytes=1 << 20)
    for _ in range(2):  # the second time from the cache
        assert all(np.array_equal(a, b) for a, b in zip(alone, pool.read(jobs(source, frames)), strict=True))
    pool.close()


def test_an_error_of_a_worker_is_that_of_this_process(source):
    pool = Pictures((16, 16), num_workers=1)
    wanted = jobs(source, np.arange(3))[0]
    with pytest.raises(UserError, match="has 14 rows, but row 999|has [0-9]+ rows, but row 999"):
        pool.read([Wanted(wanted.path, wanted.column, np.array([999]))])
    assert pool.read([wanted])[0].shape == (3, 16, 16, 3)
    pool.close()


def test_a_killed_worker_is_replaced(source):
    pool = Pictures((16, 16), num_workers=1)
    wanted = jobs(source, np.arange(3))
    before = pool.read(wanted)
    os.kill(pool._workers[0].process.pid, signal.SIGKILL)
    assert all(np.array_equal(a, b) for a, b in zip(before, pool.read(wanted), strict=True))
    pool.close()


def test_close_ends_the_workers():
    pool = Pictures((16, 16), num_workers=2)
    pids = [w.process.pid for w in pool._workers]
    pool.close()
    assert not any(map(alive, pids))


PARENT = """
import signal, sys, time
from sharder.data.pictures import Pictures
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
pool = Pictures((16, 16), num_workers=2)
print(*[w.process.pid for w in pool._workers], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_workers_end_with_their_parent(number):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
    )
    pids = list(map(int, parent.stdout.readline().split()))
    assert len(pids) == 2 and all(map(alive, pids))
    parent.send_signal(number)
    parent.wait(20)
    assert wait_until(lambda: not any(map(alive, pids)))
    parent.stdout.close()


def test_a_signal_to_the_group_leaves_the_workers_to_their_parent(source):
    pool = Pictures((16, 16), num_workers=1)
    pid = pool._workers[0].process.pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    pool.read(jobs(source, np.arange(3)))
    assert pool._workers[0].process.pid == pid and alive(pid)
    pool.close()


def test_a_worker_loads_no_jax():
    code = "import sys, sharder.data.decode_worker, sharder.data.lerobot.video; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0

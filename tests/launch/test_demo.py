import os
import subprocess
import sys

import pytest
from small import needs_tested_jax, sharder

from sharder.launch import demo


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").touch()
    result = sharder("demo", "--dir", tmp_path)
    assert result.returncode == 2 and "not an old demo" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_quitting_ends_both_runs(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
    demo.end(demo.Show(tmp_path, tmp_path / "log", *processes))
    assert all(p.returncode is not None for p in processes)


@pytest.mark.slow
@needs_tested_jax
def test_the_demo_kills_loses_brings_back_and_ends_identical(tmp_path):
    result = sharder("demo", "--script", "--dir", tmp_path / "demo", timeout=900, HOME=os.environ["HOME"])
    assert result.returncode == 0, result.stdout + result.stderr
    for told in ("killed (SIGKILL)", "lost for good", "there again", f"identical through step {demo.STEPS}"):
        assert told in result.stdout

import subprocess
import sys

import pytest
from small import environment

from sharder.cluster import compile_cache_dir
from sharder.exactness import CPU_THREADS_VARIABLE


def test_the_compile_cache_can_be_turned_off():
    assert compile_cache_dir("off") is None and compile_cache_dir("/x") == "/x" and compile_cache_dir(None).endswith("compiled")


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_memory_is_kept():
    """A second block of the same size, in another thread, needs no new pages from the kernel; without the setting each has 16,384."""
    code = (
        "import resource, threading; from sharder.cluster import keep_freed_memory; assert keep_freed_memory()\n"
        "size, faults = 1 << 26, lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def use():\n"
        "    before = faults(); block = b'x' * size; print(faults() - before)\n"
        "for _ in range(2):\n"
        "    thread = threading.Thread(target=use); thread.start(); thread.join()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = map(int, result.stdout.split())
    assert first > 10_000 and second < 100


SESSION = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.devices() if {early} else None
from sharder import cluster
from sharder.config import ClusterConfig
cluster.initialize(ClusterConfig(compile_cache="off"))
"""


@pytest.mark.parametrize("early", [True, False])
def test_a_run_in_a_process_where_jax_has_other_threads_says_so(early):
    environment_without = {k: v for k, v in environment().items() if k != CPU_THREADS_VARIABLE}
    ran = subprocess.run(
        [sys.executable, "-c", SESSION.format(early=early)], env=environment_without, capture_output=True, text=True, check=True
    )
    assert ("jax was in use before this run began" in ran.stderr) == early

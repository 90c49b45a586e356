import subprocess
import sys

import pytest

from sharder.cluster import compile_cache_dir


def test_the_compile_cache_can_be_turned_off():
    assert compile_cache_dir("off") is None and compile_cache_dir("/x") == "/x" and compile_cache_dir(None).endswith("compiled")


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_memory_is_kept():
    """A second block of the same size needs no new pages from the kernel; without the setting each has 16,384."""
    code = (
        "import resource; from sharder.cluster import keep_freed_memory; assert keep_freed_memory()\n"
        "size = 1 << 26; block = b'x' * size; del block; before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "block = b'x' * size; print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 100

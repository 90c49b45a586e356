import subprocess
import sys

import pytest

from sharder.cluster import VARIABLES, compile_cache_dir, process_environment
from sharder.config import UserError

FULL = dict(zip(VARIABLES, ("127.0.0.1:1234", "4", "2")))


def test_nothing_set_is_a_single_process():
    assert process_environment({"PATH": "x"}) is None


def test_a_full_setting_is_read():
    assert process_environment(FULL) == ("127.0.0.1:1234", 4, 2)


@pytest.mark.parametrize("missing", VARIABLES)
def test_a_partial_setting_names_what_is_missing(missing):
    with pytest.raises(UserError, match=f"but {missing} not"):
        process_environment({k: v for k, v in FULL.items() if k != missing})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID is 4, but must be in 0 .. 3"),
        ({"JAX_PROCESS_ID": "-1"}, "must be in 0 .. 3"),
        ({"JAX_NUM_PROCESSES": "many"}, "both must be integers"),
        ({"JAX_COORDINATOR_ADDRESS": "localhost"}, "must be host:port"),
    ],
)
def test_an_unusable_setting_is_refused_with_the_numbers(change, message):
    with pytest.raises(UserError, match=message):
        process_environment(FULL | change)


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

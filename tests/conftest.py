"""Set-up of all tests: eight simulated devices, and a home folder of their own, with no compiled programs from before."""

import os
import signal
import tempfile

import jax
import pytest
from hypothesis import settings

from sharder.exactness import CPU_THREADS, CPU_THREADS_VARIABLE

# As in a run. With a thread for each of eight devices, a program hangs as soon as one device waits in two collectives at once.
os.environ[CPU_THREADS_VARIABLE] = str(CPU_THREADS)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# xdist's workers inherit the home of the process that starts them, so that all tests of a session share what they compile.
if "SHARDER_TESTS_HOME" not in os.environ:
    _home = tempfile.TemporaryDirectory(prefix="sharder-tests-")
    os.environ["SHARDER_TESTS_HOME"] = _home.name
os.environ["HOME"] = os.environ["SHARDER_TESTS_HOME"]
# Set here too, since jax looks once, at the first compilation.
jax.config.update("jax_compilation_cache_dir", os.path.join(os.environ["HOME"], ".cache", "sharder", "compiled"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The first example of a property compiles; the others do not.
settings.register_profile("sharder", deadline=None)
settings.load_profile("sharder")


@pytest.fixture(autouse=True)
def _signals_stay_open():
    """Started processes inherit which signals are blocked."""
    yield
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "this test blocks signals for all that come after it"


@pytest.fixture
def strict_promotion():
    """No implicit dtype promotion. Not for all tests: optax's bias correction and a norm in bfloat16 rely on it."""
    with jax.numpy_dtype_promotion("strict"):
        yield

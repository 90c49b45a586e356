"""Which accelerators jax may find on this machine."""

from importlib import metadata

from sharder import backends
from sharder.backends import has_compilers_only, may_have_gpu
from sharder.config import ClusterConfig


def test_flags_for_gpus_are_set_only_where_there_may_be_one(monkeypatch):
    """Elsewhere they would only change the keys of kept programs, and a restart would compile again."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    plugin = metadata.EntryPoint("a_gpu", "jax_plugins.a_gpu", "jax_plugins")
    monkeypatch.setattr(backends.metadata, "entry_points", lambda group: [plugin])
    assert may_have_gpu(ClusterConfig()) and not may_have_gpu(ClusterConfig(cpu_devices=1))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not may_have_gpu(ClusterConfig())
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(backends.metadata, "entry_points", lambda group: [])
    assert not may_have_gpu(ClusterConfig())


def test_compilers_for_plans_alone_are_no_accelerator(monkeypatch, tmp_path):
    """The extras plan-cuda and plan-tpu on a laptop: jax would look for devices, and say at length that there are none."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(backends.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)

    def plugins(*names):
        found = [metadata.EntryPoint(name, f"jax_plugins.{name}", "jax_plugins") for name in names]
        monkeypatch.setattr(backends.metadata, "entry_points", lambda group: found)

    plugins("xla_cuda12")
    assert has_compilers_only(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert not has_compilers_only(tmp_path)
    (tmp_path / "nvidia0").unlink()
    plugins("xla_cuda12", "another")
    assert not has_compilers_only(tmp_path)
    plugins()
    assert not has_compilers_only(tmp_path)
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: name == "libtpu")
    assert has_compilers_only(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert not has_compilers_only(tmp_path)

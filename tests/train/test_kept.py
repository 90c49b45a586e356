"""Programs found again without tracing are those that were compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import small

from sharder.config import to_dict
from sharder.train.kept import Kept
from sharder.train.setup import prepare

SETUP = prepare(small())
X = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=SETUP.replicated())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def lower():
    return jax.jit(lambda x: {"sum": jnp.exp(x).sum(), "x": (x * 3,)}).lower(X)


def never():
    raise AssertionError("traced again")


def kept(config=None, *facts):
    return Kept(prepare(config or small()), *facts, keep=True)


def test_a_kept_program_gives_the_same_bits_without_tracing(cache):
    x = jax.device_put(np.random.default_rng(0).normal(size=64).astype(np.float32), SETUP.replicated())
    first = kept().compile("p", lower)(x)
    again = kept().compile("p", never)(x)
    assert jax.tree.structure(first) == jax.tree.structure(again)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again)):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_program_for_several_devices_is_kept_too(cache):
    groups = [(d,) for d in jax.devices()[:2]]
    lower_on = lambda group: jax.jit(lambda x: x * 2).lower(  # noqa: E731
        jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(group[0]))
    )
    kept().compile_for_groups("w", lower_on, groups)
    found = kept().compile_for_groups("w", lambda group: never(), groups)
    for program, (device,) in zip(found, groups):
        out = program(jax.device_put(jnp.arange(4.0), device))
        assert out.devices() == {device} and out.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("change", ["config", "facts", "name", "flags"])
def test_whatever_a_program_is_made_from_is_in_its_key(cache, change, monkeypatch):
    kept().compile("p", lower)
    config, facts, name = small(), (), "p"
    if change == "config":
        config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, b1=0.8))
    facts = (1,) if change == "facts" else ()
    name = "q" if change == "name" else "p"
    if change == "flags":
        monkeypatch.setattr("sharder.train.kept.surroundings", lambda: ("another",))
    with pytest.raises(AssertionError, match="traced again"):
        kept(config, *facts).compile(name, never)


def test_length_and_logging_of_a_run_change_no_program(cache):
    kept().compile("p", lower)
    config = small()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=99), log=dataclasses.replace(config.log))
    assert to_dict(config) != to_dict(small())
    kept(config).compile("p", never)


def test_a_damaged_file_is_compiled_anew(cache):
    kept().compile("p", lower)
    [path] = [p for p in cache.iterdir() if p.name.startswith("program-p-")]
    path.write_bytes(path.read_bytes()[:100])
    out = kept().compile("p", lower)(jax.device_put(np.zeros(64, np.float32), SETUP.replicated()))
    assert float(out["sum"]) == 64.0


def test_without_keep_nothing_is_written(cache):
    Kept(prepare(small()), keep=False).compile("p", lower)
    assert not [p for p in cache.iterdir() if p.name.startswith("program-")]

"""Compiled programs of a process, kept beside jax's cache and found again without tracing.

jax's own cache is asked with the lowered program, and to trace and lower the programs of a step takes longer than to load them:
2 s of a restart of tiny_lm. Here the key is everything that a program is made from: configuration, devices and place of the process,
shapes, versions, flags, the processor, and the source of Sharder itself. Uses the public serialisation of jax; where it fails, a
program is compiled as ever.
"""

import functools
import hashlib
import logging
import os
import pickle
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled, Lowered

import sharder
from sharder.config import to_dict
from sharder.exactness import CPU_THREADS_VARIABLE
from sharder.train.executables import Devices, compile_afresh, compile_for_groups, load_for, processor, write_whole
from sharder.train.setup import Setup

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")
NOT_IN_PROGRAMS = ("cluster", "log", "checkpoint")
"""Sections of the configuration that no program depends on."""


class Kept:
    """The programs of one setup."""

    def __init__(self, setup: Setup, *facts: object, keep: bool):
        """`facts`: what else the programs depend on, as shapes of a batch; anything with a `repr` of values. Without `keep`, or
        without a cache, everything is compiled."""
        folder = jax.config.jax_compilation_cache_dir
        self.folder = Path(folder) if folder and keep else None
        if self.folder is None:
            return
        config = {name: section for name, section in to_dict(setup.config).items() if name not in NOT_IN_PROGRAMS}
        config["train"] = {k: v for k, v in config["train"].items() if k != "steps"}
        self.devices = list(setup.mesh.devices.flat)
        mesh = [(d.id, d.process_index) for d in setup.mesh.devices.flat]
        settings = sorted((k, v) for k, v in jax.config.values.items() if "cache" not in k and "compilation" not in k)
        self.facts = (config, setup.mesh.shape, mesh, jax.process_index(), facts, repr(settings), surroundings())

    def compile(self, name: str, lower: Callable[[], Lowered]) -> Compiled:
        """The program of `lower`, over all devices of the run."""
        path = self._path(name)
        if path is not None and path.exists():
            try:
                payload, inputs, outputs = pickle.loads(path.read_bytes())
                trees = jax.tree.structure(inputs), jax.tree.structure(outputs)
                return serialize_executable.deserialize_and_load(payload, *trees, execution_devices=self.devices)
            except Exception as error:  # whatever another version of a library says to it
                _say(name, error)
        if path is None:
            return lower().compile()
        compiled = compile_afresh(lower())
        try:
            payload, in_tree, out_tree = serialize_executable.serialize(compiled)
            write_whole(path, pickle.dumps((payload, _example(in_tree), _example(out_tree))))
        except Exception as error:
            _say(name, error)
        return compiled

    def compile_for_groups(self, name: str, lower: Callable[[Devices], Lowered], groups: Sequence[Devices]) -> list[Compiled]:
        """As `sharder.train.executables.compile_for_groups`."""
        path = self._path(name)
        if path is not None and path.exists():
            try:
                (ids, payload), inputs, outputs = pickle.loads(path.read_bytes())
                trees = jax.tree.structure(inputs), jax.tree.structure(outputs)
                return [load_for(payload, ids, *trees, group) for group in groups]
            except Exception as error:
                _say(name, error)

        def keep(binary: tuple, in_tree, out_tree) -> None:
            if path is not None:
                write_whole(path, pickle.dumps((binary, _example(in_tree), _example(out_tree))))

        return compile_for_groups(lower, groups, keep)

    def _path(self, name: str) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / f"program-{name}-{hashlib.sha256(repr((name, self.facts)).encode()).hexdigest()[:32]}"


def _example(tree) -> object:
    """A value of this structure, which can be pickled, as the structure cannot."""
    return jax.tree.unflatten(tree, range(tree.num_leaves))


def _say(name: str, error: Exception) -> None:
    logging.getLogger(__name__).warning("program %s is compiled anew, since it cannot be kept or loaded: %s", name, error)


@functools.cache
def surroundings() -> tuple:
    """Versions, flags, processor, and a digest of Sharder's own source."""
    digest = hashlib.sha256()
    for path in sorted(Path(sharder.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", CPU_THREADS_VARIABLE)]
    device = jax.devices()[0]
    return (
        digest.hexdigest(), [metadata.version(name) for name in LIBRARIES], flags, processor(), device.device_kind,
        device.client.platform_version,
    )  # fmt: skip

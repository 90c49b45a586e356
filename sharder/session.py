"""The Python API: a recipe, how it is divided, and a run of it, in one line.

    sharder.quick("tiny_lm").shard(tp=2, fsdp=True).train(steps=20)

does what `sharder train tiny_lm --parallel.policy fsdp --parallel.tensor 2 --train.steps 20` does. Nothing here loads jax
before `train`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from sharder.checkpoint.staging import settle
from sharder.config import RunConfig, UserError
from sharder.events import read_json_lines
from sharder.recipes import load_recipe


class Session:
    """A configuration until `train`, a run from then on."""

    def __init__(self, config: RunConfig, name: str, run_dir: Path | None):
        self.config = config
        self.run_dir = run_dir
        """Folder of the run; chosen by the first `train` where none was given."""
        self._name = name
        self._has_state = False

    def shard(self, tp: int = 1, zero: bool = True, fsdp: bool = False) -> "Session":
        """Chooses the policy and the tensor degree; FSDP implies ZeRO. Returns the session.

        Raises UserError once a state exists, whose arrays lie where the first choice put them, and for FSDP without ZeRO.
        """
        if self._has_state:
            raise UserError(
                "the state of this session exists already, and lies where it was born: call .shard() before .train()."
            )
        for name, value in (("zero", zero), ("fsdp", fsdp)):
            if not isinstance(value, bool):
                raise UserError(
                    f"{name}={value!r}, but must be True or False; degrees are given as quick(..., parallel={{'fsdp': 4}})."
                )
        if fsdp and not zero:
            raise UserError(
                "fsdp=True with zero=False: parameters that are divided have divided optimizer state; leave zero out."
            )
        policy = "fsdp" if fsdp else "zero" if zero else "dp"
        parallel = dataclasses.replace(self.config.parallel, policy=policy, tensor=tp)
        self.config = dataclasses.replace(self.config, parallel=parallel)
        return self

    def train(self, steps: int | None = None) -> "Session":
        """Trains to `steps` completed steps (default: the recipe's) in this process, resuming a run that exists. Returns the session.

        Raises UserError for whatever the command line would refuse.
        """
        from sharder.stop import StopRequest
        from sharder.train.loop import train

        if steps is not None:
            self.config = dataclasses.replace(self.config, train=dataclasses.replace(self.config.train, steps=steps))
        self.run_dir = self.run_dir or _new_folder(self._name)
        self._has_state = True
        train(self.config, self.run_dir, "auto", StopRequest())
        return self

    @property
    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl so far."""
        return [] if self.run_dir is None else read_json_lines(self.run_dir / "metrics.jsonl")[0]


def _new_folder(name: str) -> Path:
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder


def quick(recipe: str, run_dir: str | Path | None = None, **sections: Mapping[str, object]) -> Session:
    """A session of a recipe, by name or path/to/file.py:function.

    `run_dir`: default a new folder runs/NAME-1, -2, ... `sections` change the recipe as options would:
    quick("tiny_lm", cluster={"cpu_devices": 8}, train={"global_batch_size": 64}).
    Raises UserError for an unknown recipe, section or field, and for values outside their range.
    """
    if not isinstance(recipe, str):
        raise UserError(f"the recipe is {recipe!r}, but must be a name or path/to/file.py:function.")
    config = load_recipe(recipe)
    known = [f.name for f in dataclasses.fields(config)]
    for section, values in sections.items():
        if section not in known:
            raise UserError(f"there is no section {section!r}; use one of {', '.join(known)}.")
        if not isinstance(values, Mapping):
            raise UserError(f"{section}={values!r}, but must be a dict of its fields, as {section}={{...}}.")
        fields = [f.name for f in dataclasses.fields(getattr(config, section))]
        unknown = [k for k in values if k not in fields]
        if unknown:
            raise UserError(f"section {section} has no {', '.join(unknown)}; it has {', '.join(fields)}.")
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})
    folder, config = (None, config) if run_dir is None else settle(run_dir, config)
    return Session(config, recipe.rpartition(":")[2], folder)

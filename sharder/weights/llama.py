"""`sharder weights import | export` of Llama: whole runs from and to the files of transformers."""

from pathlib import Path
from typing import Annotated

import tyro

from sharder.config import RunConfig, UserError
from sharder.options import parse

USAGE = "sharder weights import FOLDER RECIPE --run-dir DIR [options], or sharder weights export RUN FOLDER [--step N]"


def split(arguments: list[str], names: tuple[str, str]) -> tuple[str, str, list[str]]:
    """Two leading positional arguments and the rest. Raises UserError where one is missing."""
    for at, name in enumerate(names):
        if len(arguments) <= at or arguments[at].startswith("-"):
            raise UserError(f"{name} is missing. Usage: {USAGE}")
    return arguments[0], arguments[1], arguments[2:]


def import_(arguments: list[str]) -> int:
    """Begin a run whose step 0 has the weights of a folder."""
    from sharder.recipes import load_recipe

    folder, name, rest = split(arguments, ("FOLDER", "RECIPE"))
    default = load_recipe(name)

    def command(
        run_dir: Path, config: Annotated[tyro.conf.AvoidSubcommands[RunConfig], tyro.conf.arg(name="")] = default
    ) -> tuple:
        """
        Args:
            run_dir: Folder of the run to begin.
        """
        return run_dir, config

    run_dir, config = parse(command, args=rest, prog="sharder weights import", description=import_.__doc__)
    from sharder.weights.runs import import_weights

    print(import_weights(config, Path(folder), run_dir))
    return 0


def export(arguments: list[str]) -> int:
    """Write the weights of a checkpoint as transformers reads them."""
    run, folder, rest = split(arguments, ("RUN", "FOLDER"))

    def command(step: int | None = None) -> int | None:
        """
        Args:
            step: Checkpoint; unset: the latest.
        """
        return step

    step = parse(command, args=rest, prog="sharder weights export", description=export.__doc__)
    from sharder.facts import read_config
    from sharder.weights.runs import export_weights

    print(export_weights(read_config(Path(run)), Path(run), step, Path(folder)))
    return 0

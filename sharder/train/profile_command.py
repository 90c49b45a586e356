"""`sharder profile RECIPE`: its options."""

from pathlib import Path
from typing import Annotated

import tyro

from sharder.config import RunConfig
from sharder.options import parse
from sharder.recipes import load_recipe, split_name

USAGE = "sharder profile RECIPE [--steps 10] [--run-dir DIR] [--ablate attention] [--json] [options]"


def run(arguments: list[str]) -> int:
    """Measure where the time of a step goes, by part of the model and by kind of work."""
    name, rest = split_name(arguments, "RECIPE", USAGE)
    default = load_recipe(name)

    def command(
        run_dir: Path | None = None,
        steps: int = 10,
        ablate: str | None = None,
        json: bool = False,  # noqa: A002
        config: Annotated[tyro.conf.AvoidSubcommands[RunConfig], tyro.conf.arg(name="")] = default,
    ) -> tuple:
        """
        Args:
            run_dir: Folder whose profile/ gets the trace and what was found; a run's own, or one without a run.
            steps: Steps that are timed, and again as many that are traced.
            ablate: Also time the step without attention or feed-forward.
            json: Print what was found as JSON, and nothing else.
        """
        return config, run_dir, steps, ablate, json

    config, run_dir, steps, ablate, as_json = parse(command, args=rest, prog=f"sharder profile {name}", description=run.__doc__)
    from sharder.train.profiling import profile

    return profile(config, name, run_dir, steps, ablate, as_json)

"""The command line of recording: parses, calls, prints."""

from pathlib import Path
from typing import Annotated

import tyro

from sharder.config import UserError
from sharder.options import parse
from sharder.sim.metaworld import Recording

SIMULATORS = ("metaworld",)


def record(arguments: list[str]) -> int:
    """Record demonstrations of scripted experts in a simulator, as a LeRobot dataset."""
    if not arguments or arguments[0] not in (*SIMULATORS, "-h", "--help"):
        raise UserError(f"sharder data record needs the name of a simulator: {', '.join(SIMULATORS)}.")

    def command(
        out: Path, tasks: str = "reach-v3", recording: Annotated[Recording, tyro.conf.arg(name="")] = Recording()
    ) -> tuple:
        """
        Args:
            out: Folder of the new dataset.
            tasks: Tasks with commas between, as reach-v3,push-v3.
        """
        return out, tasks, recording

    rest = arguments[1:] if arguments[0] in SIMULATORS else arguments
    out, tasks, recording = parse(command, args=rest, prog="sharder data record metaworld", description=record.__doc__)
    import dataclasses

    from sharder.sim.metaworld import record as run

    run(dataclasses.replace(recording, tasks=tuple(t.strip() for t in tasks.split(",") if t.strip())), out)
    return 0

"""`sharder study attention|flags`: their options."""

import json
from pathlib import Path

from rich.console import Console

from sharder.config import UserError
from sharder.options import parse
from sharder.study import attention as attention_study
from sharder.study import flags as flags_study

USAGE = "sharder study attention [--lengths 256,512,1024], or sharder study flags [RECIPE] [options of the recipe]"


def run(arguments: list[str]) -> int:
    """Measure attention over the length of the sequence, or flags of XLA on the same work."""
    studies = {"attention": attention, "flags": flags}
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"usage: {USAGE}")
        return 0
    if not arguments or arguments[0] not in studies:
        raise UserError(f"attention or flags is missing. Usage: {USAGE}")
    return studies[arguments[0]](arguments[1:])


def attention(arguments: list[str]) -> int:
    """Time and scratch memory of every attention backend over the length of the sequence."""

    def command(
        lengths: str = "256,512,1024,2048", backends: str = ",".join(attention_study.BACKENDS), heads: tuple[int, int, int] = (8, 1, 256), batch: int = 1, repeats: int = 5,
        out: Path | None = None, json: bool = False,  # noqa: A002
    ) -> tuple:  # fmt: skip
        """
        Args:
            lengths: Positions of queries and keys, ascending.
            backends: Of those, only these.
            heads: Query heads, key-value heads, head dimension; those of gemma_2b by default.
            batch: Sequences.
            repeats: Timed calls.
            out: Folder for attention.json and its figures.
            json: Print JSON, and nothing else.
        """
        return lengths, backends, heads, batch, repeats, out, json

    lengths, backends, heads, batch, repeats, out, as_json = parse(
        command, args=arguments, prog="sharder study attention", description=attention.__doc__
    )
    from sharder.study.scaling import parse_devices

    try:
        counts = parse_devices(lengths)
    except UserError:
        raise UserError(f"--lengths is {lengths!r}, but must be ascending numbers, as in 256,512,1024.") from None
    found = attention_study.study_attention(backends.split(","), counts, heads, batch, repeats, out)
    print(json.dumps(found, indent=1)) if as_json else attention_study.show(found, Console())
    return 0


def flags(arguments: list[str]) -> int:
    """Named sets of XLA's flags on the same work."""
    recipe, rest = (arguments[0], arguments[1:]) if arguments and not arguments[0].startswith("-") else ("tiny_lm", arguments)

    def command(repeats: int = 3, steps: int = 10, out: Path | None = None, json: bool = False) -> tuple:  # noqa: A002
        """
        Args:
            repeats: Fresh processes for every set.
            steps: Timed steps of each.
            out: Folder for flags.json.
            json: Print JSON, and nothing else.
        """
        return repeats, steps, out, json

    given, options = parse(command, args=rest, prog="sharder study flags", description=flags.__doc__, return_unknown_args=True)
    repeats, steps, out, as_json = given
    found = flags_study.study_flags(recipe, repeats, steps, out, options)
    print(json.dumps(found, indent=1)) if as_json else flags_study.show(found, Console())
    return 0

"""The options of a command: parsed by tyro from the signature of a function; a mistake in them is one message."""

import contextlib
import inspect
import io
import os
import re
from collections.abc import Callable, Sequence

import tyro

from sharder.fields import UserError

ONE_LINE = "10000"
"""Columns of a terminal on which no message is broken into lines."""


def parse(command: Callable, args: Sequence[str], prog: str, description: str | None, return_unknown_args: bool = False):
    """What `command` returns for these arguments; with `return_unknown_args` also those that it does not know.

    The docstring of `command` has the help of its arguments (`Args:`). Raises UserError, with the way to the help, where tyro refuses
    the arguments; `--help` prints and raises SystemExit.
    """
    # tyro reads the arguments of a docstring only where it begins with a summary.
    if inspect.cleandoc(command.__doc__ or "").startswith("Args:"):
        command.__doc__ = f"{description}\n{command.__doc__}"

    def attempt():
        return tyro.cli(command, args=list(args), prog=prog, description=description, return_unknown_args=return_unknown_args)

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return attempt()
    except SystemExit as end:
        if end.code != 2:
            raise
    # Once more, for the message.
    errors, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = ONE_LINE
    try:
        with contextlib.suppress(SystemExit), contextlib.redirect_stderr(errors):
            attempt()
    finally:
        del os.environ["COLUMNS"]
        os.environ.update({} if columns is None else {"COLUMNS": columns})
    raise UserError(f"{message_of(errors.getvalue())} ({prog} --help says more)")


PLAINLY = (
    # Sections refuse values in words of their own, with the option.
    (r"^Error parsing (config\S*: (?=--))?", ""),
    (r"invalid literal for int\(\) with base 10: (.*)", r"\1 is no whole number"),
    (r"could not convert string to float: (.*)", r"\1 is no number"),
)
"""What tyro and Python say, and what a user is told."""


def message_of(box: str) -> str:
    """The words of a framed message of tyro in one line, without frame, title and what is repeated from the help."""
    rows = [line.strip().strip("│").strip() for line in box.splitlines() if line.startswith("│")]
    end = next((i for i, row in enumerate(rows) if row.startswith(("For full helptext", "Argument helptext"))), len(rows))
    parts = re.split(r" *─+ *", " ".join(rows[:end]))
    message = ". ".join(part for part in parts if part)
    for pattern, words in PLAINLY:
        message = re.sub(pattern, words, message)
    return message or box.strip()

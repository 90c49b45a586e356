"""Fields of a configuration, checked and brought to their types where it is built: neither a recipe file nor a config.json is typed."""

import dataclasses
import numbers
import os
import sys
import types
from functools import cache
from typing import Literal, Union, get_args, get_origin, get_type_hints


class UserError(ValueError):
    """Something that the user can mend: the command line prints it and exits with code 2."""


def require(ok: bool, name: str, value: object, should_be: str) -> None:
    """Raises UserError naming the option, what was given and what it should be."""
    if not ok:
        option = "--" + name.replace("_", "-")
        raise UserError(f"{option} is {value!r}, but must be {should_be}.")


def require_choice(name: str, value: object, choices: object) -> None:
    """The command line checks choices by itself; a recipe file or a config.json does not."""
    require(value in get_args(choices), name, value, f"one of {', '.join(get_args(choices))}")


def check_fields(section: object, name: str) -> None:
    """Brings every field of a frozen dataclass to its declared type: a list to a tuple, a path to its text, 1 to 1.0.

    Raises UserError naming the option where a value has another type, or is a number that is not finite.
    """
    for field, hint in _hints(type(section)).items():
        value = getattr(section, field)
        converted = _converted(f"{name}.{field}", value, hint)
        if converted is not value:
            object.__setattr__(section, field, converted)


def check_sections(config: object) -> None:
    """Raises UserError where a section of the configuration is something else."""
    for name, hint in _hints(type(config)).items():
        classes = get_args(hint) or (hint,)
        value = getattr(config, name)
        should_be = " or ".join(c.__name__ for c in classes)
        if not isinstance(value, classes):
            raise UserError(f"section {name} of the configuration is {value!r}, but must be a {should_be}.")


@cache
def _hints(cls: type) -> dict[str, object]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _converted(name: str, value: object, hint: object) -> object:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    (kind,) = [k for k in kinds if k is not type(None)]
    if dataclasses.is_dataclass(kind):
        require(isinstance(value, kind), name, value, f"a {kind.__name__}")
        return value
    if kind is bool:
        require(isinstance(value, bool), name, value, "True or False")
        return value
    if kind is int:
        require(isinstance(value, numbers.Integral) and not isinstance(value, bool), name, value, "an integer")
        return int(value)
    if kind is float:
        require(isinstance(value, numbers.Real) and not isinstance(value, bool), name, value, "a number")
        require(abs(value) <= sys.float_info.max, name, value, "finite")
        return float(value)
    if kind is str:
        require(isinstance(value, (str, os.PathLike)), name, value, "a text")
        return os.fspath(value)
    if get_origin(kind) is Literal:
        require_choice(name, value, kind)
        return value
    if get_origin(kind) is tuple:
        require(isinstance(value, (list, tuple)), name, value, "a tuple")
        return tuple(_converted(name, item, get_args(kind)[0]) for item in value)
    raise AssertionError(f"{name} has a type that is not checked: {hint}")

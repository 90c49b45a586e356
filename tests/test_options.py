"""Every numeric option of a run outside its range: refused in one line that names it."""

import dataclasses
import math
from collections.abc import Iterator
from typing import get_args, get_type_hints

import pytest

from sharder.config import RunConfig, UserError
from sharder.recipes import load_recipe

# Together they have every section and every kind of model.
RECIPES = ("tiny_lm", "llama_tiny", "mlp", "pi0_tiny")


def numeric_fields(section: object) -> Iterator[tuple[object, str, type]]:
    """A section, the name of a field that takes one number, and its type; of all sections below too."""
    for name, hint in get_type_hints(type(section)).items():
        value, kinds = getattr(section, name), {k for k in get_args(hint) or (hint,) if k is not type(None)}
        if dataclasses.is_dataclass(value):
            yield from numeric_fields(value)
        elif kinds <= {int, float}:
            yield section, name, kinds.pop()


def sections() -> dict[str, tuple[object, str, type]]:
    found = (field for recipe in RECIPES for field in numeric_fields(load_recipe(recipe)))
    return {
        f"{type(section).__name__}.{name}": (section, name, kind)
        for section, name, kind in found
        if not isinstance(section, RunConfig)
    }


FIELDS = sections()


@pytest.mark.parametrize("value", [-7, math.nan, 1e400, "1"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_number_out_of_range_is_refused_by_name(field, value):
    section, name, kind = FIELDS[field]
    with pytest.raises(UserError, match=rf"^--[^ \n]*\.{name.replace('_', '-')} is [^\n]*, but must be [^\n]+$"):
        dataclasses.replace(section, **{name: kind(value) if value == -7 else value})


def test_every_section_has_numeric_options():
    assert len(FIELDS) > 60

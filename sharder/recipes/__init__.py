"""Recipes: functions that return a RunConfig. A recipe is a name from this table or path/to/file.py:function."""

import importlib
import importlib.util
import sys
from pathlib import Path

from sharder.config import RunConfig, UserError

RECIPES = {
    "tiny_lm": "sharder.recipes.tiny_lm:tiny_lm",
    "gpt": "sharder.recipes.gpt:gpt",
    "gpt_medium": "sharder.recipes.gpt:gpt_medium",
    "gpt_large": "sharder.recipes.gpt:gpt_large",
    "gpt_xl": "sharder.recipes.gpt:gpt_xl",
    "llama_tiny": "sharder.recipes.llama:llama_tiny",
    "llama": "sharder.recipes.llama:llama",
    "llama_8b": "sharder.recipes.llama:llama_8b",
    "mlp": "sharder.recipes.mlp:mlp",
    "pi0": "sharder.recipes.pi0:pi0",
    "pi05": "sharder.recipes.pi0:pi05",
    "pi0_lora": "sharder.recipes.pi0:pi0_lora",
    "pi05_lora": "sharder.recipes.pi0:pi05_lora",
    "pi0_tiny": "sharder.recipes.pi0:pi0_tiny",
    "pi05_tiny": "sharder.recipes.pi0:pi05_tiny",
    "pi0_small": "sharder.recipes.pi0:pi0_small",
}


def split_name(arguments: list[str], what: str, usage: str) -> tuple[str, list[str]]:
    """The leading positional argument and the rest; for --help in its place says what it hangs on, and ends."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: {usage}\nThe options are those of the {what.lower()}: name it before --help")
        raise SystemExit(0)
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"{what} is missing. Usage: {usage}")
    return arguments[0], arguments[1:]


def find_recipe(name: str):
    """The function behind a name or path/to/file.py:function. Raises UserError where there is none."""
    if name in RECIPES:
        module, function = RECIPES[name].split(":")
        return getattr(importlib.import_module(module), function)
    path, _, function = name.rpartition(":")
    if not path.endswith(".py"):
        raise UserError(f"there is no recipe {name!r}: use one of {', '.join(RECIPES)}, or path/to/file.py:function.")
    if not Path(path).is_file():
        raise UserError(f"recipe {name}: there is no file {path}.")
    spec = importlib.util.spec_from_file_location(f"recipe_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"recipe {name}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, function, None)):
        raise UserError(f"recipe {name}: {path} has no function {function!r}.")
    return getattr(module, function)


def load_recipe(name: str) -> RunConfig:
    """The configuration that a recipe returns. Raises UserError where it returns something else."""
    recipe = find_recipe(name)
    try:
        config = recipe()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"recipe {name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(config, RunConfig):
        raise UserError(f"recipe {name} returned {type(config).__name__}, but must return a sharder.config.RunConfig.")
    return config

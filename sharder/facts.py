"""config.json of a run: its configuration, and what was known of the data, versions and devices when it was started."""

import json
from pathlib import Path

from sharder.config import RunConfig, UserError, from_dict

WAY_OUT = "Restore it from a copy, or use another run."


def read_facts(run_dir: Path) -> dict:
    """All of config.json. Raises UserError where there is none, or it is damaged."""
    path = run_dir / "config.json"
    if not path.exists():
        raise UserError(f"{run_dir} is not a run: it has no config.json.")
    try:
        facts = json.loads(path.read_bytes(), parse_constant=_refuse)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}. {WAY_OUT}") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("config"), dict):
        raise UserError(f"{path} is damaged: it holds no configuration. {WAY_OUT}")
    return facts


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def read_config(run_dir: Path) -> RunConfig:
    """The configuration that a run was started with. Raises UserError as `read_facts`, or where it is of another version."""
    return config_of(read_facts(run_dir), run_dir)


def config_of(facts: dict, run_dir: Path) -> RunConfig:
    """The configuration in facts of `run_dir`."""
    try:
        return from_dict(facts["config"])
    except UserError as error:
        raise UserError(f"{run_dir / 'config.json'}: {error} {WAY_OUT}") from None

"""The import directions of the house, read off the syntax trees, and what must not load jax."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sharder

ROOT = Path(sharder.__file__).parent

# A module imports only from ranks below its own, or from its own folder.
RANKS = [
    {"fields"},
    {"data_config", "model_config"},
    {"config", "events", "stop"},
    {"channel", "finding", "options"},
    {
        "accounting",
        "backends",
        "exactness",
        "compile_cache",
        "facts",
        "heartbeat",
        "identity",
        "lifeline",
        "lock",
        "process_log",
        "recipes",
        "rendezvous",
    },
    {"place", "agreement"},
    {"sharding", "ops"},
    {"models"},
    {"data", "checkpoint", "cluster"},
    {"instrument"},
    {"preflight"},
    {"train"},
    {"serve", "launch", "report", "weights"},
    {"sim", "study"},
    {"ending"},
    {"cli", "session"},
]
# The demo compares two runs, and a report begins with the ledger; a layout serves the ops' protocol.
ALLOWED_SIDEWAYS = {
    ("launch", "report"),
    ("report", "launch"),
    ("sharding", "ops"),
}


def rank(room: str) -> int:
    return next(i for i, rooms in enumerate(RANKS) if room in rooms)


def imports_of(path: Path) -> set[str]:
    """Rooms of the package that a file imports from, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"sharder.{a.name}" for a in node.names] if node.module == "sharder" else [node.module]
        found |= {n.split(".")[1] for n in names if n.startswith("sharder.")}
    return found - {"__version__"}


def violations(files: dict[str, set[str]]) -> list[str]:
    """`files`: imported rooms by the importing room."""
    return [
        f"{room} imports {other}"
        for room, others in files.items()
        for other in sorted(others)
        if other != room and rank(other) >= rank(room) and (room, other) not in ALLOWED_SIDEWAYS
    ]


def test_imports_run_downwards():
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room not in ("__init__", "__main__"):
            found += [f"{path.relative_to(ROOT)}: {v}" for v in violations({room: imports_of(path)})]
    assert not found, found


def test_an_upward_import_would_be_seen():
    assert violations({"models": {"train"}, "ops": {"models"}}) == ["models imports train", "ops imports models"]


@pytest.mark.parametrize(
    "module",
    ["sharder", "sharder.config", "sharder.events", "sharder.stop", "sharder.recipes", "sharder.cli", "sharder.session"],
)
def test_loads_no_jax(module):
    assert_loads_no_jax([module])


@pytest.mark.parametrize("folder", ["launch", "report"])
def test_a_supervisor_and_a_report_load_no_jax(folder):
    assert_loads_no_jax(
        [f"sharder.{folder}"] + [f"sharder.{folder}.{p.stem}" for p in (ROOT / folder).glob("*.py") if p.stem != "__init__"]
    )


def assert_loads_no_jax(modules: list[str]) -> None:
    code = f"import sys, {', '.join(modules)}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

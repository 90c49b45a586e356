"""docs/ names only what exists: files, attributes, tests, commands with their options, links, and figures of the layouts."""

import ast
import contextlib
import dataclasses
import functools
import io
import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import tyro

from sharder import cli
from sharder.config import MODEL_CONFIGS, ParallelConfig, RunConfig, UserError
from sharder.recipes import load_recipe
from sharder.sharding.axes import AxisRules, ParamDecl
from sharder.sharding.mesh import MeshShape, make_mesh
from sharder.sharding.plan import make_plan
from sharder.sharding.policy import LAYOUTS
from sharder.sharding.show import to_json

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
SEEDS = ROOT / "docs" / "seeds.md"
COMPARISONS = [ROOT / "docs" / "from-openpi.md", ROOT / "docs" / "from-maxtext.md"]
STATE = re.compile(r"done|issue [3-9]")


class Row(NamedTuple):
    """A row of a table, by the headings of its columns."""

    line: int
    section: str
    cells: dict[str, str]


def read_rows(text: str) -> list[Row]:
    """The rows of all tables. Raises ValueError for a row with more or fewer cells than its heading."""
    rows, section, headings = [], "", None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            section = line.lstrip("# ")
        if not line.startswith("|"):
            headings = None
            continue
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if headings is None:
            headings = cells
        elif not all(set(c) <= set("-: ") for c in cells):
            if len(cells) != len(headings):
                raise ValueError(f"line {number}: {len(cells)} cells under {len(headings)} headings")
            rows.append(Row(number, section, dict(zip(headings, cells))))
    return rows


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@functools.cache
def definitions(path: Path) -> dict[str, type]:
    """What a file defines: `name`, and `Class.name` for members and fields, with the kind of node."""
    found = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[prefix + node.name] = type(node)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update({prefix + t.id: type(node) for t in targets if isinstance(t, ast.Name)})

    visit(ast.parse(path.read_text()).body, "")
    return found


def problem_of_target(target: str) -> str | None:
    """`path` or `path::name`, relative to the root."""
    path, _, name = target.partition("::")
    if not (ROOT / path).is_file():
        return f"there is no file {path}"
    if name and name not in definitions(ROOT / path):
        return f"{path} defines no {name}"
    return None


def problem_of_test(target: str) -> str | None:
    path, _, name = target.partition("::")
    if not (path.startswith("tests/") and name.startswith("test_")):
        return f"{target} is not a test"
    problem = problem_of_target(target)
    if problem is None and definitions(ROOT / path)[name] is not ast.FunctionDef:
        problem = f"{target} is not a function"
    return problem


class Parsed(Exception):
    """Raised in place of what a command does after its options were read."""


def parse_only(*args, real=tyro.cli, **kwargs):
    real(*args, **kwargs)
    raise Parsed


@functools.cache
def problem_of_sharder(arguments: tuple[str, ...]) -> str | None:
    """Lets the command read its own arguments, and stops it there."""
    name, *rest = arguments or ("",)
    if name not in cli.COMMANDS:
        return f"sharder has no command {name!r}"
    if name == "launch" and "--" in rest:
        problem = problem_of_sharder(tuple(rest[rest.index("--") + 1 :]))
        if problem:
            return problem
    said = io.StringIO()
    with (
        mock.patch.object(tyro, "cli", parse_only),
        mock.patch("sharder.facts.read_config", lambda run_dir: load_recipe("tiny_lm")),
        mock.patch("sharder.stop.StopRequest.listen", lambda self: self),  # it would take the signals of all later tests
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            cli.COMMANDS[name](rest)
        except Parsed:
            return None
        except UserError as error:
            return str(error)
        except SystemExit as end:
            return None if end.code in (0, None) else " ".join(said.getvalue().replace("│", " ").split())
    return f"sharder {name} read no options"


def problem_of_command(command: str) -> str | None:
    """A whole line, `sharder ...`, `make ...` or `python ...` with a program of ours."""
    program, *rest = shlex.split(command, comments=True) or [""]
    if program == "sharder":
        return problem_of_sharder(tuple(rest))
    if program == "python" and rest and (ROOT / rest[0]).is_file():
        return None
    targets = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.M)
    if program == "make" and rest and set(rest) <= set(targets):
        return None
    return f"{command!r} is neither a command of sharder, nor a target of the Makefile, nor a program of ours"


def options_of_train() -> set[str]:
    sections = [(f.name, f.type) for f in dataclasses.fields(RunConfig) if f.name != "model"]
    sections += [("model", cls) for cls in MODEL_CONFIGS.values()]
    fields = {f"--{name}.{f.name}".replace("_", "-") for name, cls in sections for f in dataclasses.fields(cls)}
    return fields | {"--run-dir", "--resume", "--resume-from", "--rewind", "--print-config"}


def problem_of_option(option: str) -> str | None:
    """`--name`, or `--name value` as given to sharder train."""
    if len(shlex.split(option)) > 1:
        return problem_of_command(f"sharder train tiny_lm --run-dir x {option}")
    return None if option in options_of_train() else f"sharder train has no option {option}"


def problems_of_seed_row(cells: dict[str, str]) -> list[str]:
    """A row that is done names a place and a test, all of which exist; another names no target."""
    if not STATE.fullmatch(cells["state"]):
        return [f"state {cells['state']!r} is neither done nor an issue from 3 to 9"]
    columns = {"here": problem_of_target, "command": problem_of_command, "test": problem_of_test}
    if cells["state"] != "done":
        return [f"{cells['state']} brings it, so that there is no {s} yet" for c in columns for s in spans(cells[c])]
    found = [p for column, problem in columns.items() for p in map(problem, spans(cells[column])) if p]
    return found + [f"done, but without a {c}" for c in ("here", "test") if not spans(cells[c])]


def problems_of_comparison(cells: dict[str, str]) -> list[str]:
    """What is done names only commands and options that are accepted."""
    if not STATE.fullmatch(cells["state"]) and cells["state"] != "none":
        return [f"state {cells['state']!r} is neither done, none, nor an issue from 3 to 9"]
    if cells["state"] != "done":
        return []
    problem = lambda s: problem_of_option(s) if s.startswith("--") else problem_of_command(s)  # noqa: E731
    return [p for p in map(problem, (s for s in spans(cells["sharder"]) if s.startswith(("--", "sharder ", "make ")))) if p]


def dead_links(path: Path) -> list[str]:
    """Relative links of a Markdown file whose target is not there."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", path.read_text(), flags=re.M | re.S)
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]
    return [link for link in links if link and not (path.parent / link).exists()]


def commands_in_blocks(text: str) -> list[str]:
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line.startswith(("sharder ", "make ", "python "))]


GOOD = {
    "what it names": "`maybe_initialize`",
    "here": "`sharder/place.py::given_place`, `sharder/data/order.py::Order.seed`",
    "command": "`sharder launch --processes 2 -- train tiny_lm --run-dir runs/a --train.steps 3`",
    "test": "`tests/test_docs.py::test_a_true_row_has_no_problem`",
    "state": "done",
}


def test_a_true_row_has_no_problem():
    assert problems_of_seed_row(GOOD) == []
    assert problems_of_seed_row(dict.fromkeys(GOOD, "-") | {"state": "issue 9"}) == []


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"here": "`sharder/nowhere.py`"}, "no file sharder/nowhere.py"),
        ({"here": "`sharder/cluster.py::proces_environment`"}, "defines no proces_environment"),
        ({"here": "`sharder/data/order.py::Order.stride`"}, "defines no Order.stride"),
        ({"here": "`sharder/data/order.py::ids`"}, "defines no ids"),
        ({"here": "Order"}, "without a here"),
        ({"test": "-"}, "without a test"),
        ({"test": "`tests/test_docs.py::test_nothing`"}, "defines no test_nothing"),
        ({"test": "`tests/test_docs.py::GOOD`"}, "is not a test"),
        ({"test": "`sharder/place.py::given_place`"}, "is not a test"),
        ({"command": "`sharder trian tiny_lm`"}, "no command 'trian'"),
        ({"command": "`sharder check tiny_ml`"}, "no recipe 'tiny_ml'"),
        ({"command": "`sharder check tiny_lm --parallel.degree 2`"}, "--parallel.degree"),
        ({"command": "`sharder check tiny_lm --parallel.policy zero3`"}, "zero3"),
        ({"command": "`sharder check tiny_lm --train.steps 0`"}, "must be from 1 to"),
        ({"command": "`sharder eval runs/a --sim nowhere`"}, "--sim"),
        ({"command": "`sharder launch --processes 2 -- train tiny_lm --steps 3`"}, "--steps"),
        ({"command": "`make nothing`"}, "nor a target"),
        ({"command": "`python train.py`"}, "nor a program of ours"),
        ({"state": "issue 2"}, "from 3 to 9"),
        ({"state": "issue 10"}, "from 3 to 9"),
        ({"state": "almost"}, "neither done"),
        ({"state": "issue 4"}, "issue 4 brings it"),
    ],
    ids=str,
)
def test_a_planted_wrong_target_is_found(change, problem):
    assert any(problem in found for found in problems_of_seed_row(GOOD | change))


@pytest.mark.parametrize(
    "ours, problem",
    [("`--train.step`", "no option --train.step"), ("`--train.steps x`", "--train.steps"), ("`sharder tain`", "no command")],
)
def test_a_planted_wrong_option_is_found(ours, problem):
    assert problem in problems_of_comparison({"sharder": f"`--train.steps`, {ours}", "state": "done"})[0]
    assert problems_of_comparison({"sharder": ours, "state": "issue 5"}) == []


def test_a_planted_dead_link_is_found(tmp_path):
    (tmp_path / "there.md").touch()
    text = "[a](there.md#part) [b](https://x.y) [c](#part) [d](missing.md) `[e](code.md)`\n```\n[f](block.md)\n```\n"
    (tmp_path / "page.md").write_text(text)
    assert dead_links(tmp_path / "page.md") == ["missing.md"]


def test_a_row_with_a_missing_cell_is_an_error():
    with pytest.raises(ValueError, match="line 3: 1 cells under 2"):
        read_rows("| a | b |\n| --- | --- |\n| c |\n")


def test_every_target_of_what_is_done_exists():
    rows = read_rows(SEEDS.read_text())
    assert {tuple(r.cells) for r in rows} == {tuple(GOOD)}
    found = [f"line {r.line}: {p}" for r in rows for p in problems_of_seed_row(r.cells)]
    assert not found, "\n".join(found)


def test_each_document_has_its_table():
    sections = [r.section[:3] for r in read_rows(SEEDS.read_text())]
    assert list(dict.fromkeys(sections)) == ["000", "001", "003", "004"]


# Of the documents in ../shared/seeds: what they give a name or a number, so that no row is lost.
NAMED = """
6ND 57.7 MFU mfu roofline 12 all-gather reduce-scatter NVLink NCCL make_mesh fsdp_sharding data_sharding jax.device_put
process_index_stream dot_product_attention use_flash_attention pi0_flash_test.py SigLIP gemma_2b 16384 G1 G2 G3 G4 G5 G6
maybe_initialize JAX_COORDINATOR_ADDRESS NotImplementedError resume_position sampler.seek max_retries backoff 9.3 12.5
2.85 980 24.8 1.44 2.3 3.9 plot_results.py RLDS convergence
bootstrap xla_force_host_platform_device_count (128 mesh_has_multiple_devices shard_row_count_matches_mesh
shard_col_count_is_full sharded_matmul_matches_single_device shard_batch_equals_global_over_dp
shard_features_equal_global_over_mp s.skip s.summary s.save psum pjit shard_map 2105.04663 1e-4
n_embd n_attn vocab ShardingPlan ShardingPolicy per_device_batch_size 64 4096 tp=1 zero=True fsdp=False .shard
axis.py topology.py BaseTrainer
Mesh PartitionSpec NamedSharding jax.lax.pmean jax.debug.visualize_array_sharding 22,442 45.63 41,136 49.79 1.83 1024
Shakespeare nnx.state nnx.update softmax perplexity Orbax padding
""".split()


def test_every_name_of_the_documents_has_a_row():
    named = " ".join(r.cells["what it names"] for r in read_rows(SEEDS.read_text()))
    assert [n for n in NAMED if n not in named] == []


@pytest.mark.parametrize("page", COMPARISONS, ids=lambda p: p.name)
def test_every_option_of_a_comparison_is_accepted(page):
    rows = [r for r in read_rows(page.read_text()) if "state" in r.cells]
    found = [f"line {r.line}: {p}" for r in rows for p in problems_of_comparison(r.cells)]
    assert len(rows) > 20 and not found, "\n".join(found)


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda p: p.name)
def test_links_lead_to_files_and_commands_are_accepted(page):
    assert dead_links(page) == []
    found = {line: problem_of_command(line) for line in commands_in_blocks(page.read_text())}
    assert {line: p for line, p in found.items() if p} == {}


def test_words_of_the_glossary_are_in_order_and_at_home():
    rows = read_rows((ROOT / "docs" / "glossary.md").read_text())
    words = [r.cells["word"].lower() for r in rows]
    assert len(words) > 15 and words == sorted(words)
    found = [p for r in rows for p in map(problem_of_target, spans(r.cells["where"])) if p]
    assert not found, found


def example_plan(policy: str):
    rules = AxisRules(names=frozenset({"in", "mlp"}), tensor=("mlp",))
    decls = {"w": ParamDecl((1024, 4096), "float32", ("in", "mlp"))}
    return make_plan(decls, rules, ParallelConfig(policy=policy), MeshShape(1, 4, 2))


@pytest.mark.parametrize("policy", ["dp", "zero", "fsdp"])
def test_the_shards_of_the_example_are_those_of_the_program(policy):
    """A weight (1024, 4096) whose output dimension is divided by tensor and fsdp, on 4 replicas of 2 devices."""
    plan, mesh = example_plan(policy), make_mesh(MeshShape(1, 4, 2))
    shapes = [str(plan.shardings(layout, mesh)["w"].shard_shape((1024, 4096))) for layout in LAYOUTS]
    rows = [r.cells for r in read_rows((ROOT / "docs" / "sharding.md").read_text()) if list(r.cells) == ["policy", *LAYOUTS]]
    assert [c[layout] for c in rows if c["policy"] == policy and "1024" in c["storage"] for layout in LAYOUTS] == shapes


def test_every_field_of_plan_json_is_explained():
    plan = json.loads(json.dumps(to_json(example_plan("fsdp"), {})))
    fields = set(plan) | {f"params.PATH.{name}" for name in plan["params"]["w"]}
    rows = read_rows((ROOT / "docs" / "sharding.md").read_text())
    explained = {f for r in rows if "field" in r.cells for f in spans(r.cells["field"])}
    assert explained == fields - {"params"}

"""The lessons of docs/tutorial run as a reader runs them: every check holds, and record and figure are there."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from small import environment

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial"
LESSONS = sorted(p.stem for p in TUTORIAL.glob("[0-9]*.py"))

# What simulated devices cannot show. All else is checked.
SKIPPED = {"07_three_layouts": ["gradients_are_scattered"], "08_weak_scaling": ["ratio_is_near_the_ideal"]}

# The cases of the tour and of the tutorial that asked for these lessons: a lesson that loses one of them is noticed.
CASES = {
    "01_mesh_and_placement": {"mesh_has_multiple_devices", "shard_row_count_matches_mesh", "shard_col_count_is_full"},
    "02_matmul_and_collective": {"row_sharded_needs_one_all_reduce", "sharded_matmul_matches_single_device"},
    "03_resharding": {"rows_to_columns", "device_put_changes_the_parts"},
    "04_data_x_tensor_mesh": {"shard_batch_equals_global_over_dp", "shard_features_equal_global_over_mp"},
    "05_transformer_block": {"forward_has_the_minimum", "two_forward_two_backward", "block_matches_single_device"},
    "06_shard_map_by_hand": {"by_hand_equals_automatic", "pmean_equals_the_compilers_gradient"},
    "07_three_layouts": {f"{p}_{what}" for p in ("dp", "zero", "fsdp") for what in ("layouts", "trains_as_one_device")},
    "08_weak_scaling": {"ratio_is_printed_for_2_4_8"},
    "09_nnx_data_parallel": {"device_put_alone_changes_no_model", "losses_are_those_of_one_device"},
}


def start(script: Path, out: Path) -> subprocess.CompletedProcess:
    # A lesson finds its devices by itself, and JAX_PLATFORMS=cpu must not be needed.
    kept = {k: v for k, v in environment().items() if k != "JAX_PLATFORMS"}
    # The limit is for a stuck lesson only: 7 s of work once took 235 s on a machine that others were using.
    return subprocess.run(
        [sys.executable, str(script), "--out", str(out)], env=kept, capture_output=True, text=True, timeout=900
    )


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_keeps_what_it_says(name, tmp_path):
    done = start(TUTORIAL / f"{name}.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / f"{name}.json").read_text())
    states = {c["name"]: c["state"] for c in record["checks"]}
    assert [n for n, state in states.items() if state != "ok"] == SKIPPED.get(name, [])
    assert {n for n in CASES[name] if states.get(n) == "ok"} == CASES[name]
    assert all(c["said"] for c in record["checks"]) and record["measured"] and record["num_devices"] == 8
    assert ElementTree.parse(tmp_path / f"{name}.svg").getroot().tag.endswith("svg")


def write_lesson(folder: Path, body: str) -> Path:
    path = folder / "10_planted.py"
    head = f"import sys\nsys.path.insert(0, {str(TUTORIAL)!r})\nfrom lesson import pyplot, run\n"
    path.write_text(f"{head}\n\ndef teach(lesson):\n    {body}\n    return pyplot.figure()\n\n\nrun(teach)\n")
    return path


PLANTED = {
    "lesson.check('true', 2 > 1, '2'); lesson.skip('skipped', 'no'); lesson.refused('refused', lambda: 1 / 0, 'by zero')": (
        {"true": "ok", "skipped": "skipped", "refused": "ok"},
        0,
    ),
    "lesson.check('no', 2 < 1, '2'); lesson.refused('accepted', lambda: 1, 'x'); lesson.refused('other', lambda: 1 / 0, 'x')": (
        {"no": "failed", "accepted": "failed", "other": "failed"},
        1,
    ),
    "lesson.check('true', 2 > 1, '2'); 1 / 0": ({"true": "ok", "lesson_ran_to_its_end": "failed"}, 1),
}


@pytest.mark.parametrize("body", PLANTED, ids=["passing", "failing", "crashing"])
def test_a_failed_check_is_told_by_the_exit_code(body, tmp_path):
    done = start(write_lesson(tmp_path, body), tmp_path / "out")
    checks = json.loads((tmp_path / "out" / "10_planted.json").read_text())["checks"]
    assert ({c["name"]: c["state"] for c in checks}, done.returncode) == PLANTED[body]


@pytest.fixture
def lesson(monkeypatch):
    """The helper, importable as it is when a lesson starts."""
    monkeypatch.syspath_prepend(str(TUTORIAL))
    return __import__("lesson")


@pytest.mark.parametrize(
    "groups, size",
    [
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", 2),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,2,2]T(0,2,1)) {'a':(2)2}", 2),
        ("source_target_pairs={{0,1},{1,0}}", 2),
        ("replica_groups={}", 8),
    ],
)
def test_groups_are_read_in_every_form(lesson, groups, size):
    assert lesson.group_size(f"%x = f32[4]{{0}} all-reduce(%y), channel_id=1, {groups}, to_apply=%add") == size


def test_combined_arrays_are_one_collective_of_all_their_bytes(lesson):
    text = "%x = (f32[16,4]{1,0}, bf16[8]{0}, f32[]) all-reduce(%a, %b, %c), replica_groups={{0,1,2,3}}, to_apply=%add"
    program = type("Program", (), {"as_text": lambda self: text})()
    assert lesson.collectives(program) == [
        {"kind": "all-reduce", "group_size": 4, "payload_bytes": 276, "received_bytes": 2 * 276 * 3 / 4}
    ]


def test_the_readme_leads_through_every_lesson():
    text = (TUTORIAL / "README.md").read_text()
    assert [name for name in LESSONS if f"({name}.py)" not in text] == []
    assert len(LESSONS) == len(CASES) == 9

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from sharder.config import UserError
from sharder.weights import golden

DATA = Path(__file__).parents[1] / "data" / "golden"
names = pytest.mark.parametrize("name", ["pi0_tiny", "pi05_tiny"])


@cache
def computed(name: str):
    case = golden.read(DATA / f"{name}.npz")
    return case, golden.compute(case)


def rows_of(name: str, monkeypatch, change=lambda case: case) -> list[golden.Quantity]:
    case, found = computed(name)
    monkeypatch.setattr(golden, "compute", lambda _: found)
    return golden.compare(change(case))


@names
def test_every_quantity_is_that_of_the_original(name, monkeypatch):
    rows = rows_of(name, monkeypatch)
    assert [row for row in rows if not row.ok] == []


@names
def test_nothing_that_was_recorded_is_left_out(name, monkeypatch):
    compared = {row.name for row in rows_of(name, monkeypatch)}
    with np.load(DATA / f"{name}.npz") as file:
        recorded = {x.split("/", 1)[1] for x in file.files if x.split("/")[0] in ("intermediate", "output")}
        params = {f"grad_norm/{x.removeprefix('params/')}" for x in file.files if x.startswith("params/")}
    assert compared == recorded | params


def test_a_velocity_that_is_off_by_2e_4_is_seen(monkeypatch):
    def change(case):
        velocity = case.expected["velocity"].copy()
        velocity[0, 0, 0] += 2e-4
        return replace(case, expected=case.expected | {"velocity": velocity})

    assert [row.name for row in rows_of("pi0_tiny", monkeypatch, change) if not row.ok] == ["velocity"]


def test_a_gradient_norm_that_is_off_by_two_in_ten_thousand_is_seen(monkeypatch):
    path = "action_in_proj/kernel"

    def change(case):
        norms = case.facts["grad_norms"]
        return replace(case, facts=case.facts | {"grad_norms": norms | {path: norms[path] * 1.0002}})

    assert [row.name for row in rows_of("pi0_tiny", monkeypatch, change) if not row.ok] == [f"grad_norm/{path}"]


@pytest.mark.slow
@names
def test_bfloat16_stays_within_two_percent(name):
    rows = golden.compare(golden.read(DATA / f"{name}.npz", "bfloat16"))
    assert [row for row in rows if not row.ok] == []


def test_sizes_of_the_json_that_are_not_those_of_the_arrays_are_named(tmp_path):
    text = (DATA / "pi0_tiny.json").read_text().replace('"vocab": 257', '"vocab": 300')
    (tmp_path / "x.json").write_text(text)
    (tmp_path / "x.npz").write_bytes((DATA / "pi0_tiny.npz").read_bytes())
    with pytest.raises(UserError, match="vocab: 300 in the .json, 257 in the arrays"):
        golden.read(tmp_path / "x.npz")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="x.npz does not exist"):
        golden.read(tmp_path / "x.npz")

import json
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


def written(folder: Path, change=lambda arrays, facts: None) -> Path:
    """The recorded case of pi0 with something changed in its arrays or facts."""
    with np.load(DATA / "pi0_tiny.npz") as file:
        arrays = {name: file[name] for name in file.files}
    facts = json.loads((DATA / "pi0_tiny.json").read_text())
    change(arrays, facts)
    np.savez(folder / "x.npz", **arrays)
    (folder / "x.json").write_text(json.dumps(facts))
    return folder / "x.npz"


def without_recordings(arrays, facts):
    for name in [x for x in arrays if x.split("/")[0] in ("intermediate", "output")]:
        del arrays[name]
    del facts["grad_norms"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays, facts: arrays.pop("input/time"), "input/time is missing"),
        (lambda arrays, facts: arrays.pop("params/action_in_proj/bias"), r"bias: missing in the file, \(32,\) in the model"),
        (
            lambda arrays, facts: arrays.update({"params/action_in_proj/bias": np.zeros(3)}),
            r"bias: \(3,\) in the file, \(32,\) in",
        ),
        (lambda arrays, facts: arrays.update({"params/more/bias": np.zeros(3)}), r"more/bias: \(3,\) in the file, unknown"),
        (
            lambda arrays, facts: facts["grad_norms"].update({"more/bias": 1.0}),
            "1 gradient norms of unknown parameters: more/bias",
        ),
        (lambda arrays, facts: facts.update(loss=99.0), r"loss: 99.0 in the .json, 2.87"),
        (without_recordings, "nothing to compare"),
    ],
    ids=["input", "missing", "misshapen", "unexpected", "norm", "loss", "nothing"],
)
def test_a_case_that_is_not_whole_is_refused_with_what_is_wrong(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        golden.read(written(tmp_path, change))


def test_a_loss_that_stands_in_the_json_only_is_compared(tmp_path):
    case = golden.read(written(tmp_path, lambda arrays, facts: arrays.pop("output/loss")))
    assert case.expected["loss"] == np.float32(case.facts["loss"])


def test_damaged_files_are_named(tmp_path):
    path = written(tmp_path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole[: len(whole) // 2] + b"?" + whole[len(whole) // 2 + 1 :]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="x.npz is damaged or no .npz"):
            golden.read(path)
    path.write_bytes(whole)
    for text, message in (('{"a": ', "x.json cannot be read as JSON"), ("[1]", "x.json holds a list")):
        path.with_suffix(".json").write_text(text)
        with pytest.raises(UserError, match=message):
            golden.read(path)


def test_the_table_fits_80_columns(monkeypatch):
    assert max(map(len, golden.describe(rows_of("pi0_tiny", monkeypatch)).splitlines())) <= 80

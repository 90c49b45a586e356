"""`sharder profile` as a user runs it, on a small model."""

import json

import pytest
from small import RECIPE, sharder

ONE = ("--cluster.cpu-devices", "1", "--steps", "3")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile") / "run"
    done = sharder("profile", RECIPE, *ONE, "--run-dir", folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def found(run_dir):
    return json.loads((run_dir[0] / "profile" / "profile.json").read_text())


def test_shares_of_parts_and_of_kinds_sum_to_one(found):
    assert sum(found["shares"].values()) == pytest.approx(1) and sum(found["kinds"].values()) == pytest.approx(1)
    assert found["shares"]["attention"] > 0 and found["shares"]["feed-forward"] > 0 and found["shares"]["optimizer"] > 0


def test_little_is_unattributed(found):
    assert found["unattributed"] < 0.15


def test_analytic_flops_are_those_of_the_compiled_program(found):
    assert found["flops_compiled"] == pytest.approx(found["flops_hardware"], rel=0.01)
    assert found["naive"]["flops_counted_by_the_compiler"] < 0.9 * found["flops_compiled"]  # a loop counted once


def test_the_difference_of_6nd_and_exact_is_that_of_the_modules(found):
    rows = found["flops_by_module"]
    assert sum(r["forward"] + r["backward"] for r in rows) == pytest.approx(found["flops"])
    assert sum(r["flops_6nd"] for r in rows) == pytest.approx(found["flops_6nd"])


def test_the_step_is_the_median_of_blocked_steps(found):
    assert found["step_time_s"] == sorted(found["steps_s"])[1] and found["mfu_exact"] > 0 and found["peak_source"] == "measured"


def test_both_wrong_ways_are_printed_beside_the_right_one(run_dir):
    _, text = run_dir
    for words in (
        "median of 3 blocked steps",
        "coverage",
        "verdict",
        "the wrong ways",
        "cost analysis counts",
        "roofline",
        "6ND",
    ):
        assert words in text


def test_a_profile_alone_is_drawn_as_its_last_line_says(run_dir):
    folder, text = run_dir
    assert f"sharder report {folder}" in " ".join(text.split())
    done = sharder("report", folder)
    assert done.returncode == 0, done.stderr
    page = (folder / "report.html").read_text()
    assert "verdict:" in page and "Not recorded: events.jsonl" in page


def test_a_run_may_begin_in_the_folder_of_a_profile(run_dir):
    from sharder.facts import is_run

    assert not is_run(run_dir[0])


def test_json_and_nothing_else_in_exact_mode_over_two_devices():
    done = sharder("profile", RECIPE, "--cluster.cpu-devices", "2", "--steps", "2", "--parallel.reduction", "exact", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sum(found["shares"].values()) == pytest.approx(1) and found["shares"]["gradient sums"] > 0
    assert found["flops_compiled"] == pytest.approx(found["flops_hardware"], rel=0.01)


@pytest.mark.parametrize(
    "options, message", [(("--steps", "0"), "--steps is 0"), (("--ablate", "nothing"), "--ablate is nothing")]
)
def test_what_cannot_be_done_is_said_at_once(options, message):
    done = sharder("profile", RECIPE, *ONE, *options)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr

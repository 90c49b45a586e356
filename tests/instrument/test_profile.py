"""`sharder profile` as a user runs it, on a small model."""

import io
import json

import pytest
from rich.console import Console
from small import RECIPE, sharder

from sharder.instrument.profile_report import _flops_table, _roofline_table
from sharder.instrument.words import sentences

ONE = ("--cluster.cpu-devices", "1", "--steps", "3")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile") / "run"
    done = sharder("profile", RECIPE, *ONE, "--ablate", "attention", "--run-dir", folder)
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
    text = " ".join(run_dir[1].split())
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


def test_no_number_is_cut_off_in_a_narrow_terminal(found):
    """Of a model of pi0's size, in 80 columns."""
    large = found | {
        "num_params": 3_238_000_000, "tokens_per_step": 1_234_567, "flops": 1.2345e15, "flops_6nd": 2.3456e15,
        "flops_by_module": [r | {"num_params": r["num_params"] * 1000, "forward": 1.2e14, "backward": 2.3e14, "recomputed": 1.2e13} for r in found["flops_by_module"]],
        "roofline": {"collectives fsdp": r | {"flops": 1.2345e13, "moved_bytes": 1.23e11, "attainable_flops": 9.8e14} for r in found["roofline"].values()},
    }  # fmt: skip
    console = Console(width=80, file=io.StringIO())
    console.print(_flops_table(large), _roofline_table(large))
    text = console.file.getvalue()
    assert "3238.000" in text and "2346" in text and "1,234,567" in text and "bandwidth" in text and "…" not in text


def test_what_is_printed_fits_80_columns(run_dir):
    """Also where the trace is kept; only the path that it is kept at may be longer."""
    *lines, path = run_dir[1].splitlines()
    assert max(map(len, lines)) <= 80 and path.startswith(str(run_dir[0]))
    assert any("attention scores" in line for line in lines)  # no name is broken for the digits of a small model


def test_what_ablation_measured_has_its_spread(run_dir, found):
    a = found["ablation"]
    assert a["scope"] == "attention" and a["share_low"] <= a["share"] <= a["share_high"] < 1
    assert "half of all pairs between" in " ".join(run_dir[1].split())


def test_what_cannot_be_is_doubted(found):
    """An ablation that makes a step slower, and a part that reaches more than its bandwidth allows."""
    part = {"achieved_flops": 3.0, "attainable_flops": 1.0}
    calm = found | {
        "ablation": {"scope": "attention", "without_s": 1.0, "whole_s": 1.5, "share": 0.3, "share_low": 0.2, "share_high": 0.4}
    }
    calm["roofline"] = {"attention": part | {"achieved_flops": 1.01}}
    odd = calm | {"ablation": calm["ablation"] | {"share_low": -0.1}, "roofline": {"attention": part, "loss": part}}
    text = lambda told: " ".join(sentences(told | {"memory_source": "measured here"}))  # noqa: E731
    assert "leaving attention out cannot slow a step down" in text(odd) and "cannot slow" not in text(calm)
    assert "attention, loss reach more than memory bandwidth allows" in text(odd) and "bandwidth allows" not in text(calm)


def test_predicted_memory_stands_beside_compiled_and_measured(run_dir, found):
    predicted, compiled, text = found["memory"]["predicted"], found["memory"]["compiled"], " ".join(run_dir[1].split())
    assert predicted["total"] == sum(size for part, size in predicted.items() if part != "total")
    assert (
        f"{predicted['total'] / 2**20:,.1f} MiB predicted (params " in text and f"compiled {compiled / 2**20:,.1f} MiB" in text
    )
    assert found["memory"]["measured"] is None and "measured nothing, since this backend does not count" in text


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
    "options, message",
    [
        (("--steps", "0"), "--steps is 0"),
        (("--ablate", "nothing"), "--ablate is nothing"),
        (("--run-dir", __file__), "/profile cannot be made: Not a directory"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(options, message):
    done = sharder("profile", RECIPE, *ONE, *options)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr

"""Studies of attention and of flags."""

import json

import pytest
from small import sharder

from sharder.study.attention import fitted_exponent
from sharder.study.flags import SETS, knows


def test_the_exponent_is_that_of_the_longer_lengths():
    """A constant below, squares above: the fit is of the longer half."""
    lengths = [64, 128, 256, 512, 1024]
    assert fitted_exponent(lengths, [float(t**2) for t in lengths]) == pytest.approx(2)
    assert fitted_exponent(lengths, [1e5, 1e5, 256.0**2, 512.0**2, 1024.0**2]) == pytest.approx(2)
    assert fitted_exponent([64], [1.0]) is None


def test_attention_is_measured_and_a_backend_that_cannot_serve_is_named(tmp_path):
    options = (
        "--lengths",
        "16,32",
        "--backends",
        "reference,cudnn",
        "--heads",
        "2",
        "1",
        "8",
        "--repeats",
        "2",
        "--out",
        tmp_path,
    )
    done = sharder("study", "attention", *options, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [p["length"] for p in found["points"]["reference"]] == [16, 32] and "cudnn" in found["left_out"]
    assert (tmp_path / "attention_time.svg").exists() and json.loads((tmp_path / "attention.json").read_text()) == found


def test_flags_that_this_xla_does_not_know_are_seen():
    assert knows(SETS["cpu"]["concurrent scheduler"]) and not knows(("--xla_no_such_flag=true",))


@pytest.mark.parametrize(
    "arguments, message",
    [((), "attention or flags is missing"), (("attention", "--lengths", "2,1"), "--lengths is '2,1'"), (("attention", "--backends", "x"), "--backends has x"),
     (("flags", "--repeats", "0"), "--repeats is 0")],
)  # fmt: skip
def test_bad_input_is_refused(arguments, message):
    done = sharder("study", *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr

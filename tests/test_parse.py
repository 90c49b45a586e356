"""Options of commands: a mistake is one line with a way out, and the help has every option's words."""

import json

import pytest
from small import sharder

from sharder.fields import UserError
from sharder.options import message_of, parse


def command(run_dir: str, steps: int = 1, rate: float = 0.5) -> tuple:
    """
    Args:
        steps: How many of them.
    """
    return run_dir, steps, rate


def read(*arguments):
    return parse(command, arguments, "sharder thing", "Does a thing.")


def test_what_fits_is_what_the_function_returns():
    assert read("--run-dir", "a", "--steps", "3") == ("a", 3, 0.5)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--run-dir", "a", "--steps", "two"], "--steps: 'two' is no whole number"),
        (["--run-dir", "a", "--rate", "fast"], "--rate: 'fast' is no number"),
        (["--run-dir", "a", "--stepz", "2"], "Unrecognized options: --stepz"),
        ([], "--run-dir"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option_and_the_help(arguments, words):
    with pytest.raises(UserError) as error:
        read(*arguments)
    assert words in str(error.value) and str(error.value).endswith("(sharder thing --help says more)")
    assert "\n" not in str(error.value) and not set("│─╭") & set(str(error.value))


def test_a_long_word_is_not_broken():
    name = "x" * 150
    with pytest.raises(UserError, match=name):
        read("--run-dir", "a", "--steps", name)


def test_the_help_has_the_words_of_the_docstring(capsys):
    with pytest.raises(SystemExit) as end:
        read("--help")
    text = capsys.readouterr().out
    assert end.value.code == 0 and "Does a thing." in text and "How many of them." in text


def test_what_has_no_frame_is_kept():
    assert message_of("something else\n") == "something else"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nothing_like_it"], "there is no recipe"),
        (["mlp", "--parallel.tensor", "-1"], "--parallel.tensor is -1, but must be at least 1"),
        (["mlp", "--topology", "h101:1x8"], "--topology is 'h101:1x8'"),
        (["mlp", "--topology", "h100:1x8", "--cluster.cpu-devices", "8"], "leave out --cluster.cpu-devices"),
        (["mlp", "--find"], "name it with --topology"),
    ],
)
def test_check_prints_json_whatever_is_refused(arguments, words):
    result = sharder("check", *arguments, "--json")
    assert result.returncode == 2
    (finding,) = json.loads(result.stdout)["findings"]
    assert finding["rule"] == "options" and words in finding["message"] and result.stderr == ""


@pytest.mark.parametrize("option", [["--report"], ["--show", "--out"]])
def test_check_refuses_a_file_that_it_could_not_write_before_it_begins(option, tmp_path):
    (tmp_path / "a.svg").mkdir()
    (tmp_path / "file").touch()
    for name, words in (("a.svg", "is a folder: name a file"), ("file/b.svg", "no folder")):
        result = sharder("check", "mlp", *option, tmp_path / name)
        assert result.returncode == 2 and words in result.stderr and result.stderr.count("\n") == 1


def test_check_makes_the_folder_of_its_report(tmp_path):
    result = sharder("check", "mlp", "--report", tmp_path / "new" / "r.json")
    assert result.returncode == 0 and "memory" in json.loads((tmp_path / "new" / "r.json").read_text())

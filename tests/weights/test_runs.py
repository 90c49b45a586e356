from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from small import sharder, small

from sharder import checkpoint
from sharder.config import LlamaConfig, UserError
from sharder.events import read_json_lines
from sharder.models.build import declare
from sharder.models.llama_weights import write_params
from sharder.stop import StopRequest
from sharder.train.loop import train
from sharder.weights.runs import export_weights, import_weights

MODEL = LlamaConfig(max_seq_len=32, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48, num_layers=2)
CONFIG = replace(small(), model=MODEL)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A folder of random weights, and the run that was begun with them."""
    folder = tmp_path_factory.mktemp("weights")
    rng = np.random.default_rng(0)
    params = {p: (0.1 * rng.standard_normal(d.shape)).astype(d.dtype) for p, d in declare(MODEL).params.items()}
    write_params(folder / "model", MODEL, params)
    message = import_weights(CONFIG, folder / "model", folder / "run")
    assert checkpoint.read_manifest(folder / "run", 0)["fingerprint"] in message
    return folder


def test_what_is_imported_is_exported(imported):
    export_weights(CONFIG, imported / "run", 0, imported / "again")
    ours, theirs = (load_file(imported / name / "model.safetensors") for name in ("again", "model"))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[k], theirs[k]) for k in ours)


def test_a_run_with_imported_weights_is_trained_on(imported):
    assert train(replace(CONFIG, train=replace(CONFIG.train, steps=2)), imported / "run", "must", StopRequest()) == 0
    records = read_json_lines(imported / "run" / "metrics.jsonl")[0]
    assert [r["step"] for r in records] == [1, 2] and all(np.isfinite(r["loss"]) for r in records)


def test_a_run_is_not_overwritten_by_weights(imported):
    with pytest.raises(UserError, match="holds a run already"):
        import_weights(CONFIG, imported / "model", imported / "run")


def test_models_without_a_format_are_refused(imported):
    with pytest.raises(UserError, match="weights of TransformerConfig have no format of another library"):
        export_weights(small(), imported / "run", 0, imported / "other")


def test_the_command_exports(imported):
    result = sharder("weights", "export", imported / "run", imported / "by-command", "--step", "0")
    assert result.returncode == 0 and (imported / "by-command" / "config.json").exists(), result.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("weights",), "import, export or check is missing"),
        (("weights", "merge"), "there is no command weights 'merge'"),
        (("weights", "import", "nowhere", "llama_tiny", "--run-dir", "x"), "nowhere has no config.json"),
        (("weights", "export", "nowhere", "x"), "nowhere is not a run"),
    ],
)
def test_bad_input_gets_one_message_and_exit_code_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = sharder(*arguments)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "x").exists()

"""`sharder serve` as a user starts it: what it says at once, and its life from start to signal."""

import json
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from small import environment, sharder, small
from websockets.sync.client import connect

from sharder.config import UserError, to_dict
from sharder.serve.command import run
from sharder.serve.wire import pack, unpack

LONG_S = 300


def test_a_port_that_is_taken_is_one_line_and_exit_code_2(robot_run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = sharder("serve", robot_run, "--port", port)
    assert result.returncode == 2 and result.stdout == ""
    assert (
        result.stderr
        == f"error: --host 127.0.0.1 --port {port} cannot be listened at: Address already in use. Give another --port, or 0 for any.\n"
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "RUN is missing. Usage: sharder serve RUN"),
        (["nowhere", "--port", "0"], "^nowhere does not exist: give a run, one of its checkpoints"),
        (["nowhere", "--port", "0", "--step", "3"], "^--step is 3, but nowhere is not a run"),
        (["RUN", "--port", "0", "--step", "7"], r"holds no checkpoint of step 7; it has \[1, 2\]"),
        (["RUN", "--port", "0", "--assets", "nowhere"], "--assets nowhere is no folder"),
        (["RUN", "--port", "0", "--host", "203.0.113.1"], "--host 203.0.113.1 --port 0 cannot be listened at"),
        (["RUN", "--port", "70000"], "--port is 70000, but must be from 0 to 65535"),
        (["RUN", "--batch-sizes", "0"], "--batch-sizes is .* but must be"),
        (["RUN", "--max-waiting", "0"], "--max-waiting is 0, but must be from 1"),
        (["RUN", "--num-steps", "0"], "--num-steps is 0, but must be from 1"),
        (["RUN", "--port", "0", "--api-key-file", "nowhere"], "--api-key-file nowhere cannot be read"),
        (["RUN", "--port", "0", "--metadata", "LIST"], "holds a list, but must be a JSON object"),
        (["RUN", "--port", "0", "--parallel.tensor", "9"], "= 9 devices, but there are 8"),
        (["LANGUAGE", "--port", "0"], "holds no checkpoint"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_cannot_be_served_is_one_message(tmp_path, monkeypatch, robot_run, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "config.json").write_text(json.dumps({"config": to_dict(small())}))
    places = {"RUN": str(robot_run), "LIST": str(tmp_path / "list.json"), "LANGUAGE": str(tmp_path / "lm")}
    with pytest.raises(UserError, match=message) as error:
        run([places.get(argument, argument) for argument in arguments])
    assert "\n" not in str(error.value)


def test_help_explains_every_argument(capsys):
    with pytest.raises(SystemExit) as ended:
        run(["--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert (
        ended.value.code == 0
        and "or a checkpoint of openpi" in said
        and "Address to listen at" in said
        and "unset: the latest" in said
    )


def test_it_compiles_listens_answers_and_ends_with_0_at_a_signal(tmp_path, robot_run, policy, observation):
    (tmp_path / "key").write_text("secret\n")
    (tmp_path / "metadata.json").write_text(json.dumps({"reset_pose": [0.5]}))
    command = [
        sys.executable,
        "-m",
        "sharder",
        "serve",
        robot_run,
        "--port",
        0,
        "--batch-sizes",
        1,
        "--api-key-file",
        tmp_path / "key",
        "--metadata",
        tmp_path / "metadata.json",
    ]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([*map(str, command)], env=environment(), stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        assert lines[0].startswith(f"{robot_run} at step 2: ") and lines[1].startswith("serving at ws://127.0.0.1:"), (
            lines,
            (tmp_path / "log").read_text(),
        )
        address = lines[1].removeprefix("serving at ").strip()
        with connect(address, compression=None, additional_headers={"Authorization": "Api-Key secret"}) as connection:
            metadata = unpack(connection.recv(LONG_S))
            assert metadata == policy.describe() | {"served": f"{robot_run} at step 2", "reset_pose": [0.5]}
            connection.send(pack(observation))
            actions = unpack(connection.recv(LONG_S))["actions"]
            np.testing.assert_allclose(actions, policy.act([policy.read(observation)], 1)[0], rtol=1e-4, atol=1e-5)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LONG_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert "Traceback" not in (tmp_path / "log").read_text()

"""The server as a robot meets it: protocol, many clients at once, what is refused, and that nothing ends it."""

import socket
import threading
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from sharder.serve.batching import Batcher
from sharder.serve.wire import pack, unpack

LONG_S = 120


def client(port: int, **options):
    return connect(
        f"ws://127.0.0.1:{port}", compression=None, max_size=None, open_timeout=LONG_S, close_timeout=LONG_S, **options
    )


def ask(connection, observation: dict) -> dict:
    connection.send(pack(observation))
    return unpack(connection.recv(LONG_S))


def refused(port: int, message: bytes | str) -> str:
    """Sends one frame that the server must refuse; returns what it says."""
    with client(port) as connection:
        connection.recv(LONG_S)
        connection.send(message)
        said = connection.recv(LONG_S)
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(LONG_S)
        assert closed.value.rcvd.code == 1011 and isinstance(said, str)
        return said


@pytest.fixture(scope="module")
def port(policy, serving):
    with serving(policy) as port:
        yield port


@pytest.fixture
def batchers(monkeypatch):
    """Those of the servers that this test starts."""
    start, found = Batcher.__init__, []

    def noted(self, *arguments):
        start(self, *arguments)
        found.append(self)

    monkeypatch.setattr(Batcher, "__init__", noted)
    return found


def waiting(batchers: list[Batcher]) -> int:
    """Requests that wait."""
    return sum(batcher._waiting.qsize() for batcher in batchers)


class Held:
    """A sampler that waits to be released, and notes the sizes of its batches."""

    def __init__(self):
        self.entered, self.released, self.sizes = threading.Event(), threading.Event(), []

    def __call__(self, batch, noise):
        self.sizes.append(len(noise))
        self.entered.set()
        assert self.released.wait(LONG_S)
        return np.zeros_like(noise)


def test_metadata_comes_first_then_a_reply_to_every_request(port, policy, observation):
    with client(port) as connection:
        assert unpack(connection.recv(LONG_S)) == policy.describe()
        first, second = ask(connection, observation), ask(connection, observation)
    assert first.keys() == {"actions", "policy_timing", "server_timing"} and first["actions"].dtype == np.float32
    assert first["actions"].shape == (8, 2) and np.array_equal(first["actions"], second["actions"])
    assert first["server_timing"].keys() == {"infer_ms"} and second["server_timing"].keys() == {"infer_ms", "prev_total_ms"}
    assert first["policy_timing"]["infer_ms"] > 0
    np.testing.assert_array_equal(first["actions"], policy.act([policy.read(observation)], 1)[0])


def test_ten_clients_at_once_get_what_each_gets_alone(port, policy, observation):
    asked = [observation | {"observation.state": np.full(3, number / 10)} for number in range(10)]
    alone = [policy.act([policy.read(one)], 1)[0] for one in asked]
    found, together = [None] * 10, threading.Barrier(10)

    def work(number: int) -> None:
        with client(port) as connection:
            connection.recv(LONG_S)
            together.wait(LONG_S)
            found[number] = [ask(connection, asked[number])["actions"] for _ in range(5)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(10):
        np.testing.assert_allclose(found[number], [alone[number]] * 5, rtol=1e-4, atol=1e-5)


def test_while_the_model_computes_pings_are_answered_and_what_waits_is_answered_together(
    policy, serving, batchers, observation
):
    held = Held()
    with serving(replace(policy, sample=held), warm=False) as port, ExitStack() as clients:
        first = clients.enter_context(client(port))
        first.recv(LONG_S)
        first.send(pack(observation))
        assert held.entered.wait(LONG_S)
        others = [clients.enter_context(client(port)) for _ in range(3)]
        for connection in (first, *others):
            assert connection.ping().wait(LONG_S)
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=LONG_S).read() == b"OK\n"
        for connection in others:
            connection.recv(LONG_S)
            connection.send(pack(observation))
        wait_until(lambda: waiting(batchers) == 3)
        held.released.set()
        assert all(unpack(connection.recv(LONG_S))["actions"].shape == (8, 2) for connection in (first, *others))
    assert held.sizes == [1, 4]


def wait_until(condition) -> None:
    until = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_request_beyond_those_that_may_wait_is_refused(policy, serving, batchers, observation):
    held = Held()
    with (
        serving(replace(policy, sample=held), warm=False, max_waiting=1) as port,
        client(port) as first,
        client(port) as second,
    ):
        for connection in (first, second):
            connection.recv(LONG_S)
        first.send(pack(observation))
        assert held.entered.wait(LONG_S)
        second.send(pack(observation))
        wait_until(lambda: waiting(batchers) == 1)
        assert "the server is busy: 1 requests wait already" in refused(port, pack(observation))
        held.released.set()
        for connection in (first, second):
            assert unpack(connection.recv(LONG_S))["actions"].shape == (8, 2)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"observation.state": np.zeros(5)}, "observation.state has 5 numbers, but this policy takes 3."),
        ({"observation.images.top": np.zeros((7, 7), np.uint8)}, "observation.images.top has shape (7, 7)"),
        ({"prompt": 3}, "prompt is of type int"),
        ({"extra": {b"__ndarray__": True, b"data": b"", b"dtype": "O", b"shape": [0]}}, "extra is an array of dtype 'O'"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_wrong_field_is_named_and_the_next_client_is_served(port, observation, changed, message):
    assert message in refused(port, pack(observation | changed))
    with client(port) as connection:
        connection.recv(LONG_S)
        assert ask(connection, observation)["actions"].shape == (8, 2)


def test_a_request_that_is_too_large_is_refused_by_its_size(policy, serving, observation):
    with serving(policy, warm=False, max_request_mb=1) as port:
        with client(port) as connection, pytest.raises(ConnectionClosed) as closed:
            connection.recv(LONG_S)
            connection.send(pack({"observation.images.top": np.zeros((1000, 1000, 3), np.uint8)}))
            connection.recv(LONG_S)
        assert closed.value.rcvd.code == 1009 and "limit" in closed.value.rcvd.reason
        with client(port) as connection:
            connection.recv(LONG_S)
            assert ask(connection, observation)["actions"].shape == (8, 2)


@pytest.mark.parametrize(
    "answer, message",
    [
        (lambda batch, noise: 1 // 0, "ZeroDivisionError"),
        (lambda batch, noise: np.full_like(noise, np.nan), "actions are not finite"),
    ],
    ids=["error", "nan"],
)
def test_a_model_that_fails_is_told_and_the_server_goes_on(policy, serving, observation, answer, message):
    answers = iter([answer, lambda batch, noise: np.zeros_like(noise)])
    with serving(replace(policy, sample=lambda *x: next(answers)(*x)), warm=False) as port:
        assert message in refused(port, pack(observation))
        with client(port) as connection:
            connection.recv(LONG_S)
            assert ask(connection, observation)["actions"].shape == (8, 2)


@pytest.mark.parametrize("header", [None, "Api-Key wrong", "secret", "Bearer secret"])
def test_without_the_key_nobody_is_let_in(policy, serving, observation, header):
    with serving(policy, "secret", warm=False) as port:
        with pytest.raises(InvalidStatus) as refusal:
            client(port, additional_headers={} if header is None else {"Authorization": header})
        assert refusal.value.response.status_code == 401
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=LONG_S).status == 200
        with client(port, additional_headers={"Authorization": "Api-Key secret"}) as connection:
            connection.recv(LONG_S)
            assert ask(connection, observation)["actions"].shape == (8, 2)


def test_a_page_in_a_browser_is_not_let_in(port):
    with pytest.raises(InvalidStatus) as refusal:
        client(port, origin="http://somewhere.example")
    assert refusal.value.response.status_code == 403


def test_a_client_that_vanishes_leaves_the_others_served(port, observation):
    for _ in range(5):
        with client(port) as gone:
            gone.recv(LONG_S)
            gone.send(pack(observation))
            gone.socket.shutdown(socket.SHUT_RDWR)
    with client(port) as connection:
        connection.recv(LONG_S)
        assert ask(connection, observation)["actions"].shape == (8, 2)


def fuzzed(observation: dict, rng: np.random.Generator) -> bytes:
    """A request with some bytes changed, cut off or put in, a field of another kind, or bytes at random."""
    kind = rng.integers(5)
    message = bytearray(pack(observation))
    if kind == 0:
        for _ in range(rng.integers(1, 8)):
            # Most bytes are those of pictures; those of the structure are at the beginnings of fields.
            at = (
                rng.integers(len(message))
                if rng.integers(2)
                else message.find([b"obs", b"__nd", b"dtype", b"shape", b"data", b"prompt"][rng.integers(6)])
            )
            message[(at + rng.integers(-3, 24)) % len(message)] = rng.integers(256)
    elif kind == 1:
        del message[rng.integers(len(message)) :]
    elif kind == 2:
        at = rng.integers(len(message))
        message[at:at] = rng.bytes(rng.integers(1, 9))
    elif kind == 3:
        strange = [
            None,
            1,
            -(2**63),
            1.5,
            "text",
            b"bytes",
            [],
            {},
            [[[1]]],
            np.zeros(0),
            np.zeros((3, 2**10)),
            np.bool_(True),
            np.array("x"),
            {"a": {}},
        ]
        message = bytearray(
            pack(observation | {list(observation)[rng.integers(len(observation))]: strange[rng.integers(len(strange))]})
        )
    else:
        message = bytearray(rng.bytes(rng.integers(0, 200)))
    return bytes(message)


def fuzz(port: int, observation: dict, count: int) -> tuple[int, int]:
    """(answered, refused); each frame gets one of both."""
    rng, counts = np.random.default_rng(0), [0, 0]
    while sum(counts) < count:
        with client(port) as connection:
            connection.recv(LONG_S)
            said = b""
            while not isinstance(said, str) and sum(counts) < count:
                connection.send(fuzzed(observation, rng))
                said = connection.recv(LONG_S)
                counts[isinstance(said, str)] += 1
            assert not isinstance(said, str) or (said and "Error" not in said), said
    return tuple(counts)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_frame_ends_the_server(port, observation, count):
    answered, said_no = fuzz(port, observation, count)
    assert answered > count / 20 and said_no > count / 3
    with client(port) as connection:
        connection.recv(LONG_S)
        assert ask(connection, observation)["actions"].shape == (8, 2)


def test_the_client_of_openpi_is_served(port, policy, observation):
    openpi_client = pytest.importorskip(
        "openpi_client.websocket_client_policy", reason="pip install --no-deps openpi-client==0.1.2"
    )
    robots = [openpi_client.WebsocketClientPolicy("127.0.0.1", port) for _ in range(10)]
    expected = policy.act([policy.read(observation)], 1)[0]
    assert robots[0].get_server_metadata()["action_horizon"] == 8
    found = {}
    threads = [
        threading.Thread(target=lambda i=i, robot=robot: found.update({i: robot.infer(observation)["actions"]}))
        for i, robot in enumerate(robots)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 10
    for actions in found.values():
        np.testing.assert_allclose(actions, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="observation.state has 9 numbers"):
        robots[0].infer(observation | {"observation.state": np.zeros(9)})
    for robot in robots[1:]:
        robot._ws.close()

"""The processes of a run find one another before jax connects them: jax ends a process natively where one is missing.

Process 0 listens at the coordinator's address; the others connect and say which they are, of how many, and what must be the same
in all. When all are there, each is told to go on, or why not, and jax takes over the port; the connections stay open as the
run's channel. Standard library only.
"""

import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sharder.channel import Channel
from sharder.config import UserError

GREETING = b"sharder "
LONGEST_LINE = 1 << 20
RETRY_S = 0.2
VERDICT_S = 5.0
"""How much longer than process 0 the others wait for what it says of those that are missing."""
LINGER_S = 5.0
"""How long process 0 waits for the rest when it is known already that the run cannot begin: each is to learn why."""
TELL_S = 30.0
"""How long one that was asked to stop looks for process 0, which may start seconds later and would wait for it in vain."""

Facts = dict[str, object]
"""What must be the same in all processes, by the name that a user knows it by; JSON values."""


class Stopped(Exception):
    """A process was asked to stop while they looked for one another; the text says which, and by what."""


def parse_address(address: str, source: str = "JAX_COORDINATOR_ADDRESS") -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. Raises UserError naming `source`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UserError(f"{source} is {address!r}, but must be host:port, with a port from 1 to 65535.")
    return host.strip("[]"), int(port)


def disagreements(first: Facts, other: Facts, process: int) -> list[str]:
    """What process `process` holds otherwise than process 0, a sentence each."""
    return [
        f"{name} is {first.get(name)!r} in process 0, but {other.get(name)!r} in process {process}"
        for name in [*first, *(other.keys() - first.keys())]
        if first.get(name) != other.get(name)
    ]


def meet(address: str, count: int, index: int, facts: Facts, timeout_s: float, stop: Callable[[], str] = lambda: "") -> Channel:
    """Returns when all `count` processes are there and hold the same `facts`.

    Raises UserError where one is missing after `timeout_s`, the host is not known, or two disagree; Stopped, in all of them, where
    `stop` gives a reason in one.
    """
    host, port = parse_address(address)
    facts = json.loads(json.dumps(facts))  # as the others receive them
    deadline = time.monotonic() + timeout_s
    if index == 0:
        return _gather(port, count, facts, deadline, timeout_s, stop)
    return _report(host, port, count, index, facts, deadline, timeout_s, stop)


@dataclass
class _Gathering:
    """Who has arrived at process 0, and what is wrong."""

    count: int
    facts: Facts
    arrived: dict[int, socket.socket] = field(default_factory=dict)
    turned_away: list[socket.socket] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    stopped: str = ""
    expected: int = 0
    """The largest number of processes that any of them was told of."""

    def greet(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        hello = _read_line(connection, GREETING)
        if hello is None or not isinstance(hello.get("index"), int):
            connection.close()  # somebody else, who may connect to any port
            return
        index, count = hello["index"], hello["count"]
        self.expected = max(self.expected, count)
        if hello["stop"]:
            self.stopped = self.stopped or f"process {index} was stopped by {hello['stop']}"
        if count != self.count:
            self.complaints.append(
                f"the number of processes is {self.count} in process 0, but {count} in process {index} ({hello['who']})"
            )
        else:
            self.complaints += disagreements(self.facts, hello["facts"], index)
        if index in self.arrived or not 0 < index < self.count:
            if index in self.arrived:
                self.complaints.append(f"two processes say that they are process {index}; one of them is {hello['who']}")
            self.turned_away.append(connection)
        else:
            self.arrived[index] = connection

    def hear(self, index: int) -> None:
        """An early word of one that has arrived: it stops, or it is gone and may come again."""
        word = _read_line(self.arrived[index])
        if word is None:
            self.arrived.pop(index).close()
        else:
            self.stopped = self.stopped or f"process {index} was stopped by {word.get('stop')}"

    @property
    def failed(self) -> bool:
        return bool(self.complaints or self.stopped)

    def missing(self) -> list[int]:
        return sorted(set(range(1, self.count)) - self.arrived.keys())

    def is_complete(self) -> bool:
        return not self.missing() and (not self.failed or len(self.arrived) + len(self.turned_away) >= self.expected - 1)

    def verdict(self, port: int, timeout_s: float) -> dict:
        if self.stopped:
            return {"stop": self.stopped}
        texts = ["; ".join(self.complaints[:8]) + (f"; and {len(self.complaints) - 8} more" * (len(self.complaints) > 8))]
        if self.complaints:
            texts.append("Start all processes of a run with the same command, packages and number of processes")
        elif self.missing():
            texts = [
                f"process 0 waited {timeout_s:g} s at port {port} (--cluster.bringup-timeout-s), but of {self.count} processes"
                f" these did not arrive: {', '.join(map(str, self.missing()))}. Start them, or lower the number of processes"
            ]
        text = ". ".join(filter(None, texts))
        return {"refused": f"{text}."} if text else {"go": True}


def _gather(port: int, count: int, facts: Facts, deadline: float, timeout_s: float, stop: Callable[[], str]) -> Channel:
    gathering = _Gathering(count, facts, expected=count)
    try:
        with _listen(port) as server:
            _wait_for_all(server, gathering, deadline, stop)
    except OSError as error:
        raise UserError(
            f"process 0 cannot use port {port} of the coordinator's address: {error.strerror or error}. Choose another."
        ) from None
    verdict = gathering.verdict(port, timeout_s)
    for connection in (*gathering.arrived.values(), *gathering.turned_away):
        _send(connection, verdict)
    _act_on(verdict)
    return Channel(gathering.arrived, 0)


def _wait_for_all(server: socket.socket, gathering: _Gathering, deadline: float, stop: Callable[[], str]) -> None:
    lingers = False
    while not gathering.is_complete() and time.monotonic() < deadline:
        if not gathering.stopped and (reason := stop()):
            gathering.stopped = f"process 0 was stopped by {reason}"
        if gathering.failed and not lingers:
            lingers, deadline = True, min(deadline, time.monotonic() + LINGER_S)
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            for index, connection in gathering.arrived.items():
                selector.register(connection, selectors.EVENT_READ, index)
            for key, _ in selector.select(RETRY_S):
                if key.data is None:
                    gathering.greet(server.accept()[0])
                else:
                    gathering.hear(key.data)


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _report(
    host: str, port: int, count: int, index: int, facts: Facts, deadline: float, timeout_s: float, stop: Callable[[], str]
) -> Channel:
    why, told = "nothing answers", False
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((host, port), timeout=min(left, 5))
        except OSError as error:
            why = error.strerror or str(error)
        else:
            verdict = _ask(
                connection,
                {"index": index, "count": count, "who": _who(), "facts": facts, "stop": stop()},
                deadline + VERDICT_S,
                stop,
            )
            if verdict is not None:
                _act_on(verdict)
                return Channel({0: connection}, index)
            connection.close()
            why = "process 0 did not say to go on, or something else answers"
        if (reason := stop()) and not told:
            told, deadline = True, min(deadline, time.monotonic() + TELL_S)
            print(f"{reason}: telling process 0 once it is there; a second signal ends at once.", file=sys.stderr, flush=True)
        time.sleep(RETRY_S)
    if reason := stop():
        raise Stopped(f"process {index} was stopped by {reason}")
    raise UserError(
        f"process {index} of {count} did not meet process 0 at {host}:{port} within {timeout_s:g} s"
        f" (--cluster.bringup-timeout-s): {why}. Start process 0, and check the coordinator's address."
    )


def _who() -> str:
    return f"number {os.getpid()} on {socket.gethostname()}"


def _ask(connection: socket.socket, hello: dict, deadline: float, stop: Callable[[], str]) -> dict | None:
    """What process 0 says to `hello`; None where it says nothing until the deadline, or is another program."""
    connection.settimeout(5)
    _send(connection, hello, GREETING)
    told = bool(hello["stop"])
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if selector.select(RETRY_S):
                return _read_line(connection)
            if not told and (reason := stop()):
                told = True
                _send(connection, {"stop": reason})
    return None


def _act_on(verdict: dict) -> None:
    if "stop" in verdict:
        raise Stopped(verdict["stop"])
    if "refused" in verdict:
        raise UserError(verdict["refused"])


def _send(connection: socket.socket, message: dict, prefix: bytes = b"") -> None:
    try:
        connection.sendall(prefix + json.dumps(message).encode() + b"\n")
    except OSError:
        pass  # it is gone, as the next reading will find


def _read_line(connection: socket.socket, prefix: bytes = b"") -> dict | None:
    """One line, byte by byte: what follows it belongs to another reader. None where there is none of this kind."""
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < LONGEST_LINE:
            byte = connection.recv(1)
            if not byte or not (prefix.startswith(line) or line.startswith(prefix)):
                return None
            line += byte
        message = json.loads(line.removeprefix(prefix))
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None

"""What the processes of a run tell one another beside jax: that one ends, and why. Standard library only.

The connections of the rendezvous stay open for the whole run, and process 0 passes on what it hears. So a process learns of
another's end while it compiles, waits in a collective, or has not joined jax yet; jax itself would notice only after its
heartbeat timeout (100 s), and says no reason.
"""

import faulthandler
import json
import os
import re
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from sharder.stop import PREEMPTED

OWN_END_S = 1.0
"""How long a process may take to end by itself, with a message of its own, after another has failed."""
OUTLIVE_S = 5.0
"""How long process 0 stays for the others to end first: jax aborts them where it is gone, whatever they were about to say."""
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 9}
"""A host that vanished is noticed after two minutes, and no firewall forgets an idle connection (seconds; probes)."""


@dataclass(frozen=True)
class Ending:
    """The end of a process before its time."""

    process: int
    code: int | None
    """Its exit code; None: it was killed, or its host is gone."""
    text: str = ""

    def __str__(self) -> str:
        how = "was killed, or its host is gone" if self.code is None else f"ended with code {self.code}"
        return f"process {self.process} {how}" + (f": {self.text}" if self.text else "")

    @property
    def last_words(self) -> str:
        """Of a process that ends because of it."""
        return f"{self}; this process ends too."


def followed(last_words: str) -> int | None:
    """The process whose end these last words follow; None: they are no such words."""
    found = re.match(r"process (\d+) .*; this process ends too\.$", last_words)
    return int(found.group(1)) if found else None


class Channel:
    """This process's connections to the others: of process 0 to all, of the others to process 0."""

    def __init__(self, connections: dict[int, socket.socket], index: int):
        self.index = index
        self.heard: Ending | None = None
        """The first end of another process that this one learnt of."""
        self._connections = connections
        self._on_end: Callable[[Ending], None] = self.follow
        self._gone: set[int] = set()
        """Processes whose connection has ended."""
        self._changed = threading.Condition()
        self._left: set[int] = set()
        """Processes that said goodbye."""
        self._closed = False
        for connection in connections.values():
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):  # not on every system
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def listen(self, on_end: Callable[[Ending], None] | None = None) -> "Channel":
        """Starts a thread that calls `on_end`, `follow` by default, with the first end of another process that did not say goodbye."""
        self._on_end = on_end or self.follow
        threading.Thread(target=self._listen, name="channel", daemon=True).start()
        return self

    def tell_end(self, code: int, text: str) -> None:
        """Says to all that this process ends now, unless it has said goodbye; process 0 returns when the others are gone."""
        if not self._closed:
            self._closed = True
            self._send(asdict(Ending(self.index, code, text)))
            self._outlive()

    def follow(self, ending: Ending) -> None:
        """Ends this process because another has: with 75 and 2 as that one did, else by SIGABRT, as jax ends the peers of a lost
        process; so whoever started them can tell the first from those that followed it."""
        if ending.code != PREEMPTED:
            time.sleep(OWN_END_S)
        print(ending.last_words, file=sys.stderr, flush=True)
        self._outlive()
        if ending.code in (2, PREEMPTED):
            os._exit(ending.code)
        faulthandler.disable()  # the stack says nothing
        os.abort()

    def _outlive(self) -> None:
        if self.index == 0:
            with self._changed:
                self._changed.wait_for(lambda: self._gone >= self._connections.keys(), OUTLIVE_S)

    def close(self) -> None:
        """Says goodbye: the end of this process ends no other."""
        if not self._closed:
            self._closed = True
            self._send({"goodbye": self.index})

    def _send(self, message: dict, but: int | None = None) -> None:
        for peer, connection in self._connections.items():
            if peer != but:
                try:
                    connection.sendall(json.dumps(message).encode() + b"\n")
                except OSError:
                    pass  # it is gone, as `_listen` will find

    def _listen(self) -> None:
        received = dict.fromkeys(self._connections, b"")
        with selectors.DefaultSelector() as selector:
            for peer, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, peer)
            while selector.get_map():
                for key, _ in selector.select():
                    data = _receive(key.fileobj)
                    *lines, received[key.data] = (received[key.data] + data).split(b"\n")
                    for line in lines:
                        self._hear(key.data, json.loads(line))
                    if not data:
                        selector.unregister(key.fileobj)
                        with self._changed:
                            self._gone.add(key.data)
                            self._changed.notify_all()
                        if key.data not in self._left:
                            self._hear(key.data, asdict(Ending(key.data, None)))

    def _hear(self, peer: int, message: dict) -> None:
        if "goodbye" in message:
            self._left.add(peer)
            return
        if message["code"] is not None:
            self._left.add(peer)  # what it says is the reason, and not the end of the connection
        if self.index == 0:
            self._send(message, but=peer)
        if not self._closed and self.heard is None:
            self.heard = Ending(**message)
            # In a thread of its own: this one goes on to see the others leave.
            threading.Thread(target=self._on_end, args=(self.heard,), name="ending", daemon=True).start()


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""

"""openpi's protocol for policies over websockets: metadata on connect, then a reply to every request.

A frame is one message of `sharder.serve.wire`. What is wrong with a request is told in a text frame, after which the connection is
closed with code 1011; the server goes on. GET /healthz answers 200 as soon as the model is compiled.
"""

import asyncio
import hmac
import logging
import socket
import sys
import time
import traceback
from collections.abc import Callable
from http import HTTPStatus

import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from sharder.config import UserError
from sharder.serve.batching import Batcher
from sharder.serve.options import ServerOptions
from sharder.serve.policy import Example, Policy
from sharder.serve.wire import pack, unpack

LONGEST_ERROR = 2000
"""Characters of what a client is told."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that has its address, but does not listen yet. Raises UserError."""
    found = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        if found is not None:
            found.close()
        raise UserError(
            f"--host {host} --port {port} cannot be listened at: {error.strerror}. Give another --port, or 0 for any."
        ) from None
    return found


class PolicyServer:
    """Answers requests with a policy."""

    def __init__(self, policy: Policy, options: ServerOptions, metadata: dict, api_key: str | None = None):
        self.policy, self.options, self.metadata, self.api_key = policy, options, metadata, api_key
        self._sizes = sorted(set(options.batch_sizes))
        self._batcher: Batcher | None = None
        self._missed: set[str] = set()

    def warm_up(self) -> None:
        """Compiles every size of a batch."""
        example = self.policy.read(self.policy.blank())
        for size in self._sizes:
            self.policy.act([example], size)

    def act(self, examples: list[Example]) -> list[tuple[np.ndarray, float]]:
        """Actions of each example, and the milliseconds that all took. Called by one thread at a time."""
        began = time.perf_counter()
        actions = self.policy.act(examples, next(size for size in self._sizes if size >= len(examples)))
        infer_ms = 1000 * (time.perf_counter() - began)
        return [(x, infer_ms) for x in actions]

    async def run(self, sock: socket.socket, stop: asyncio.Event, ready: Callable[[], None] = lambda: None) -> None:
        """Listens until `stop`; call `warm_up` before. Raises UserError where the address is taken meanwhile."""
        # Scans of the port and clients that vanish are no errors of ours.
        logging.getLogger("websockets.server").setLevel(logging.CRITICAL)
        self._batcher = Batcher(self.act, self._sizes[-1], self.options.max_waiting)
        limits = {"max_size": self.options.max_request_mb << 20, "max_queue": 1, "compression": None}
        try:
            # A page in a browser names its origin; no robot does.
            server = await serve(self._talk, sock=sock, process_request=self._let_in, origins=[None], **limits)
        except OSError as error:
            raise UserError(
                f"--port {sock.getsockname()[1]} cannot be listened at: {error.strerror}. Give another one."
            ) from None
        ready()
        async with server:
            await stop.wait()
        self._batcher.close()

    def _let_in(self, connection: ServerConnection, request):
        if request.path == "/healthz":
            return connection.respond(HTTPStatus.OK, "OK\n")
        given = "\n".join(request.headers.get_all("Authorization")).encode(errors="surrogateescape")
        if self.api_key is not None and not hmac.compare_digest(given, f"Api-Key {self.api_key}".encode()):
            return connection.respond(HTTPStatus.UNAUTHORIZED, "the header Authorization: Api-Key KEY is missing or wrong.\n")
        return None

    async def _talk(self, connection: ServerConnection) -> None:
        """One client, from its metadata to its end."""
        previous_ms = None
        try:
            await connection.send(pack(self.metadata))
            async for message in connection:
                began = time.perf_counter()
                try:
                    actions, infer_ms = await self._answer(message)
                except Exception as error:  # noqa: BLE001  whatever it is, the others are served
                    await self._refuse(connection, error)
                    return
                timing = {"infer_ms": infer_ms} | ({} if previous_ms is None else {"prev_total_ms": previous_ms})
                await connection.send(
                    pack({"actions": actions, "policy_timing": {"infer_ms": infer_ms}, "server_timing": timing})
                )
                previous_ms = 1000 * (time.perf_counter() - began)
        except ConnectionClosed:
            pass

    async def _answer(self, message: bytes | str) -> tuple[np.ndarray, float]:
        example = await asyncio.to_thread(lambda: self.policy.read(unpack(message)))
        self._note_missing(example)
        actions, infer_ms = await self._batcher.ask(example)
        if not np.isfinite(actions).all():
            raise UserError("the policy's actions are not finite, so that none are given.")
        return actions, infer_ms

    def _note_missing(self, example: Example) -> None:
        """A camera that is not there is masked, as in training; said once, since it may be a mistyped name."""
        for place, key in self.policy.robot.request.cameras.items():
            if key not in self._missed and not example.batch[f"image_mask/{place}"]:
                self._missed.add(key)
                print(f"note: a request has no {key!r}; the policy does without", file=sys.stderr, flush=True)

    async def _refuse(self, connection: ServerConnection, error: Exception) -> None:
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, UserError):
            traceback.print_exception(error)
        print(f"refused a request: {text[:LONGEST_ERROR]}", file=sys.stderr, flush=True)
        await connection.send(text[:LONGEST_ERROR])
        await connection.close(1011, "the request was refused; the text frame before says why")

"""The processes of a run find one another before jax connects them: jax ends a process natively where one is missing.

Process 0 listens at the coordinator's address, the others connect and say which they are; when all are there each is told to
go on, and jax takes over the port. Standard library only.
"""

import socket
import time

from sharder.config import UserError

GREETING = b"sharder "
GO = b"go\n"
RETRY_S = 0.2


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. Raises UserError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UserError(f"JAX_COORDINATOR_ADDRESS is {address!r}, but must be host:port, with a port from 1 to 65535.")
    return host.strip("[]"), int(port)


def meet(address: str, count: int, index: int, timeout_s: float) -> None:
    """Returns when all `count` processes are there. Raises UserError where one is missing after `timeout_s`, or the host is
    not known.
    """
    host, port = parse_address(address)
    deadline = time.monotonic() + timeout_s
    if index == 0:
        _gather(port, count, deadline, timeout_s)
    else:
        _report(host, port, index, deadline, timeout_s)


def _gather(port: int, count: int, deadline: float, timeout_s: float) -> None:
    arrived: dict[int, socket.socket] = {}
    try:
        with _listen(port) as server:
            while len(arrived) < count - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, count)) - arrived.keys())
                    raise UserError(
                        f"process 0 waited {timeout_s:g} s at port {port} (--cluster.bringup-timeout-s), but of {count} processes"
                        f" these did not arrive: {', '.join(map(str, missing))}. Start them, or lower JAX_NUM_PROCESSES."
                    ) from None
                index = _read_index(connection)
                if index is None or not 0 < index < count:
                    connection.close()  # somebody else, who may connect to any port
                    continue
                arrived[index] = connection
        for connection in arrived.values():
            connection.sendall(GO)
        for connection in arrived.values():
            connection.recv(1)  # its end: who closes first keeps the port waiting
    except OSError as error:
        raise UserError(f"process 0 cannot use port {port} of JAX_COORDINATOR_ADDRESS: {error.strerror or error}. Choose another.") from None
    finally:
        for connection in arrived.values():
            connection.close()


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _read_index(connection: socket.socket) -> int | None:
    connection.settimeout(5)
    try:
        line = connection.makefile("rb").readline(32)
    except OSError:
        return None
    text = line.removeprefix(GREETING).strip()
    return int(text) if line.startswith(GREETING) and text.isdigit() else None


def _report(host: str, port: int, index: int, deadline: float, timeout_s: float) -> None:
    why = "nothing answers"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as connection:
                connection.sendall(GREETING + b"%d\n" % index)
                if connection.recv(len(GO)) == GO:
                    return
                why = "process 0 gave up, or something else answers"
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(RETRY_S)
    raise UserError(
        f"process {index} did not meet process 0 at {host}:{port} (JAX_COORDINATOR_ADDRESS) within {timeout_s:g} s"
        f" (--cluster.bringup-timeout-s): {why}. Start process 0, and check the address."
    )

import socket
import threading
import time

import pytest

from sharder.config import UserError
from sharder.launch.supervisor import free_port
from sharder.rendezvous import meet, parse_address


@pytest.mark.parametrize("address", ["localhost:xx", "localhost", "localhost:0", "localhost:65536", "localhost:-1", ":80", "a:"])
def test_an_address_without_a_usable_port_is_refused(address):
    with pytest.raises(UserError, match="must be host:port, with a port from 1 to 65535"):
        parse_address(address)


def test_addresses_of_both_kinds_are_read():
    assert parse_address("10.0.0.1:80") == ("10.0.0.1", 80) and parse_address("[::1]:8080") == ("::1", 8080)


def outcomes(address, count, indices, timeout_s):
    """What `meet` raised in each of these processes, by index."""
    found = {}

    def go(index):
        try:
            found[index] = meet(address, count, index, timeout_s)
        except UserError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=go, args=(i,)) for i in indices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_that_come_go_on_and_the_port_is_free_again():
    port = free_port()
    assert outcomes(f"127.0.0.1:{port}", 3, (2, 1, 0), 20) == {0: None, 1: None, 2: None}
    socket.create_server(("", port)).close()


def test_process_0_names_who_is_missing():
    found = outcomes(f"127.0.0.1:{free_port()}", 4, (0, 2), 1.5)
    assert "these did not arrive: 1, 3" in found[0] and "process 2 did not meet process 0" in found[2]


def test_a_process_without_a_coordinator_ends_in_time():
    started = time.monotonic()
    found = outcomes(f"127.0.0.1:{free_port()}", 2, (1,), 1)
    assert "process 1 did not meet process 0" in found[1] and "within 1 s" in found[1] and time.monotonic() - started < 5


def test_a_stranger_at_the_port_counts_for_nobody():
    port = free_port()

    def stranger():
        time.sleep(0.3)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")

    thread = threading.Thread(target=stranger)
    thread.start()
    found = outcomes(f"127.0.0.1:{port}", 2, (0,), 1.5)
    thread.join()
    assert "these did not arrive: 1" in found[0]


def test_a_port_that_is_in_use_is_named():
    with socket.create_server(("", 0)) as server:
        found = outcomes(f"127.0.0.1:{server.getsockname()[1]}", 2, (0,), 1)
    assert "cannot use port" in found[0]

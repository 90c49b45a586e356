import socket
import threading
import time

import pytest

from sharder.config import UserError
from sharder.launch.processes import free_port
from sharder.rendezvous import Stopped, meet, parse_address


@pytest.mark.parametrize("address", ["localhost", "localhost:", ":1234", "localhost:0", "localhost:65536", "localhost:port"])
def test_addresses_without_host_or_port_are_refused(address):
    with pytest.raises(UserError, match="must be host:port"):
        parse_address(address)


def test_addresses_of_both_kinds_are_read():
    assert parse_address("10.0.0.1:80") == ("10.0.0.1", 80) and parse_address("[::1]:8080") == ("::1", 8080)


def outcomes(port, processes, timeout_s):
    """What `meet` gave or raised in each of these processes, by number of the list: (index, count, facts, reason to stop)."""
    found = {}

    def go(number, index, count, facts, stop):
        try:
            found[number] = meet(f"127.0.0.1:{port}", count, index, facts, timeout_s, lambda: stop)
        except (UserError, Stopped) as error:
            found[number] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=go, args=(n, *process)) for n, process in enumerate(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def of(count, indices, facts=None):
    return [(i, count, facts or {}, "") for i in indices]


def test_all_that_come_go_on_and_the_port_is_free_again():
    port = free_port()
    found = outcomes(port, of(3, (2, 1, 0)), 20)
    assert [found[n].index for n in range(3)] == [2, 1, 0]
    # Their connections are still open.
    socket.create_server(("", port)).close()


def test_process_0_names_who_is_missing():
    found = outcomes(free_port(), of(4, (0, 2)), 1.5)
    assert "these did not arrive: 1, 3" in found[0] and found[1] == found[0]


def test_a_process_without_a_coordinator_ends_in_time():
    started = time.monotonic()
    found = outcomes(free_port(), of(2, (1,)), 1)
    assert "process 1 of 2 did not meet process 0" in found[0] and "within 1 s" in found[0] and time.monotonic() - started < 5


def test_a_host_that_is_not_known_is_named():
    with pytest.raises(UserError, match="did not meet process 0 at no.such.host.invalid:1234"):
        meet("no.such.host.invalid:1234", 2, 1, {}, 0.5)


def test_a_stranger_at_the_port_counts_for_nobody():
    port = free_port()

    def stranger():
        time.sleep(0.3)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")

    thread = threading.Thread(target=stranger)
    thread.start()
    found = outcomes(port, of(2, (0,)), 1.5)
    thread.join()
    assert "these did not arrive: 1" in found[0]


def test_a_port_that_is_in_use_is_named():
    with socket.create_server(("", 0)) as server:
        found = outcomes(server.getsockname()[1], of(2, (0,)), 1)
    assert "process 0 cannot use port" in found[0]


def test_another_number_of_processes_ends_all_with_both_numbers():
    """Process 0 was told of two, the others of four."""
    found = outcomes(free_port(), of(2, (0,)) + of(4, (1, 2, 3)), 20)
    for text in found.values():
        assert text.startswith("UserError") and "the number of processes is 2 in process 0, but 4 in process 1" in text


def test_other_facts_end_all_with_both_values():
    facts = {"the version of jax": "0.10.2", "--train.seed": 0}
    found = outcomes(free_port(), of(3, (0, 1), facts) + of(3, (2,), facts | {"--train.seed": 7}), 20)
    for text in found.values():
        assert text.startswith("UserError: --train.seed is 0 in process 0, but 7 in process 2.")


def test_a_fact_that_only_one_has_is_named():
    found = outcomes(free_port(), of(2, (0,), {"a": 1}) + of(2, (1,), {"a": 1, "b": 2}), 20)
    assert "b is None in process 0, but 2 in process 1" in found[0]


@pytest.fixture
def no_lingering(monkeypatch):
    """For tests in which somebody never comes."""
    monkeypatch.setattr("sharder.rendezvous.LINGER_S", 1.0)
    monkeypatch.setattr("sharder.rendezvous.TELL_S", 1.0)


def test_one_index_twice_ends_all(no_lingering):
    """The others of the four never come."""
    found = outcomes(free_port(), of(4, (0, 1, 1)), 20)
    for text in found.values():
        assert "two processes say that they are process 1" in text


@pytest.mark.parametrize("who", [0, 1])
def test_a_request_to_stop_ends_all(who, no_lingering):
    """Process 2 of 3 never comes."""
    started = time.monotonic()
    processes = [(i, 3, {}, "SIGTERM" if i == who else "") for i in (0, 1)]
    found = outcomes(free_port(), processes, 300)
    assert {text for text in found.values()} == {f"Stopped: process {who} was stopped by SIGTERM"}
    assert time.monotonic() - started < 60


def test_process_0_that_starts_seconds_later_learns_of_a_request_to_stop():
    """It would wait for the stopped one as long as bring-up may take."""
    port = free_port()
    found = {}
    stopped = threading.Thread(target=lambda: found.update(outcomes(port, [(1, 2, {}, "SIGTERM")], 300)))
    stopped.start()
    time.sleep(7)
    found["zero"] = outcomes(port, of(2, (0,)), 20)[0]
    stopped.join()
    assert set(found.values()) == {"Stopped: process 1 was stopped by SIGTERM"}


def test_one_that_went_away_may_come_again(monkeypatch):
    monkeypatch.setattr("sharder.rendezvous.VERDICT_S", 0.5)
    port = free_port()
    found = {}
    zero = threading.Thread(target=lambda: found.update(zero=meet(f"127.0.0.1:{port}", 3, 0, {}, 60)))
    zero.start()
    assert "did not meet" in outcomes(port, of(3, (1,)), 1)[0]
    found |= outcomes(port, of(3, (1, 2)), 60)
    zero.join()
    assert [c.index for c in (found[0], found[1], found["zero"])] == [1, 2, 0]

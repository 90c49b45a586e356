import os
import signal
import subprocess
import sys
import threading

import pytest

from sharder.channel import Ending
from sharder.launch.processes import free_port
from sharder.rendezvous import meet


class Listener:
    """A channel's end, and what it hears."""

    def __init__(self, channel):
        self.endings, self.changed = [], threading.Condition()
        self.channel = channel.listen(self.hear)

    def hear(self, ending):
        with self.changed:
            self.endings.append(ending)
            self.changed.notify_all()

    def wait(self):
        with self.changed:
            assert self.changed.wait_for(lambda: self.endings, 30)
            return self.endings[0]


@pytest.fixture
def three():
    """Three processes that have met."""
    port, found = free_port(), {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: meet(f"127.0.0.1:{port}", 3, i, {}, 60)})) for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    listeners = [Listener(found[i]) for i in range(3)]
    yield listeners
    for listener in listeners:
        listener.channel.close()


@pytest.mark.parametrize("who", [0, 2])
def test_an_end_is_told_to_all_others(three, who):
    three[who].channel.tell_end(75, "SIGTERM")
    for i in {0, 1, 2} - {who}:
        assert three[i].wait() == Ending(who, 75, "SIGTERM")
    assert three[who].endings == []


def test_a_connection_that_breaks_is_an_end_of_which_nobody_knows_why(three):
    for connection in three[2].channel._connections.values():
        connection.shutdown(2)
    for i in (0, 1):
        assert three[i].wait() == Ending(2, None) and "process 2 was killed, or its host is gone" in str(three[i].wait())


def test_goodbyes_end_nobody(three):
    three[2].channel.close()
    three[1].channel.tell_end(1, "a failure")
    assert three[0].wait() == Ending(1, 1, "a failure") and len(three[0].endings) == 1


@pytest.mark.parametrize(
    "ending, code", [("Ending(1, 75, 'SIGTERM')", 75), ("Ending(1, 2, 'a mistake')", 2), ("Ending(1, None)", -signal.SIGABRT)]
)
def test_the_others_follow_with_a_code_that_says_they_were_not_the_first(ending, code):
    script = f"import sharder.channel as c; c.OWN_END_S = 0.1; from sharder.channel import Ending; c.Channel({{}}, 1).follow({ending})"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=os.getcwd())
    assert result.returncode == code and "process 1 " in result.stderr and "this process ends too" in result.stderr

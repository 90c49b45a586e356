"""A worker process that decodes pictures: python -m sharder.data.decode_worker FILE_DESCRIPTOR PARENT.

It lives no longer than the process that started it, whatever ends that: the connection is closed then, and should another process
hold a copy of it open, the parent's number changes. Loads no jax.
"""

import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

from sharder.config import UserError
from sharder.data.frames import FrameReader

POLL_S = 0.5
"""How often the parent is looked for."""


def end_with(parent: int) -> None:
    """Ends this process when its parent is another."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


def serve(connection: Connection) -> None:
    """Answers (height_width, cache_bytes), then lists of `Wanted`, each with ("pictures", [arrays]), ("user", text) or ("failed", text)."""
    reader = FrameReader(*connection.recv())
    while True:
        try:
            jobs = connection.recv()
        except EOFError:
            return
        try:
            answer = ("pictures", [reader.read(wanted) for wanted in jobs])
        except UserError as error:
            answer = ("user", str(error))
        except Exception:
            answer = ("failed", traceback.format_exc())
        connection.send(answer)


def main() -> None:
    descriptor, parent = map(int, sys.argv[1:])
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    try:
        serve(Connection(descriptor))
    except (BrokenPipeError, ConnectionResetError, EOFError):
        pass  # the parent is gone
    os._exit(0)


if __name__ == "__main__":
    main()

"""Requests that wait for the model are answered together, by one thread, so that the event loop is always free."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from sharder.config import UserError

Answer = Callable[[list[Any]], list[Any]]
"""What is asked to what is answered, one for one."""


class Batcher:
    """Asks `answer` for as many as wait, `largest` at most."""

    def __init__(self, answer: Answer, largest: int, max_waiting: int):
        self._answer, self._largest = answer, largest
        self._waiting: queue.Queue[tuple[Any, Future] | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._work, name="inference", daemon=True)
        self._thread.start()

    async def ask(self, what: object) -> Any:
        """Raises UserError where too many wait, and what `answer` raises."""
        future: Future = Future()
        try:
            self._waiting.put_nowait((what, future))
        except queue.Full:
            raise UserError(f"the server is busy: {self._waiting.maxsize} requests wait already. Try again.") from None
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends the thread when all that waits is answered; what is asked after that never is."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        ends = False
        while not ends:
            taken = [self._waiting.get()]
            while len(taken) < self._largest and taken[-1] is not None:
                try:
                    taken.append(self._waiting.get_nowait())
                except queue.Empty:
                    break
            ends = taken[-1] is None
            # Who is gone needs no answer.
            asked = [entry for entry in taken if entry is not None and entry[1].set_running_or_notify_cancel()]
            if asked:
                self._settle([what for what, _ in asked], [future for _, future in asked])

    def _settle(self, asked: list[Any], futures: list[Future]) -> None:
        try:
            answers = self._answer(asked)
        except Exception as error:  # noqa: BLE001  a library's; those who asked are told
            for future in futures:
                future.set_exception(error)
        else:
            for future, answer in zip(futures, answers, strict=True):
                future.set_result(answer)

"""Waiting for what may never answer: a name server, a dead disk, a driver that hangs."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Gathering(Generic[T]):
    """Collects what an iterator yields, in a thread that is left behind if it does not end.

    Attributes:
        found: what came so far.
        error: what the iterator raised.
    """

    def __init__(self, work: Callable[[], Iterable[T]]) -> None:
        self.found: list[T] = []
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="verl-otel-doctor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for item in self._work():
                self.found.append(item)
        except Exception as error:
            self.error = error

    def wait(self, end: float) -> bool:
        """Wait until it has ended, or until `end` by `time.monotonic()`. Returns whether it has."""
        self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

"""Flushing, and the end of the process: what is pending leaves soon, and nobody waits longer than agreed.

`Flusher.request()` is what hooks call: it returns at once and a background thread flushes. `Flusher.wait()` is for the
end of the run: it waits for a flush, never longer than what is left of the exit budget of this process.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from verl_otel import border, forks

PAUSE = 0.2
"""Seconds between two flushes: calls that follow each other quickly are flushed together."""


class Budget:
    """Seconds that this process may still make the end of the run wait, all waits together."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._lock = threading.Lock()

    def spend(self, share: float, wait: Callable[[float], Any]) -> None:
        """Call `wait(timeout)` with at most `share` (0 to 1) of what is left, and take off what it used."""
        with self._lock:
            start = time.monotonic()
            try:
                wait(max(0.0, self._left * share))
            finally:
                self._left -= time.monotonic() - start


class Last:
    """A thread for the end of the process, started before: at its end Python starts none any more (3.12).

    Args:
        work: may take longer than agreed, and is then left behind.
    """

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        self._work = work
        self._wanted, self._done = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def run(self, timeout: float) -> bool:
        """Do the work, the first time; wait for it `timeout` seconds at most. Returns whether it is done."""
        self._wanted.set()
        return self._done.wait(timeout)

    def _run(self) -> None:
        self._wanted.wait()
        try:
            self._work()
        except Exception:
            border.caught("the end of the process")
        self._done.set()


class Flusher:
    """One background thread that flushes the providers of this process on request; a forked child has one of its own
    from its first request on.

    Args:
        providers: anything with `force_flush()`; others are left out.
    """

    def __init__(self, providers: tuple[Any, ...]) -> None:
        self._flushes = [p.force_flush for p in providers if hasattr(p, "force_flush")]
        self._reset()
        self._start()
        forks.in_child(self._reset)

    def _reset(self) -> None:
        self._wanted = threading.Event()
        self._requested = 0
        self._done = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="verl-otel-flusher", daemon=True)
        self._thread.start()

    def request(self) -> int:
        """Ask for a flush; returns at once, with a number for `wait`."""
        with self._changed:
            if self._thread is None:
                try:
                    self._start()
                except RuntimeError:  # no more threads: nothing is flushed
                    border.caught("flushing in a forked process")
            self._requested += 1
            number = self._requested
        self._wanted.set()
        return number

    def wait(self, number: int, timeout: float) -> bool:
        """Wait until the flush asked for as `number` has happened, `timeout` seconds at most."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= number, timeout)

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            with self._changed:
                number = self._requested
            for flush in self._flushes:
                try:
                    flush()
                except Exception:
                    border.caught("flushing")
            with self._changed:
                self._done = number
                self._changed.notify_all()
            time.sleep(PAUSE)

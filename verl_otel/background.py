"""The background thread of a process: work that training threads hand over, so that they need not wait for it.

A forked child has a thread of its own from its first work on; what its parent had pending stays with the parent.

The thread looks at what is pending every 50 ms rather than being woken: it would want the interpreter just when the
training thread needs it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_otel import border, forks

MAX_PENDING = 10_000
"""What may wait; more is dropped and counted."""

INTERVAL = 0.05
"""Seconds between two looks at what is pending."""


@dataclass
class _Held:
    ready: Callable[[], bool]
    deadline: float
    work: Callable[..., Any]
    arguments: tuple[Any, ...]


class Background:
    """See the module. `defer` and `hold` never block and never raise.

    Args:
        on_dropped: called with a reason when work is dropped.
    """

    def __init__(self, on_dropped: Callable[[str], Any]) -> None:
        self._on_dropped = on_dropped
        self._pending: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._held: list[_Held] = []
        self._working = False
        self._released = False
        self._in_parent = False
        """Whether the thread is in the parent of this forked process."""
        self._start_lock = threading.Lock()
        self._start()
        forks.in_child(self._in_child)

    def _start(self) -> None:
        self._in_parent = False
        self._thread = threading.Thread(target=self._run, name="verl-otel-recorder", daemon=True)
        self._thread.start()

    def _in_child(self) -> None:
        self._pending, self._held, self._working = deque(), [], False
        self._start_lock = threading.Lock()
        self._in_parent = True

    def _start_in_child(self) -> None:
        with self._start_lock:
            if self._in_parent:
                try:
                    self._start()
                except RuntimeError:  # no more threads: what is handed over is dropped when it is too much
                    border.caught("recording in a forked process")

    def defer(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Call `work(*arguments)` in the background, after what was handed over before."""
        if self._in_parent:
            self._start_in_child()
        if len(self._pending) < MAX_PENDING:
            self._pending.append((work, arguments))
        else:
            self._on_dropped("queue_full")

    def hold(self, ready: Callable[[], bool], seconds: float, work: Callable[..., Any], *arguments: Any) -> None:
        """Call `work(*arguments)` as soon as `ready()` is true, at the latest after `seconds`.

        To be called by work that runs in the background.
        """
        self._held.append(_Held(ready, time.monotonic() + seconds, work, arguments))

    def hold_last(self, seconds: float, work: Callable[..., Any], *arguments: Any) -> None:
        """Call `work(*arguments)` when nothing that is held now is held any longer, at the latest after `seconds`."""
        before = list(self._held)
        self.hold(lambda: not any(held in self._held for held in before), seconds, work, *arguments)

    def release(self) -> None:
        """Hold nothing any longer: the process ends."""
        self._released = True

    def drained(self, timeout: float) -> bool:
        """Wait until everything handed over so far is done, `timeout` seconds at most."""
        deadline = time.monotonic() + timeout
        while self._pending or self._working or self._held:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True

    def _run(self) -> None:
        while True:
            self._working = True
            while self._pending:
                work, arguments = self._pending.popleft()
                self._call(work, arguments)
            for held in list(self._held):
                if self._ready(held) or self._released or time.monotonic() >= held.deadline:
                    self._held.remove(held)
                    self._call(held.work, held.arguments)
            self._working = False
            time.sleep(INTERVAL)

    def _ready(self, held: _Held) -> bool:
        try:
            return held.ready()
        except Exception:
            border.caught("asking whether work in the background can go on")
            return True

    def _call(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            work(*arguments)
        except Exception:
            border.caught("recording in the background")

"""SIGTERM, by which schedulers end a process: no exit handler runs, unless somebody handles the signal.

A handler of the user's stays and is called as ever; beside it what is pending is sent. Where nobody handles the signal,
the process ends by it as before, once what is pending is sent or spooled. A thread does that, which learns of the
signal from Python's wakeup descriptor: a main thread that is in a call which never returns (a collective that hangs)
keeps no process alive, and one that holds a lock of ours is not waited for.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from verl_otel import border

SIGNAL = signal.SIGTERM

_END = b"\xff"
"""Beside the numbers of signals: end the process."""


class Terminated(SystemExit):
    """What ends a run that is ended by a signal."""


class OnTermination:
    """Watches for SIGTERM from now on. To be made in the main thread.

    Args:
        flush: called where the user's own handler goes on.
        close: called where nobody else does anything, before the process ends.
    """

    def __init__(self, flush: Callable[[], Any], close: Callable[[], Any]) -> None:
        self._flush, self._close = flush, close
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._ray_exits = False
        self._handler = self._handle  # one object: bound methods are made anew each time
        found = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if found != -1:  # an event loop's
            signal.set_wakeup_fd(found)
        if signal.getsignal(SIGNAL) is signal.SIG_DFL:
            signal.signal(SIGNAL, self._handler)
        threading.Thread(target=self._watch, name="verl-otel-termination", daemon=True).start()
        _at_fork(weakref.WeakMethod(self._in_child))

    def ray_exits(self) -> bool:
        """Whether the signal has come, and Ray's handler ends the process by `SystemExit`, which exit handlers cannot
        see. (A handler of the user's may do whatever it likes.)"""
        time.sleep(0.01)  # the thread may have read of the signal, and wait for the interpreter
        return self._ray_exits

    def stop(self) -> None:
        """Watch no longer; what was found is put back. In the main thread only, elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread() or self._write < 0:
            return
        if signal.getsignal(SIGNAL) is self._handler:
            signal.signal(SIGNAL, signal.SIG_DFL)
        found = signal.set_wakeup_fd(-1)
        if found not in (-1, self._write):
            signal.set_wakeup_fd(found)
        self._write, write = -1, self._write
        os.close(write)  # by which the thread ends

    def _in_child(self) -> None:
        """A forked child has no such thread, and its signals are not its parent's."""
        if self._write >= 0:
            os.close(self._read)
            self.stop()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, which goes on meanwhile: called by the signal, or by a handler that was put before it."""
        with contextlib.suppress(OSError):  # the thread is late, and has enough to read
            if self._write >= 0:
                os.write(self._write, _END)

    def _watch(self) -> None:
        while arrived := os.read(self._read, 4096):
            handler = signal.getsignal(SIGNAL)
            if _END in arrived or (SIGNAL in arrived and handler is self._handler):
                self._call(self._close)
                ctypes.CDLL(None).signal(SIGNAL, signal.SIG_DFL)  # Python lets only its main thread do that
                os.kill(os.getpid(), SIGNAL)
            elif SIGNAL in arrived and callable(handler):
                self._ray_exits = str(getattr(handler, "__module__", "")).startswith("ray.")
                self._call(self._flush)
        os.close(self._read)

    def _call(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception:
            border.caught("the end of the process by a signal")


def _at_fork(in_child: Callable[[], Callable[[], None] | None]) -> None:
    """Call what `in_child` refers to in every forked child, before the signal can arrive there."""
    before = threading.local()

    def block() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def call_and_unblock() -> None:
        call = in_child()
        if call is not None:
            call()
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=call_and_unblock)

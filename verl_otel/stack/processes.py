"""A program in the background, which outlives us and which another process can find again by its pid."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A program that was started, by us or by an earlier command.

    Args:
        pid: also of its process group.
        started: when, in clock ticks since the machine's start: a pid is given away again, not with the same time.
    """

    pid: int
    started: int

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> "Process":
        """Start it, in a session of its own: it lives on when the terminal is closed."""
        with log.open("ab") as output:
            popen = subprocess.Popen(
                command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        _, started = _stat(popen.pid) or ("", 0)
        threading.Thread(target=popen.wait, name=f"wait-{popen.pid}", daemon=True).start()  # or it stays as a zombie
        return cls(popen.pid, started)

    def alive(self) -> bool:
        """Whether it runs."""
        state, started = _stat(self.pid) or ("", -1)
        return started == self.started and state not in ("Z", "X")

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        if self.alive():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def wait(self, seconds: float) -> bool:
        """Wait for its end; returns whether it has ended."""
        deadline = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def kill(self) -> None:
        """End it and what it has started, as a crash does (SIGKILL)."""
        _, started = _stat(self.pid) or ("", self.started)
        if started != self.started:  # another program has its pid, so nothing is left of its group
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self.wait(10)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and signals that end us wait until this is done: a program that has just begun is to be known first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda which, _: came.append(which))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, start time) of a process; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # its name, before that, can have anything in it
    return fields[0], int(fields[19])

"""Recorded or spooled OTLP files -> an OTLP/HTTP endpoint, each record once.

A process that has recorded what it sends itself has spooled what it could not send: the copies are left out.

How far each file was sent is kept beside it, in `.replayed.json`, so that the command can be stopped and goes on where
it was, also from another machine that sees the folder. A line that cannot be read is counted and left out. A process
that still runs sends its spool itself: replay it when the run has ended.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_otel.export import otlp_http, otlp_json
from verl_otel.export.files import COPY
from verl_otel.export.otlp import MAX_REQUEST
from verl_otel.export.otlp_http import Outcome

STATE = ".replayed.json"
LOCK = ".replay.lock"
TRIES, TRIES_AT_FIRST = 6, 2
"""How often a request is tried before giving up; at first less often, where no connection was ever made."""

PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two tries: at first, doubled each time; at most, also where the endpoint asks for more."""


class CannotReplay(Exception):
    """Nothing to send, or no way to send it. The message says what to do."""


class Stopped(Exception):
    """It was asked to stop; what was sent so far is noted."""


@dataclass
class Done:
    """What was sent."""

    requests: int = 0
    items: int = 0
    before: int = 0
    """Requests that were sent by an earlier command."""
    refused: int = 0
    """Items that the endpoint does not take."""
    unreadable: int = 0
    """Lines."""
    too_large: int = 0
    """Items."""
    left_out: int = 0
    """Files with copies of what their processes have sent themselves."""


def replay(
    folder: Path,
    endpoint: str = "",
    progress: Callable[[int, int], None] = lambda *_: None,
    stop: Callable[[], bool] = lambda: False,
    copies: bool = False,
) -> Done:
    """Send every record under `folder` that was not sent before.

    Args:
        endpoint: base URL, such as `http://127.0.0.1:4318`; by default from the environment.
        progress: called with (bytes done, bytes in all).
        stop: asked between two requests.
        copies: send copies of what the run has sent itself, too.

    Raises:
        CannotReplay: no such folder, nothing in it, no endpoint, or the endpoint does not take it.
        Stopped: `stop` said so.
    """
    if not folder.is_dir():
        raise CannotReplay(f"{folder} is not a folder: give the folder of a run, such as verl-otel/<run id>")
    found = _files(folder)
    if not found:
        raise CannotReplay(f"nothing is recorded under {folder}: give the folder of a run, such as verl-otel/<run id>")
    paths = [(path, size) for path, size in found if copies or not path.name.endswith(COPY)]
    sender = _Sender(endpoint, stop)
    done, passed, total = sender.done, 0, sum(size for _, size in paths)
    done.left_out = len(found) - len(paths)
    states: dict[Path, _State] = {}
    with contextlib.ExitStack() as locks:
        for parent in sorted({path.parent for path, _ in paths}):
            locks.enter_context(_only_one(parent))
            states[parent] = _State(parent / STATE)
        for path, _ in paths:
            state, end = states[path.parent], 0
            try:
                lines = path.open("rb")
            except FileNotFoundError:
                continue  # of a process that still runs, and has sent it
            with lines:
                for line in lines:
                    start, end = end, end + len(line)
                    passed += len(line)
                    if not line.endswith(b"\n"):
                        done.unreadable += 1  # a torn tail, or a process that is still writing: not taken as sent
                    elif start < state.offset(path.name):
                        done.before += line.strip() not in NOTHING
                    else:
                        sender.send(line)
                        state.set(path.name, end)
                    progress(passed, total)
    return done


def _files(folder: Path) -> list[tuple[Path, int]]:
    """The files and their sizes, the oldest first."""
    found = []
    for path in folder.rglob("*.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found.append((status.st_mtime, path, status.st_size))
    return [(path, size) for _, path, size in sorted(found)]


NOTHING = {b"", *(otlp_json.empty(signal) for signal in otlp_http.SIGNALS)}
"""Records that the process itself has sent, and blanked."""


class _Sender:
    """Sends lines, and counts."""

    def __init__(self, endpoint: str, stop: Callable[[], bool]) -> None:
        self.done = Done()
        self._stop = stop
        self._connected = False
        base = endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
        self._endpoints: dict[str, otlp_http.Endpoint] = {}
        try:
            for signal in otlp_http.SIGNALS:
                if endpoint:
                    self._endpoints[signal] = otlp_http.Endpoint(signal, f"{endpoint.removesuffix('/')}/v1/{signal}")
                elif base or os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"):
                    self._endpoints[signal] = otlp_http.Endpoint(signal)
        except ValueError as error:
            raise CannotReplay(str(error)) from error
        if not self._endpoints:
            raise CannotReplay("say where to send it: --endpoint http://127.0.0.1:4318, or OTEL_EXPORTER_OTLP_ENDPOINT")

    def send(self, line: bytes) -> None:
        if self._stop():
            raise Stopped
        found = otlp_json.from_line(line)
        if found is None:
            self.done.unreadable += not line.isspace()
            return
        signal, request = found
        if not otlp_json.items(signal, request):
            return
        if signal not in self._endpoints:
            raise CannotReplay(
                f"there are {signal}, but no endpoint for them: give --endpoint, or "
                f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"
            )
        parts, too_large = otlp_json.split(signal, request, MAX_REQUEST)
        self.done.too_large += too_large
        for part in parts:
            self._post(signal, part, otlp_json.items_of_bytes(signal, part))

    def _post(self, signal: str, content: bytes, items: int) -> None:
        endpoint, pause, attempt = self._endpoints[signal], PAUSE, 0
        while True:
            answer = endpoint.post(content)
            self._connected = self._connected or answer.status > 0
            if answer.outcome is not Outcome.LATER:
                refused = items if answer.outcome is Outcome.REFUSED else min(answer.rejected, items)
                self.done.requests += answer.outcome is Outcome.DELIVERED
                self.done.items += items - refused
                self.done.refused += refused
                return
            attempt += 1
            if attempt >= (TRIES if self._connected else TRIES_AT_FIRST):
                raise CannotReplay(
                    f"{endpoint.shown} does not take it ({answer.reason}); {self.done.requests} requests were sent. "
                    "Start the command again to go on"
                )
            self._sleep(min(LONGEST_PAUSE, pause if answer.wait is None else answer.wait))
            pause *= 2

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._stop():
                raise Stopped
            time.sleep(min(left, 0.1))


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Nobody else replays this folder meanwhile, where its file system knows locks."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise CannotReplay(_CANNOT_NOTE.format(folder, error)) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotReplay(f"another command replays {folder} now") from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


_CANNOT_NOTE = "how far it was sent cannot be noted in {} ({}): copy the folder to where you may write, and give that"


def offsets(path: Path) -> dict[str, int]:
    """File -> how far it was sent, by the `STATE` of its folder."""
    try:
        return {str(name): int(offset) for name, offset in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


class _State:
    """How far each file of a folder was sent: name -> offset of the first byte that was not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = offsets(path)
        self._write()  # before anything is sent

    def offset(self, name: str) -> int:
        return self._offsets.get(name, 0)

    def set(self, name: str, offset: int) -> None:
        self._offsets[name] = offset
        self._write()

    def _write(self) -> None:
        written = self._path.with_suffix(".tmp")
        try:
            written.write_text(json.dumps(self._offsets))
            written.chmod(0o600)
            written.replace(self._path)
        except OSError as error:
            raise CannotReplay(_CANNOT_NOTE.format(self._path.parent, error)) from error

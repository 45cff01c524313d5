"""What could not be sent, on local disk: OTLP as JSON lines, as in recordings, so that `report` and `replay` read it.

Files for each process, signal and part, `<run>/spool/<role>-<host>-<pid>-<random>.<signal>.<n>.jsonl`; a line is one
request, so a torn tail loses only itself. Parts are sent from the oldest on; a record that was sent is blanked where it
is, so that a process that is killed leaves nothing that is sent twice, and a part that was sent is removed. No name is
used a second time: `replay` notes how far it came by name. Files are their owner's only.
"""

import contextlib
import os
import secrets
import threading
from dataclasses import dataclass, field
from typing import Any

from verl_otel import border, config, forks
from verl_otel.export import otlp_json

SPOOL = "spool"
"""In the folder of the run."""

MAX_BYTES = 1 << 30
"""Bytes that a process may have in its spool; what comes then is dropped, and counted."""

PART = 16 << 20
"""Bytes of a part; a part that was sent is removed."""

FULL, FAILED = "spool_full", "spool_failed"


class NotKept(Exception):
    """A request cannot be kept; the message is the reason: `FULL` or `FAILED`."""


@dataclass(frozen=True)
class Kept:
    """Where a record is."""

    signal: str
    path: str
    start: int
    end: int


@dataclass(frozen=True)
class Record:
    """A spooled request, to be sent."""

    kept: Kept
    content: bytes
    items: int


@dataclass
class _Part:
    path: str
    file: Any
    size: int = 0
    read: int = 0
    """Where the oldest record begins that is still to be sent."""
    stays: bool = False
    """Whether it holds a record that is left to `replay`."""


@dataclass
class _Queue:
    """The parts of one signal, the oldest first; the last one may be open for writing."""

    parts: list[_Part] = field(default_factory=list)
    records: int = 0
    number: int = 0


class Spool:
    """The spool of this process. Safe for several threads.

    Args:
        folder: made at the first record, in a folder of the run, which is made too.
        name: of this process, for its files.
    """

    def __init__(self, folder: str, name: str, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self._name = name
        self._max_bytes = max_bytes
        self._reset()
        forks.in_child(self._reset)

    def _reset(self) -> None:
        """At first, and in a forked child, which has a spool of its own."""
        self._lock = threading.Lock()
        self._queues: dict[str, _Queue] = {}
        self._bytes = 0
        self._process = f"{self._name}-{os.getpid()}-{secrets.token_hex(3)}"

    def write(self, signal: str, content: bytes) -> Kept:
        """Add a request (protobuf).

        Raises:
            NotKept: the spool is full, or the disk is, or the folder cannot be written.
        """
        try:
            line = otlp_json.to_line(otlp_json.from_bytes(signal, content))
        except Exception as error:
            border.caught("spooling a request")
            raise NotKept(FAILED) from error
        with self._lock:
            if self._bytes + len(line) > self._max_bytes:
                border.warn_once(
                    "spool size", "%s has reached %d bytes of this process and takes no more", self.folder, self._bytes
                )
                raise NotKept(FULL)
            queue = self._queues.setdefault(signal, _Queue())
            try:
                part = self._part(queue, signal, len(line))
                self._append(part, line)
            except OSError as error:
                border.warn_once(
                    "spooling",
                    "what cannot be sent cannot be kept either (%s), and is lost; set %s to a folder that has room",
                    error,
                    config.FOLDER,
                )
                raise NotKept(FAILED) from error
            part.size += len(line)
            self._bytes += len(line)
            queue.records += 1
            return Kept(signal, part.path, part.size - len(line), part.size)

    def pending(self, signal: str) -> bool:
        """Whether something is there to be sent."""
        queue = self._queues.get(signal)
        return queue is not None and queue.records > 0

    def peek(self, signal: str) -> Record | None:
        """The oldest request of a signal; it stays until `done` or `leave`.

        Raises:
            OSError: it cannot be read now.
        """
        with self._lock:
            queue = self._queues.get(signal)
            if queue is None:
                return None
            while queue.parts:
                record = self._read(signal, queue.parts[0])
                if record is not None:
                    return record
                self._remove_part(queue)
            queue.records = 0
            return None

    def done(self, kept: Kept) -> bool:
        """A record has been sent, or never will be. False if that was known already."""
        return self._take(kept, blank=True)

    def leave(self, kept: Kept) -> None:
        """Leave a record to `replay`, and go on with the next one."""
        self._take(kept, blank=False)

    def close(self) -> None:
        """Close the files. What is written later goes to new ones."""
        with self._lock:
            for queue in self._queues.values():
                for part in queue.parts:
                    self._finish(part)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _part(self, queue: _Queue, signal: str, size: int) -> _Part:
        part = queue.parts[-1] if queue.parts else None
        if part is not None and part.file is not None:
            if part.size == 0 or part.size + size <= PART:
                return part
            self._finish(part)
        os.makedirs(os.path.dirname(self.folder), mode=0o700, exist_ok=True)
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        queue.number += 1
        path = os.path.join(self.folder, f"{self._process}.{signal}.{queue.number:04d}.jsonl")
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        queue.parts.append(_Part(path, os.fdopen(descriptor, "ab", buffering=0)))
        return queue.parts[-1]

    def _append(self, part: _Part, line: bytes) -> None:
        try:
            if part.file.write(line) != len(line):
                raise OSError("the disk is full")
        except OSError:
            try:
                part.file.truncate(part.size)  # what was written of it would spoil the next line
            except OSError:
                self._finish(part)
            raise

    def _finish(self, part: _Part) -> None:
        file, part.file = part.file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _read(self, signal: str, part: _Part) -> Record | None:
        """The oldest record of a part; None if nothing is left in it."""
        try:
            with open(part.path, "rb") as lines:
                lines.seek(part.read)
                while part.read < part.size:
                    line = lines.readline()
                    if not line:
                        return None
                    start, end = part.read, part.read + len(line)
                    found = otlp_json.from_line(line)
                    items = otlp_json.items(*found) if found is not None else 0
                    if found is not None and items:
                        return Record(Kept(signal, part.path, start, end), found[1].SerializeToString(), items)
                    part.read = end  # blanked, or spoilt by others
                return None
        except FileNotFoundError:
            return None  # somebody has removed it

    def _take(self, kept: Kept, blank: bool) -> bool:
        with self._lock:
            queue = self._queues.get(kept.signal)
            part = next((part for part in queue.parts if part.path == kept.path), None) if queue is not None else None
            if queue is None or part is None or kept.start < part.read:
                return False
            if not blank:
                part.stays = True
            elif not self._blank(kept):
                return False
            queue.records -= 1
            if kept.start == part.read:
                part.read = kept.end
            if queue.records <= 0:  # the others were blanked
                while queue.parts:
                    self._remove_part(queue)
                queue.records = 0
            elif part is queue.parts[0] and part.read >= part.size:
                self._remove_part(queue)
            return True

    def _blank(self, kept: Kept) -> bool:
        """Overwrite a record by a request of nothing. False if it is one already."""
        empty = otlp_json.empty(kept.signal)
        try:
            with open(kept.path, "r+b") as file:
                file.seek(kept.start)
                if file.read(len(empty)) == empty:
                    return False
                file.seek(kept.start)
                file.write(empty.ljust(kept.end - kept.start - 1))
        except OSError:
            border.caught("marking what was sent in the spool")
        return True

    def _remove_part(self, queue: _Queue) -> None:
        part = queue.parts.pop(0)
        self._finish(part)
        if part.stays:
            return
        self._bytes -= part.size
        try:
            os.remove(part.path)
        except FileNotFoundError:
            pass
        except OSError:
            border.caught("removing a part of the spool that was sent")

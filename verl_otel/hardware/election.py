"""One sampler per node and run, and what the processes of the run tell it: locks on files in a private folder.

    <temp dir>/verl-otel-<user id>/<run>.lock   locked by the process that samples
                                  /<run>.<pid>  a process's announcement (JSON), locked as long as the process lives

The kernel frees the locks of a process that dies, however it dies. A forked child would keep them: it calls `abandon`.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import tempfile
import time
from typing import Any

ABANDONED = 86_400.0
"""Seconds after which a file that no process has touched is removed; those that live touch theirs at each interval."""


def folder() -> str:
    """The private folder of this user, made if it is not there.

    Raises:
        OSError: it cannot be made, or is someone else's.
    """
    path = os.path.join(tempfile.gettempdir(), f"verl-otel-{os.getuid()}")
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{path} is not a folder of this user")
    if stat.S_IMODE(found.st_mode) != 0o700:
        os.chmod(path, 0o700)
    return path


def file_name(run_id: str) -> str:
    """The run id as the beginning of a file name, without dots; different for different runs."""
    legal = re.sub(r"[^A-Za-z0-9_-]", "_", run_id)[:100]
    return legal if legal == run_id else f"{legal}-{hashlib.sha256(run_id.encode()).hexdigest()[:12]}"


def _tidy(path: str) -> None:
    """Remove what the processes of earlier runs have left: Ray kills its workers."""
    for entry in os.scandir(path):
        with contextlib.suppress(OSError):  # another one tidies too
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED:
                os.unlink(entry.path)


class Election:
    """This process's part in one run. Not for several threads."""

    def __init__(self, run_id: str) -> None:
        self._beginning = os.path.join(folder(), file_name(run_id))
        self._lock: int | None = None
        self._announcement: int | None = None

    def is_won(self) -> bool:
        """Whether this process samples; tries to win if it does not yet."""
        for file in (self._lock, self._announcement):
            if file is not None:
                os.utime(file)  # programs that tidy the temp dir take old files away
        if self._lock is None:
            self._lock = self._try(f"{self._beginning}.lock")
            if self._lock is not None:
                _tidy(os.path.dirname(self._beginning))
        return self._lock is not None

    @staticmethod
    def _try(path: str) -> int | None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        won = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            won = os.path.samestat(os.fstat(file), os.stat(path))  # else the one before has just removed it
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            if not won:
                os.close(file)
        return file if won else None

    def announce(self, content: dict[str, Any]) -> None:
        """Tell the sampler, as long as this process lives; replaces what was announced before."""
        path = f"{self._beginning}.{os.getpid()}"
        file = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.write(file, json.dumps(content).encode())
            os.rename(f"{path}.new", path)
        except BaseException:
            os.close(file)
            raise
        file, self._announcement = self._announcement, file
        if file is not None:
            os.close(file)

    def announced(self) -> list[dict[str, Any]]:
        """What the living processes of the run announce. Removes what dead ones have left."""
        where, beginning = os.path.split(self._beginning)
        found = []
        for name in os.listdir(where):
            if re.fullmatch(re.escape(beginning) + r"\.\d+", name):
                content = self._read(os.path.join(where, name))
                if content is not None:
                    found.append(content)
        return found

    @staticmethod
    def _read(path: str) -> dict[str, Any] | None:
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                return json.loads(os.read(file, 1 << 20))
            except ValueError:
                return None  # not one of ours
        else:
            os.unlink(path)  # nobody holds it: its process is dead
            return None
        finally:
            os.close(file)

    def leave(self) -> None:
        """Take back the announcement and free the lock."""
        for file, ending in ((self._announcement, os.getpid()), (self._lock, "lock")):
            if file is not None:
                with contextlib.suppress(OSError):
                    os.unlink(f"{self._beginning}.{ending}")
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: close the files, without freeing the locks that the parent has on them."""
        files, self._lock, self._announcement = (self._lock, self._announcement), None, None
        for file in files:
            if file is not None:
                os.close(file)

"""What was sent to whom, so that nothing is said twice: Alertmanager sends a whole group again for each change in it.

Kept in a file, if one is given, over restarts of the relay.
"""

import json
import logging
import os
import threading
from collections import OrderedDict

logger = logging.getLogger(__name__)

MAX_KEYS = 50_000
"""The oldest are forgotten: an alert that has fired for long may then be told once more."""


class Sent:
    """What was sent, and what is about to be."""

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._keys: OrderedDict[str, bool] = OrderedDict()
        for key in _read(path) if path else ():
            self._keys[key] = True

    def begin(self, key: str) -> bool:
        """Whether `key` is new; from now on it is not."""
        with self._lock:
            if key in self._keys:
                return False
            self._keys[key] = False
            while len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)
            return True

    def done(self, keys: list[str]) -> None:
        """These have been sent."""
        with self._lock:
            self._keys.update((key, True) for key in keys)
            kept = [key for key, sent in self._keys.items() if sent]
        if self._path:
            self._write(kept)

    def forget(self, keys: list[str]) -> None:
        """These could not be sent: when Alertmanager repeats them, they are new."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def _write(self, keys: list[str]) -> None:
        written = f"{self._path}.{os.getpid()}.tmp"
        try:
            with self._writing:
                with open(written, "w", encoding="utf-8") as file:
                    json.dump(keys, file)
                os.replace(written, self._path)
        except OSError as error:
            logger.warning("%s cannot be written (%s): a restart may repeat messages", self._path, error.strerror)


def _read(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            keys = json.load(file)
        return [key for key in keys if isinstance(key, str)][-MAX_KEYS:]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s cannot be read (%s): messages may be repeated", path, type(error).__name__)
        return []

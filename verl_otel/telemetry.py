"""The telemetry of this process, made once, when a hook first needs it.

`current()` is what hooks ask: it gives the process's `Telemetry`, or None when telemetry is off or could not be made.
Making it late keeps processes that never run verl (Ray's own, idle workers) exactly as they are without us.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from verl_otel import border, config, forks

if TYPE_CHECKING:
    from verl_otel.assembly import Telemetry

_lock = forks.lock(sys.modules[__name__], "_lock", threading.RLock)
_current: Telemetry | None = None
_enabled = False
_given: dict[str, Any] = {}


def enable(**given_providers: Any) -> None:
    """Let `current()` make telemetry, with the caller's providers where given."""
    global _enabled
    with _lock:
        _given.clear()
        _given.update({name: value for name, value in given_providers.items() if value is not None})
        _enabled = not config.sdk_disabled()


def disable() -> None:
    """Send what is pending and stop; hooks that are still in place do nothing from now on."""
    global _enabled, _current
    with _lock:
        telemetry, _current, _enabled = _current, None, False
    if telemetry is not None:
        telemetry.close()


def current() -> Telemetry | None:
    """The telemetry of this process; None if there is none. Cheap, and never raises."""
    if _current is not None or not _enabled:
        return _current
    return _make()


def peek() -> Telemetry | None:
    """Like `current()`, but makes nothing."""
    return _current


def _make() -> Telemetry | None:
    global _current, _enabled
    with _lock:
        if _current is None and _enabled:
            try:
                from verl_otel.assembly import Telemetry
                from verl_otel.identity import Identity

                _current = Telemetry(config.Settings.from_environ(), Identity.detect(), **_given)
                _current.start()
            except Exception as error:
                _enabled = False
                border.warn_once(
                    "setup",
                    "telemetry is off in this process, since OpenTelemetry cannot be set up (%s: %s); the run goes on. "
                    "Check the OTEL_* variables",
                    type(error).__name__,
                    error,
                )
        return _current

"""What an examination finds: an id that can be searched for, one line what, and one line what to do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OK, NOTE, WARNING, PROBLEM = LEVELS = ("ok", "note", "warning", "problem")
"""In order of weight. A note says what is off by choice, or cannot be known here."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    `id` is stable, and described in docs/doctor.md; `data` has the same as `what` in parts, for programs.
    """

    id: str
    level: str
    what: str
    fix: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def ok(id: str, what: str, **data: Any) -> Finding:
    """It is as it has to be."""
    return Finding(id, OK, what, "", data)


def note(id: str, what: str, fix: str = "", **data: Any) -> Finding:
    """It may be meant."""
    return Finding(id, NOTE, what, fix, data)


def warning(id: str, what: str, fix: str, **data: Any) -> Finding:
    """A part of the telemetry is missing, or wrong."""
    return Finding(id, WARNING, what, fix, data)


def problem(id: str, what: str, fix: str, **data: Any) -> Finding:
    """Telemetry does not arrive."""
    return Finding(id, PROBLEM, what, fix, data)

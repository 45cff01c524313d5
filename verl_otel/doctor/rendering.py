"""An examination as text for people, and as JSON for programs (docs/doctor.md)."""

import json
import textwrap
import time
from itertools import groupby

from verl_otel.doctor.examination import Examination
from verl_otel.doctor.findings import NOTE, OK, PROBLEM, WARNING, Finding
from verl_otel.version import __version__

SCHEMA = 1
"""Raised when something in the JSON is taken away or changes its meaning."""

WIDTH = 120
_COLOURS = {OK: "32", NOTE: "36", WARNING: "33", PROBLEM: "31"}
_INDENT = " " * 10


def as_text(found: Examination, colour: bool) -> str:
    """For people."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found.time))
    lines = [f"verl-otel {__version__} on {found.host}, Python {found.python}, {when}"]
    for area, of_area in groupby(found.findings, key=lambda pair: pair[0]):
        lines += ["", area, *(line for _, finding in of_area for line in _lines(finding, colour))]
    counted = ((found.count(level), level) for level in (PROBLEM, WARNING, NOTE, OK))
    shown = ", ".join(f"{count} {level}{'s' if level != OK and count != 1 else ''}" for count, level in counted)
    return "\n".join([*lines, "", f"{shown} ({found.seconds:.0f} s)"])


def _lines(finding: Finding, colour: bool) -> list[str]:
    level = f"{finding.level:<8}"
    if colour:
        level = f"\033[{_COLOURS[finding.level]}m{level}\033[0m"
    what = finding.what if finding.level == OK else f"{finding.what}  [{finding.id}]"
    first, *rest = textwrap.wrap(what, WIDTH - len(_INDENT), break_on_hyphens=False, break_long_words=False) or [""]
    lines = [f"  {level}{first}", *(_INDENT + line for line in rest)]
    if finding.fix:
        lines += textwrap.wrap(
            finding.fix,
            WIDTH,
            initial_indent=f"{_INDENT}-> ",
            subsequent_indent=f"{_INDENT}   ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    return lines


def as_json(found: Examination, strict: bool) -> str:
    """For programs."""
    content = {
        "schema": SCHEMA,
        "verl_otel": __version__,
        "id": found.probe_id,
        "time": found.time,
        "seconds": round(found.seconds, 3),
        "host": found.host,
        "python": found.python,
        "level": found.level,
        "exit_status": found.exit_status(strict),
        "counts": {level: found.count(level) for level in (OK, NOTE, WARNING, PROBLEM)},
        "findings": [
            {
                "id": finding.id,
                "area": area,
                "level": finding.level,
                "what": finding.what,
                "fix": finding.fix,
                "data": finding.data,
            }
            for area, finding in found.findings
        ],
    }
    return json.dumps(content, indent=2, default=str)

"""The parameters of the alert rules: `deploy/prometheus/thresholds.yaml`, and a file of the user's on top of it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_otel.stack.configuration import DEPLOY

SHIPPED = DEPLOY / "prometheus" / "thresholds.yaml"

SEVERITIES = ("critical", "warning", "info")

_DURATION = re.compile(r"(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?\Z")


class BadThresholds(ValueError):
    """The file cannot be used; the message says where, and what to do."""


@dataclass(frozen=True)
class Thresholds:
    """Parameters as the files have them.

    `run` and `links` are of all alerts; `alerts`: name -> parameter -> value; `projects`: project -> alert -> the
    parameters of its own, with the others filled in, or None where the alert is off.
    """

    run: Mapping[str, Any]
    links: Mapping[str, str]
    alerts: Mapping[str, Mapping[str, Any] | None]
    projects: Mapping[str, Mapping[str, Mapping[str, Any] | None]]


def load(path: Path | None = None) -> Thresholds:
    """The shipped parameters; with `path`, those of this file in place of the shipped ones of the same name.

    Raises:
        BadThresholds: a file cannot be read, or says something that no rule has.
    """
    shipped = _read(SHIPPED)
    own = {} if path is None else _read(path)
    where = str(path or SHIPPED)
    for part in own:
        if part not in shipped:
            raise BadThresholds(f"{where}: {part}: there are only {', '.join(shipped)}")
    changes = {part: _mapping(own.get(part), f"{where}: {part}") for part in shipped}
    for name, address in changes["links"].items():
        if name not in shipped["links"] or not isinstance(address, str):
            raise BadThresholds(f"{where}: links: {name}: has to be the text of one of {', '.join(shipped['links'])}")
    alerts = {
        **shipped["alerts"],
        **_alerts(shipped["alerts"], shipped["alerts"], changes["alerts"], f"{where}: alerts"),
    }
    return Thresholds(
        run=_over(shipped["run"], changes["run"], f"{where}: run"),
        links={**shipped["links"], **changes["links"]},
        alerts=alerts,
        projects={
            str(project): _alerts(alerts, shipped["alerts"], changed, f"{where}: projects: {project}")
            for project, changed in {**shipped["projects"], **changes["projects"]}.items()
        },
    )


def seconds(duration: str) -> int:
    """A duration of Prometheus, such as `1h30m`, in seconds.

    Raises:
        ValueError: it is none.
    """
    found = _DURATION.match(str(duration))
    if found is None:
        raise ValueError(f"{duration!r} is not a duration such as 30s, 10m, 1h30m or 2d")
    return sum(int(n or 0) * unit for n, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return _mapping(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadThresholds(f"{path}: {error}") from error


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadThresholds(f"{where}: has to be a mapping (name: value), not {value!r}")
    return value


def _alerts(
    alerts: Mapping[str, Mapping[str, Any] | None], shipped: Mapping[str, Mapping[str, Any]], changes: Any, where: str
) -> dict[str, Mapping[str, Any] | None]:
    """The alerts that are changed. One that is off for all may be on for a project: then by the shipped parameters."""
    changed = {}
    for name, parameters in _mapping(changes, where).items():
        if name not in shipped:
            raise BadThresholds(f"{where}: {name}: there is no such alert; there are {', '.join(shipped)}")
        before = alerts[name] or shipped[name]
        changed[name] = None if parameters is False else _over(before, parameters, f"{where}: {name}")
    return changed


def _over(parameters: Mapping[str, Any], changes: Any, where: str) -> Mapping[str, Any]:
    changes = _mapping(changes, where)
    for name, value in changes.items():
        if name not in parameters:
            raise BadThresholds(f"{where}: {name}: there is no such parameter; there are {', '.join(parameters)}")
        _check(name, parameters[name], value, f"{where}: {name}")
    return {**parameters, **changes}


def _check(name: str, before: Any, value: Any, where: str) -> None:
    """`value` has to be of the kind of the shipped one: a duration, a number, or `off` where it is a limit."""
    if name == "severity":
        if value not in SEVERITIES:
            raise BadThresholds(f"{where}: {value!r} is none of {', '.join(SEVERITIES)}")
    elif name == "ignore":
        _check_pattern(value, where)
    elif isinstance(before, list):
        if not isinstance(value, list) or not value:
            raise BadThresholds(f"{where}: {value!r} has to be a list of durations, such as [30m, 4h]")
        for one in value:
            _check_duration(one, where)
    elif isinstance(before, str):
        _check_duration(value, where)
    elif value is True or not isinstance(value, (bool, int, float)) or not math.isfinite(value):
        raise BadThresholds(f"{where}: {value!r} has to be a number, or off")
    elif value < 0 and name != "reward":
        raise BadThresholds(f"{where}: {value!r} is below 0")


def _check_duration(value: Any, where: str) -> None:
    try:
        seconds(value)
    except ValueError as error:
        raise BadThresholds(f"{where}: {error}") from error


def _check_pattern(value: Any, where: str) -> None:
    try:
        re.compile(value)
    except (re.error, TypeError) as error:
        raise BadThresholds(f"{where}: {value!r} is not a regular expression: {error}") from error

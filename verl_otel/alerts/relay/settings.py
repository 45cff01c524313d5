"""The relay's configuration: a YAML file, or variables for one robot. Secrets are in variables or files only."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from verl_otel.alerts.relay.notification import Alert
from verl_otel.alerts.relay.robots import KINDS, Robot
from verl_otel.control.requests import PAUSE, STOP, Channel, NoControl

TOKEN = "VERL_OTEL_RELAY_TOKEN"
"""The bearer token that Alertmanager must bring."""

KIND, URL, SECRET = "VERL_OTEL_RELAY_KIND", "VERL_OTEL_RELAY_URL", "VERL_OTEL_RELAY_SECRET"
"""One robot, without a file: its kind, its URL and, if it signs, its secret."""

ACTIONS = {"checkpoint-and-pause": PAUSE, "checkpoint-and-stop": STOP}


class BadSettings(Exception):
    """The configuration cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Matcher:
    """Which alerts are meant: label -> the values that it may have. No labels mean all alerts."""

    labels: Mapping[str, frozenset[str]]

    def fits(self, alert: Alert) -> bool:
        return all(alert.labels.get(label, "") in values for label, values in self.labels.items())


@dataclass(frozen=True)
class RobotRoute:
    """A robot and what it is told."""

    name: str
    robot: Robot
    match: Matcher


@dataclass(frozen=True)
class ActionRoute:
    """What a run is asked when an alert fires."""

    action: str
    match: Matcher


@dataclass(frozen=True)
class Settings:
    """The configuration, checked."""

    robots: tuple[RobotRoute, ...]
    actions: tuple[ActionRoute, ...] = ()
    channel: Channel | None = None
    """Where runs are asked; there if there are actions."""
    token: str = ""
    state: str = ""
    """The file in which is kept what was sent; empty for none."""

    @classmethod
    def load(cls, path: str, environ: Mapping[str, str] | None = None) -> "Settings":
        """Read the file at `path`, or for an empty one the variables. Raises `BadSettings`."""
        env = os.environ if environ is None else environ
        data = _file(path) if path else _one_robot(env)
        _known(data, "the configuration", {"robots", "actions", "state"})
        robots = tuple(_robot(item, number, env) for number, item in enumerate(_list(data, "robots"), 1))
        names = [route.name for route in robots]
        if len(set(names)) < len(names):
            raise BadSettings("two robots have the same name")
        actions = tuple(_action(item, number) for number, item in enumerate(_list(data, "actions"), 1))
        if not robots and not actions:
            raise BadSettings("the configuration has neither robots nor actions")
        token = env.get(TOKEN, "").strip()
        channel = None
        if actions:
            if not token:
                raise BadSettings(f"with actions, set {TOKEN}: otherwise anyone who reaches the relay stops runs")
            try:
                channel = Channel.from_environ(env)
            except NoControl as error:
                raise BadSettings(str(error)) from error
            if channel is None:
                raise BadSettings("with actions, set VERL_OTEL_CONTROL to the folder that the runs share")
        return cls(robots, actions, channel, token, str(data.get("state") or ""))


def _file(path: str) -> Mapping[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            data = yaml.safe_load(file)
    except OSError as error:
        raise BadSettings(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)  # not the text: it may have what was meant to be secret
        raise BadSettings(f"{path} is not YAML" + (f", see line {mark.line + 1}" if mark else "")) from error
    if not isinstance(data, dict):
        raise BadSettings(f"{path} is not a map with `robots:`")
    return data


def _one_robot(env: Mapping[str, str]) -> Mapping[str, Any]:
    if not env.get(URL):
        raise BadSettings(f"give --config, or for one robot set {KIND} ({', '.join(KINDS)}) and {URL}")
    robot: dict[str, Any] = {"name": "robot", "kind": env.get(KIND, ""), "url": {"env": URL}}
    return {"robots": [{**robot, "secret": {"env": SECRET}} if env.get(SECRET) else robot]}


def _list(data: Mapping[str, Any], key: str) -> list[Any]:
    found = data.get(key) or []
    if not isinstance(found, list):
        raise BadSettings(f"{key} is not a list")
    return found


def _known(data: Any, what: str, keys: set[str]) -> None:
    if not isinstance(data, dict):
        raise BadSettings(f"{what} is not a map")
    unknown = sorted(map(str, set(data) - keys))
    if unknown:
        raise BadSettings(f"{what} has {', '.join(unknown)}, which is not known; known are {', '.join(sorted(keys))}")


def _robot(data: Any, number: int, env: Mapping[str, str]) -> RobotRoute:
    what = f"robot {number}"
    _known(data, what, {"name", "kind", "url", "secret", "mentions", "match"})
    kind = KINDS.get(str(data.get("kind")))
    name = str(data.get("name") or f"{data.get('kind')}-{number}")
    if kind is None:
        raise BadSettings(f"{what}: kind {data.get('kind')!r} is not known; known are {', '.join(KINDS)}")
    mentions = data.get("mentions") or []
    if not isinstance(mentions, list) or len(mentions) > 50:
        raise BadSettings(f"{what}: mentions is not a list of 50 at most")
    secret = _secret(data["secret"], f"{what}: secret", env) if "secret" in data else ""
    robot = kind(_secret(data.get("url"), f"{what}: url", env), secret, tuple(str(who)[:64] for who in mentions))
    problem = robot.problem()
    if problem:
        raise BadSettings(f"{what} ({name}): {problem}")
    return RobotRoute(name, robot, _matcher(data.get("match"), what))


def _action(data: Any, number: int) -> ActionRoute:
    what = f"action {number}"
    _known(data, what, {"action", "match"})
    if data.get("action") not in ACTIONS:
        raise BadSettings(f"{what}: {data.get('action')!r} is not known; known are {', '.join(ACTIONS)}")
    match = _matcher(data.get("match"), what)
    if "alertname" not in match.labels:
        raise BadSettings(f"{what}: say in `match` for which alertname")
    return ActionRoute(ACTIONS[data["action"]], match)


def _matcher(data: Any, what: str) -> Matcher:
    if data is None:
        return Matcher({})
    if not isinstance(data, dict):
        raise BadSettings(f"{what}: match is not a map from a label to its values")
    values = {label: value if isinstance(value, list) else [value] for label, value in data.items()}
    return Matcher({str(label): frozenset(map(str, given)) for label, given in values.items()})


def _secret(data: Any, what: str, env: Mapping[str, str]) -> str:
    """A secret by the name of a variable or a file. What stands there instead is not shown: it may be the secret."""
    if not isinstance(data, dict) or len(data) != 1 or not isinstance(next(iter(data.values())), str):
        raise BadSettings(f"{what} is {{env: NAME}} or {{file: PATH}}: it is a secret, which is not for this file")
    ((source, name),) = data.items()
    if source == "env":
        found = env.get(name, "").strip()
        if not found:
            raise BadSettings(f"{what}: the variable {name} is not set")
        return found
    if source != "file":
        raise BadSettings(f"{what} is {{env: NAME}} or {{file: PATH}}")
    try:
        with open(name, encoding="utf-8") as file:
            found = file.read(8192).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"{what}: {name} cannot be read: {type(error).__name__}") from error
    if not found:
        raise BadSettings(f"{what}: {name} is empty")
    return found

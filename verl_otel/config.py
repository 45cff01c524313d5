"""Every setting of verl-otel: its variable, its default, its check.

OpenTelemetry's own variables (`OTEL_*`) say where telemetry goes and how much of it; the `VERL_OTEL_*` variables below
are only for what OpenTelemetry has no name for. A value that cannot be read is reported once and its default is used.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from verl_otel import border

RUN_ID = "VERL_OTEL_RUN_ID"
"""Identity of the run, stable over restarts. Default: made once in the launcher, e.g. `20261129-155413-3f9a1c`."""

RUN_ATTEMPT = "VERL_OTEL_RUN_ATTEMPT"
"""1, 2, ... after each restart of the same run. Default: 1."""

PROJECT = "VERL_OTEL_PROJECT"
"""Project name on every resource. Default: verl's `trainer.project_name`."""

EXPERIMENT = "VERL_OTEL_EXPERIMENT"
"""Experiment name on every resource. Default: verl's `trainer.experiment_name`."""

FOLDER = "VERL_OTEL_FOLDER"
"""Folder under which runs are recorded when no OTLP endpoint is configured. Default: `./verl-otel`."""

TRAJECTORIES = "VERL_OTEL_TRAJECTORIES"
"""How many trajectories of a step each agent-loop worker records as spans, besides all that failed and the slowest one;
0 for none at all. Default: 4."""

MESSAGE_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""OpenTelemetry's own: `true` (or `span_only`, `span_and_event`) puts prompts, responses and tool calls on spans.
Default: no."""

EXIT_TIMEOUT = "VERL_OTEL_EXIT_TIMEOUT"
"""Seconds by which the end of the run may be delayed to send what is pending. Default: 5."""

LEVELS = "VERL_OTEL_LEVELS"
"""What becomes metrics, by module: `rollout=detailed,critic=basic,reward=off`, `*` for the others. Default: detailed.
Modules are those of the registry and of users' own metrics. Step events always have everything."""

RANK_DETAIL = "VERL_OTEL_RANK_DETAIL"
"""Which ranks' own values become metrics: `all`, `outliers`, `off`, or a number n for every n-th step. Default: all."""

UNKNOWN_KEYS = "VERL_OTEL_UNKNOWN_KEYS"
"""How many keys of verl that the registry does not know become metrics. Default: 500; step events have them all."""

MODE = "VERL_OTEL_MODE"
"""`online`; `offline`: record in files, send nothing, whatever endpoint is configured; `disabled`. Default: online."""

MAX_PENDING = "VERL_OTEL_MAX_PENDING_MIB"
"""MiB of OTLP/HTTP requests that may wait in memory in each process; what comes then goes to disk. Default: 32."""

DEFAULT_PENDING = 32

DISABLED_HOOKS = "VERL_OTEL_DISABLED_HOOKS"
"""Comma-separated names of hooks to leave out (the file names in `verl_otel/hooks`)."""

CONTROL = "VERL_OTEL_CONTROL"
"""A folder that the nodes share, in which the run may be asked to save a checkpoint, pause or stop. Default: off."""

CONTROL_TOKEN_FILE = "VERL_OTEL_CONTROL_TOKEN_FILE"
"""The file with the token with which such requests are signed; no other user may read it."""

CONTROL_MAX_PAUSE = "VERL_OTEL_CONTROL_MAX_PAUSE"
"""Seconds after which a run that was paused goes on by itself. Default: 3600."""

ACTIVE = "VERL_OTEL_ACTIVE"
"""Set by the launcher for its workers, not by users: the process belongs to an instrumented run."""

NAMES = frozenset(v for v in list(globals().values()) if isinstance(v, str) and v.startswith("VERL_OTEL_"))
"""All of these variables: what a training reads, and what goes to its workers."""

LARGEST = 1e9

ENDPOINT_VARIABLES = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
)


def number(environ: Mapping[str, str], name: str, default: float, minimum: float) -> float:
    """The number in a variable; one that is not between `minimum` and `LARGEST` is reported, and `default` used."""
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = minimum - 1
    if not minimum <= value <= LARGEST:
        border.warn_once(name, "%s=%r is not a number of at least %g; using %g", name, text, minimum, default)
        return default
    return value


def sdk_disabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `OTEL_SDK_DISABLED`, or our mode, asks for no telemetry at all."""
    env = os.environ if environ is None else environ
    return env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or mode(env) == DISABLED


ONLINE, OFFLINE, DISABLED = "online", "offline", "disabled"


def mode(environ: Mapping[str, str]) -> str:
    """`online`, `offline` or `disabled`; anything else is reported, and `online` used."""
    text = environ.get(MODE, "").strip().lower()
    if text not in {"", ONLINE, OFFLINE, DISABLED}:
        border.warn_once(MODE, "%s=%r is not online, offline or disabled; using online", MODE, text)
    return text if text in {OFFLINE, DISABLED} else ONLINE


OFF, BASIC, DETAILED = "off", "basic", "detailed"
OUTLIERS = "outliers"
TELEMETRY = "telemetry"
"""The module of what verl-otel says of itself, such as what it has lost: `*` does not mean it."""


@dataclass(frozen=True)
class Levels:
    """Which metrics are wanted, by module."""

    by_module: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> "Levels":
        """Read `module=level,...`; a part that cannot be read is reported and left out."""
        found = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            module, _, level = (piece.strip() for piece in part.partition("="))
            if module and level in {OFF, BASIC, DETAILED}:
                found[module] = level
            else:
                border.warn_once(
                    f"{LEVELS} {part}",
                    "%s: %r is not <module>=off|basic|detailed, such as *=basic, and has no effect",
                    LEVELS,
                    part,
                )
        return cls(found)

    def wants(self, module: str, level: str) -> bool:
        """Whether a metric of that module and level (`basic` or `detailed`) is recorded."""
        others = DETAILED if module == TELEMETRY else self.by_module.get("*", DETAILED)
        wanted = self.by_module.get(module, others)
        return wanted == DETAILED or (wanted == BASIC and level == BASIC)

    def __str__(self) -> str:
        return ",".join(f"{module}={level}" for module, level in sorted(self.by_module.items())) or f"*={DETAILED}"


@dataclass(frozen=True)
class RankDetail:
    """Whose own values become metrics, and at which steps."""

    every: int = 1
    outliers: bool = False

    @classmethod
    def parse(cls, text: str) -> "RankDetail":
        """Read `all`, `off`, `outliers` or a number; anything else is reported, and `all` used."""
        text = text.strip().lower()
        if text == OUTLIERS:
            return cls(outliers=True)
        if text in {OFF, "0"}:
            return cls(every=0)
        if text.isdecimal():
            return cls(every=int(text))
        if text not in {"", "all"}:
            border.warn_once(RANK_DETAIL, "%s=%r is not all, outliers, off or a number; using all", RANK_DETAIL, text)
        return cls()

    def at(self, step: int | None) -> bool:
        """Whether every rank shows its own values at this step."""
        return not self.outliers and self.every > 0 and (step is None or step % self.every == 0)

    def __str__(self) -> str:
        return OUTLIERS if self.outliers else {0: OFF, 1: "all"}.get(self.every, str(self.every))


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. See the variables above for meaning, unit and default."""

    folder: str
    trajectories: int
    exit_timeout: float
    levels: Levels
    rank_detail: RankDetail
    unknown_keys: int
    disabled_hooks: frozenset[str]
    message_content: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> "Settings":
        env = os.environ if environ is None else environ
        return cls(
            folder=os.path.abspath(env.get(FOLDER) or "verl-otel"),
            trajectories=int(number(env, TRAJECTORIES, 4, 0)),
            message_content=env.get(MESSAGE_CONTENT, "").strip().lower() in {"true", "span_only", "span_and_event"},
            exit_timeout=number(env, EXIT_TIMEOUT, 5.0, 0),
            levels=Levels.parse(env.get(LEVELS, "")),
            rank_detail=RankDetail.parse(env.get(RANK_DETAIL, "")),
            unknown_keys=int(number(env, UNKNOWN_KEYS, 500, 0)),
            disabled_hooks=frozenset(h.strip() for h in env.get(DISABLED_HOOKS, "").split(",") if h.strip()),
        )

    def effective(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """The configuration in effect, for the record: no headers, no credentials, no certificates."""
        env = os.environ if environ is None else environ
        settings = {
            MODE: mode(env),
            LEVELS: str(self.levels),
            RANK_DETAIL: str(self.rank_detail),
            UNKNOWN_KEYS: str(self.unknown_keys),
            TRAJECTORIES: str(self.trajectories),
            EXIT_TIMEOUT: f"{self.exit_timeout:g}",
            DISABLED_HOOKS: ",".join(sorted(self.disabled_hooks)),
        }
        settings.update({name: without_credentials(env[name]) for name in _RECORDED_OF_OTEL if env.get(name)})
        settings.update({name: without_secrets(env[name]) for name in ENDPOINT_VARIABLES if env.get(name)})
        return {name: value for name, value in settings.items() if value}


def publish(
    levels: Mapping[str, str] | None = None,
    rank_detail: str | int | None = None,
    export_interval: float | None = None,
) -> None:
    """Put settings given in code into the environment, by which they get to every process of the run."""
    if levels is not None:
        os.environ[LEVELS] = ",".join(f"{module}={level}" for module, level in levels.items())
    if rank_detail is not None:
        os.environ[RANK_DETAIL] = str(rank_detail)
    if export_interval is not None:
        os.environ["OTEL_METRIC_EXPORT_INTERVAL"] = f"{export_interval * 1000:g}"


_RECORDED_OF_OTEL = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_METRICS_EXPORTER",
    "OTEL_LOGS_EXPORTER",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
    MESSAGE_CONTENT,
    "OTEL_METRIC_EXPORT_INTERVAL",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
)


def without_credentials(text: str) -> str:
    """A text in which a URL's user and password are left out."""
    return re.sub(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^/@\s]*@", r"\1", text)


def shown_path(path: str) -> str:
    """A path, or a URL without its user, password, query and fragment."""
    return re.split(r"[?#]", without_credentials(path))[0] if "://" in path else path


def without_secrets(url: str) -> str:
    """Scheme, host and port of a URL: user, password and query may be secrets, and so may the path."""
    try:
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    except ValueError:
        return "(not a URL)"

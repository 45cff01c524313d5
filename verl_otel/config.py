"""Every setting of verl-otel: its variable, its default, its check.

OpenTelemetry's own variables (`OTEL_*`) say where telemetry goes and how much of it; the `VERL_OTEL_*` variables below
are only for what OpenTelemetry has no name for. A value that cannot be read is reported once and its default is used.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

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
"""How many trajectories of a step each agent-loop worker records as spans; 0 for none. Default: 4."""

EXIT_TIMEOUT = "VERL_OTEL_EXIT_TIMEOUT"
"""Seconds by which the end of the run may be delayed to send what is pending. Default: 5."""

DISABLED_HOOKS = "VERL_OTEL_DISABLED_HOOKS"
"""Comma-separated names of hooks to leave out (the file names in `verl_otel/hooks`)."""

ACTIVE = "VERL_OTEL_ACTIVE"
"""Set by the launcher for its workers, not by users: the process belongs to an instrumented run."""

LARGEST = 1e6

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
    """Whether `OTEL_SDK_DISABLED` asks for no telemetry at all."""
    return (os.environ if environ is None else environ).get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. See the variables above for meaning, unit and default."""

    folder: str
    trajectories: int
    exit_timeout: float
    disabled_hooks: frozenset[str]

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> "Settings":
        env = os.environ if environ is None else environ
        return cls(
            folder=os.path.abspath(env.get(FOLDER) or "verl-otel"),
            trajectories=int(number(env, TRAJECTORIES, 4, 0)),
            exit_timeout=number(env, EXIT_TIMEOUT, 5.0, 0),
            disabled_hooks=frozenset(h.strip() for h in env.get(DISABLED_HOOKS, "").split(",") if h.strip()),
        )

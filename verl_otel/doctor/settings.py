"""The settings: what is set, what is made of it, and what cannot be read."""

import difflib
import importlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from verl_otel import config, hooks
from verl_otel.doctor import child
from verl_otel.doctor.asked import Asked
from verl_otel.doctor.findings import Finding, note, ok, problem, warning
from verl_otel.export.otlp_http import SIGNALS
from verl_otel.semconv import registry

SECONDS = 60.0

_SHOWN = {
    *(config.RUN_ID, config.RUN_ATTEMPT, config.PROJECT, config.EXPERIMENT, config.TRAJECTORIES, config.EXIT_TIMEOUT),
    *(config.LEVELS, config.RANK_DETAIL, config.UNKNOWN_KEYS, config.MODE, config.MAX_PENDING, config.DISABLED_HOOKS),
    *(config.MESSAGE_CONTENT, config.ACTIVE, "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME", "OTEL_PROPAGATORS"),
    *("OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER", "OTEL_LOGS_EXPORTER"),
    *("OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_METRIC_EXPORT_INTERVAL", "OTEL_METRIC_EXPORT_TIMEOUT"),
    *("OTEL_PYTHON_DISTRO", "OTEL_PYTHON_CONFIGURATOR", "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"),
    *("OTEL_EXPORTER_PROMETHEUS_HOST", "OTEL_EXPORTER_PROMETHEUS_PORT", "OTEL_METRICS_EXEMPLAR_FILTER"),
    *("OTEL_SEMCONV_STABILITY_OPT_IN", "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS", "OTEL_LOG_LEVEL"),
}
"""Variables whose values are shown. Of all others only that they are set: they may hold anything."""

_SHOWN_ENDINGS = ("_PROTOCOL", "_TIMEOUT", "_COMPRESSION", "_LIMIT", "_DELAY", "_QUEUE_SIZE", "_BATCH_SIZE")

_NOT_OF_A_TRAINING = (
    *("VERL_OTEL_LISTEN_", "VERL_OTEL_HEALTH", "VERL_OTEL_SELF_", "VERL_OTEL_QUEUE_FOLDER", "VERL_OTEL_GATEWAY"),
    *("VERL_OTEL_BRIDGE_", "VERL_OTEL_SCRAPE_", "VERL_OTEL_TLS", "VERL_OTEL_TOKENS", "VERL_OTEL_HTPASSWD"),
    *("VERL_OTEL_BACKENDS_", "VERL_OTEL_CACHE", "VERL_OTEL_TEST_", "VERL_OTEL_RELAY_", "VERL_OTEL_SQL_"),
    *("VERL_OTEL_INFLUX_", "VERL_OTEL_RECEIVER", "VERL_OTEL_STEP_MAX", "VERL_OTEL_KEEP_"),
)
"""Beginnings of variables that the Collector, the bridge and the like read."""

_NAMES_OF_OTEL = (
    *("opentelemetry.environment_variables", "opentelemetry.sdk.environment_variables"),
    "opentelemetry.instrumentation.environment_variables",
)
"""Modules whose constants are the names of variables."""


def check(asked: Asked) -> Iterator[Finding]:
    """Each variable that is set; then what a process of the run would say of them."""
    environ = asked.environ
    names = sorted(name for name in environ if name.startswith(("OTEL_", "VERL_OTEL_")))
    known = _known()
    if not names:
        yield ok("VO-SETTINGS", "no OTEL_* or VERL_OTEL_* variable is set: a run records in files, see below")
    for name in names:
        yield _unknown(name, known) or ok("VO-SETTING", f"{name}={_shown(name, environ[name])}", variable=name)
    yield from _hook_names(environ)
    yield from _modules(environ)
    yield from _traps(environ)
    yield from _pipeline(asked)


def _known() -> set[str]:
    """The names of variables that somebody in a training process reads."""
    names = set(config.NAMES)
    for module in _NAMES_OF_OTEL:
        found = vars(importlib.import_module(module))
        names |= {value for value in found.values() if isinstance(value, str) and value.startswith("OTEL_")}
    return names | _SHOWN


def _unknown(name: str, known: set[str]) -> Finding | None:
    """A name that looks like a slip of the pen. A name that looks like nothing we know may be somebody's else."""
    if name in known or name.startswith(_NOT_OF_A_TRAINING):
        return None
    near = difflib.get_close_matches(name, known, 1, 0.9)
    if near:
        what = f"{name} is set, which nobody reads; {near[0]} is a variable"
        return warning("VO-SETTING-UNKNOWN", what, f"is {near[0]} meant?", variable=name, near=near[0])
    if name.startswith("VERL_OTEL_"):
        what = f"{name} is set, which a training does not read"
        return note("VO-SETTING-UNKNOWN", what, "the README has the list of settings", variable=name)
    return None


def _shown(name: str, value: str) -> str:
    if not value.strip():
        return "(empty)"
    if name == config.FOLDER:
        return config.shown_path(value)
    if name.endswith("_ENDPOINT"):
        return config.without_secrets(value.strip())
    if name in _SHOWN or name.endswith(_SHOWN_ENDINGS):
        return config.without_credentials(value.strip())[:200]
    return "(set, not shown)"


def _hook_names(environ: Mapping[str, str]) -> Iterator[Finding]:
    wanted = {name.strip() for name in environ.get(config.DISABLED_HOOKS, "").split(",") if name.strip()}
    names = {hook.name for hook in hooks.HOOKS}
    for name in sorted(wanted - names):
        near = difflib.get_close_matches(name, names, 1, 0)
        what = f"{config.DISABLED_HOOKS}: there is no hook {name!r}, so nothing is left out for it"
        yield warning("VO-SETTING-MALFORMED", what, f"is {near[0]} meant? All: {', '.join(sorted(names))}", hook=name)


def _modules(environ: Mapping[str, str]) -> Iterator[Finding]:
    """A module that looks like a slip of the pen; others may be of the user's own metrics."""
    known = {metric.module for metric in registry.load().metrics.values()} | {"*"}
    for module in sorted(config.Levels.parse(environ.get(config.LEVELS, "")).by_module.keys() - known):
        for near in difflib.get_close_matches(module, known, 1, 0.75):
            what = f"{config.LEVELS}: no metric of verl-otel is of the module {module!r}"
            yield warning("VO-SETTING-MALFORMED", what, f"is {near} meant? All: {', '.join(sorted(known))}", near=near)


def _traps(environ: Mapping[str, str]) -> Iterator[Finding]:
    """What can be read, and is seldom meant."""
    if config.mode(environ) == config.OFFLINE:
        yield note(
            "VO-OFFLINE",
            f"{config.MODE}=offline: nothing is sent, whatever endpoint is set",
            "send the recordings afterwards: verl-otel replay <folder of the run> --endpoint URL",
        )
    for signal in SIGNALS:
        variable = f"OTEL_{signal.upper()}_EXPORTER"
        if "none" in [part.strip() for part in environ.get(variable, "").split(",")]:
            what = f"{variable}=none: no {signal}"
            yield note("VO-SIGNAL-OFF", what, f"unset {variable} to have them", signal=signal)
    sampler = environ.get("OTEL_TRACES_SAMPLER", "").strip()
    if sampler.endswith("always_off"):
        what = f"OTEL_TRACES_SAMPLER={sampler}: no step becomes a trace"
        yield note("VO-SAMPLER-OFF", what, "unset it to have traces", sampler=sampler)
    base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip().rstrip("/")
    if base.endswith(tuple(f"/v1/{signal}" for signal in SIGNALS)):
        yield warning(
            "VO-ENDPOINT-WITH-SIGNAL",
            f"OTEL_EXPORTER_OTLP_ENDPOINT ends with {base[base.rindex('/v1/') :]}, and /v1/<signal> is put behind it",
            "leave the path out: it is the same endpoint for all signals",
        )
    for signal in SIGNALS:
        variable = f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"
        own = environ.get(variable, "").strip()
        protocol = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL") or environ.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL", ""
        )
        if own.partition("://")[2].strip("/").count("/") == 0 and own and protocol.strip() != "grpc":
            yield warning(
                "VO-ENDPOINT-WITHOUT-PATH",
                f"{variable} has no path, and is used as it is",
                f"put /v1/{signal} behind it, or set OTEL_EXPORTER_OTLP_ENDPOINT instead",
                signal=signal,
            )


def _pipeline(asked: Asked) -> Iterator[Finding]:
    """The providers of a process of this run, made in a process of their own."""
    broken = done = False
    ended = ""
    for found in child.run("pipeline", asked.environ, asked.until(SECONDS)):
        ended = found.get(child.ENDED, ended)
        done = done or "exporters" in found
        if "said" in found:
            broken = True
            what = found["said"].removeprefix("verl-otel: ")
            yield warning("VO-SETTING-MALFORMED", what, "correct the variable, or unset it")
        if "error" in found:
            broken = True
            yield problem(
                "VO-PIPELINE-BROKEN",
                f"OpenTelemetry cannot be set up ({found['error']}): a run would have no telemetry",
                _FIX_OF_BROKEN,
            )
        for name, fix in found.get("missing", {}).items():
            broken = True
            what = f"the exporter {name!r}, which is asked for, is not installed"
            yield problem("VO-EXPORTER-MISSING", what, fix, exporter=name)
        if "exporters" in found:
            exporters = found["exporters"]
            shown = ", ".join(f"{signal} by {' and '.join(names) or 'nothing'}" for signal, names in exporters.items())
            yield ok("VO-EXPORTERS", f"a process of the run exports {shown}", exporters=exporters)
    if done and not broken:
        yield ok("VO-PIPELINE", "the settings can be read, and OpenTelemetry can be set up with them")
    elif not done and not broken and ended != child.LATE:
        yield problem("VO-PIPELINE-BROKEN", f"OpenTelemetry cannot be set up: {ended}", _FIX_OF_BROKEN)
    elif not done and not broken:
        what = f"whether OpenTelemetry can be set up is not known: {ended}"
        yield warning("VO-PIPELINE-UNKNOWN", what, "give it more time with --timeout, or look at the machine's load")


_FIX_OF_BROKEN = "correct or unset the OTEL_* variable that has this value"


class _Said(logging.Handler):
    """Keeps what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage()[:500])


def in_child(_: str) -> Iterator[dict[str, Any]]:
    """Read the settings and make the providers as a process of the run does, with nothing to export."""
    said = _Said()
    for name in ("verl_otel", "opentelemetry"):
        logging.getLogger(name).addHandler(said)
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield from _made(folder)
        except Exception as error:
            yield {"error": f"{type(error).__name__}: {error}"[:500]}
    for text in dict.fromkeys(said.texts):
        if not any(known in text for known in _SAID_OTHERWISE):
            yield {"said": text}


_SAID_OTHERWISE = ("is not installed", "Invalid key value resource attribute pair")
"""Warnings that are findings of their own, here and in labels.py; the second shows what may be a secret."""


def _made(folder: str) -> Iterator[dict[str, Any]]:
    from importlib.metadata import entry_points

    config.Settings.from_environ()
    os.environ[config.FOLDER] = folder
    from verl_otel import assembly  # it fails here where the SDK cannot read a variable
    from verl_otel.identity import Identity

    exporter_names = assembly.providers.exporter_names
    exporters = {signal: exporter_names(signal) for signal in SIGNALS}
    missing = {
        name: assembly.providers.what_to_do_without(name)
        for signal, names in exporters.items()
        for name in names
        if not list(entry_points(group=f"opentelemetry_{signal}_exporter", name=name))
    }
    if assembly.providers.PROMETHEUS in exporters["metrics"]:  # it would listen, and be scraped
        others = [name for name in exporters["metrics"] if name != assembly.providers.PROMETHEUS]
        os.environ["OTEL_METRICS_EXPORTER"] = ",".join(others) or "none"
    assembly.providers.make(Identity.detect().resource())
    yield {"exporters": exporters, "missing": missing}

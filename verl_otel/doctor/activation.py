"""Whether a process that is started here gets instrumented, and if not, why."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points

from opentelemetry import _logs, metrics, trace

from verl_otel import config
from verl_otel.doctor.asked import Asked
from verl_otel.doctor.findings import Finding, note, ok, problem, warning
from verl_otel.instrumentor import VerlInstrumentor

COMMAND = "opentelemetry-instrument"
_REINSTALL = "install it with pip, a folder on PYTHONPATH is not enough: pip install verl-otel"
_OURS = {
    "opentelemetry_distro": "verl_otel",
    "opentelemetry_configurator": "verl_otel",
    "opentelemetry_instrumentor": "verl",
}


def check(asked: Asked) -> Iterator[Finding]:
    """The command, the entry points by which it finds us, what switches us off, and the global providers."""
    yield from _command(asked)
    yield from _entry_points(asked)
    yield from _switched_off(asked)
    yield from _here(asked)
    yield from _providers()


def _command(asked: Asked) -> Iterator[Finding]:
    ours = os.path.join(sysconfig.get_path("scripts"), COMMAND)
    found = shutil.which(COMMAND, path=asked.environ.get("PATH"))
    if found is None and os.path.exists(ours):
        yield note(
            "VO-INSTRUMENT-NOT-ON-PATH",
            f"{COMMAND} is not on PATH",
            f"activate the environment of the training, or call {ours}",
            path=ours,
        )
    elif found is None:
        yield problem(
            "VO-INSTRUMENT-MISSING",
            f"{COMMAND} is not installed for {sys.executable}",
            "pip install opentelemetry-instrumentation",
        )
    elif os.path.exists(ours) and not os.path.samefile(found, ours):
        yield warning(
            "VO-INSTRUMENT-OF-ANOTHER-PYTHON",
            f"{COMMAND} on PATH is {found}, of another Python than {sys.executable}",
            f"activate the environment of the training, or call {ours}",
            path=found,
        )
    else:
        yield ok("VO-INSTRUMENT", f"{COMMAND} is {found}", path=found)


def _entry_points(asked: Asked) -> Iterator[Finding]:
    missing = False
    for group, name in _OURS.items():
        found = list(entry_points(group=group, name=name))
        error = _load(found[0]) if found else "it is not installed"
        if error:
            missing = True
            what = f"OpenTelemetry does not find verl-otel (entry point {name!r} of {group}): {error}"
            yield problem("VO-ENTRY-POINT", what, _REINSTALL, group=group, name=name)
    for group, variable in _CHOICES.items():
        names = sorted({found.name for found in entry_points(group=group)} - {_OURS[group]})
        chosen = asked.environ.get(variable, "").strip()
        if chosen and chosen != _OURS[group]:
            missing = True
            yield problem(
                "VO-DISTRO-OTHER",
                f"{variable}={chosen}: another distro than verl-otel's is started",
                f"export {variable}={_OURS[group]}, or unset it",
                variable=variable,
                chosen=chosen,
            )
        elif names and not chosen:
            missing = True
            yield warning(
                "VO-DISTRO-AMBIGUOUS",
                f"there are several for {variable}: {', '.join([_OURS[group], *names])}; which one is taken is chance",
                f"export {variable}={_OURS[group]}",
                variable=variable,
                others=names,
            )
    if not missing:
        yield ok("VO-ENTRY-POINTS", "OpenTelemetry finds verl-otel: distro, configurator, instrumentor")


_CHOICES = {
    "opentelemetry_distro": "OTEL_PYTHON_DISTRO",
    "opentelemetry_configurator": "OTEL_PYTHON_CONFIGURATOR",
}


def _load(entry_point: EntryPoint) -> str:
    """Why it cannot be loaded; empty if it can."""
    try:
        entry_point.load()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _switched_off(asked: Asked) -> Iterator[Finding]:
    environ = asked.environ
    off = [
        (variable, value)
        for variable, value, means_off in (
            ("OTEL_SDK_DISABLED", environ.get("OTEL_SDK_DISABLED", ""), lambda text: text.strip().lower() == "true"),
            (config.MODE, environ.get(config.MODE, ""), lambda text: text.strip().lower() == config.DISABLED),
            (
                "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS",
                environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", ""),
                lambda text: bool({"verl", "*"} & {part.strip() for part in text.split(",")}),
            ),
        )
        if means_off(value)
    ]
    for variable, value in off:
        what = f"telemetry is off: {variable}={value}"
        yield warning("VO-SWITCHED-OFF", what, f"unset {variable}, if it is not meant", variable=variable, value=value)


def _here(asked: Asked) -> Iterator[Finding]:
    here = VerlInstrumentor().is_instrumented_by_opentelemetry
    worker = config.ACTIVE in asked.environ
    if here:
        yield ok("VO-ACTIVE", "this process is instrumented", active=True, worker=worker)
    elif worker:
        yield warning(
            "VO-WORKER-NOT-INSTRUMENTED",
            f"this process belongs to an instrumented run ({config.ACTIVE} is set), and is not instrumented",
            f"what a worker starts is not by itself: {COMMAND} verl-otel doctor. If the worker is not either, "
            "the job's runtime_env takes PYTHONPATH away: put the folder of "
            "opentelemetry.instrumentation.auto_instrumentation in front of it",
        )
    else:
        yield note(
            "VO-NOT-ACTIVE",
            "this shell is not inside an instrumented run",
            f"to look from inside: {COMMAND} verl-otel doctor",
            active=False,
        )


def _providers() -> Iterator[Finding]:
    """Who owns the global providers of this process: of what OpenTelemetry has loaded into it, if anything."""
    owners: dict[str, str] = {}
    for signal, get in (
        ("traces", trace.get_tracer_provider),
        ("metrics", metrics.get_meter_provider),
        ("logs", _logs.get_logger_provider),
    ):
        owner = type(get())
        owners[signal] = "" if "Proxy" in owner.__name__ else f"{owner.__module__}.{owner.__qualname__}"
    taken = {signal: owner for signal, owner in owners.items() if owner}
    if taken:
        shown = ", ".join(f"{signal}: {owner}" for signal, owner in taken.items())
        yield note(
            "VO-PROVIDERS-TAKEN",
            f"somebody has set global providers, which verl-otel uses as they are ({shown})",
            "where they send to, and their resource, is theirs to say; to have verl-otel make its own, start without "
            "the other distro or set-up",
            owners=owners,
        )
    else:
        what = "nobody has set global providers: verl-otel makes them, in processes that use verl"
        yield ok("VO-PROVIDERS", what, owners=owners)

"""`ray.init` (Ray >= 2.41, all versions of verl): everything that a worker needs travels in the job's runtime_env.

A worker may be on a cluster that was started before, without any of our settings; the runtime_env's `env_vars` reach it
there as well. Keys that the user, verl or `ray job submit` have set are left alone. What `OTEL_RESOURCE_ATTRIBUTES`
says of the launcher's own node, pod or container stays there; each worker keeps what its own node says. None of it is
printed: header values may be secrets.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Mapping
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from verl_otel import border, config, identity, telemetry
from verl_otel.hooks.patches import Patches

if TYPE_CHECKING:
    from verl_otel.assembly import Telemetry

_PERCENT_ENCODED = ("_HEADERS", "OTEL_RESOURCE_ATTRIBUTES")

_OF_A_PLACE = re.compile(
    r"(?:host|os|process|container|device|aws\.ecs)\.|k8s\.(?!cluster\.|namespace\.)|cloud\.(?:availability_zone|resource_id)\b"
)
"""Resource attributes of one node, pod, container or process, which others of the run must not get."""


def install(module: ModuleType, patches: Patches) -> None:
    original = module.init

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        try:
            t = None if identity.in_ray_worker() else _telemetry_of_launcher(sys._getframe(1))
            if t is not None:
                kwargs = with_environment(kwargs, environment(t))
        except Exception:
            border.caught("preparing ray.init")
        return original(*args, **kwargs)

    patches.set(module, "init", init)


def _telemetry_of_launcher(caller: FrameType | None) -> Telemetry | None:
    """The launcher's telemetry, with its run's span opened, named by the configuration that the caller has.

    `run_ppo(config, ...)` of all versions of verl calls `ray.init`; no other seam shows the configuration in the
    launcher.
    """
    config_of_run = caller.f_locals.get("config") if caller is not None else None
    trainer = getattr(config_of_run, "trainer", None)
    if trainer is not None and hasattr(trainer, "get"):
        identity.name_run(trainer)
        identity.continue_run(trainer)
    t = telemetry.current()
    if t is not None:
        t.start_run()
        t.announce()
    return t


def environment(t: Telemetry) -> dict[str, str]:
    """The environment variables that make a worker a process of this run."""
    env = {
        key: _literal(key, value)
        for key, value in os.environ.items()
        # Not those of our services, such as tokens: they are not for a worker, nor for Ray's logs.
        if key.startswith("OTEL_") or key in config.NAMES
    }
    shared = _shared_attributes(env.pop(identity.RESOURCE_ATTRIBUTES, ""))
    if shared:  # behind the worker's own, which Ray puts in there
        env[identity.RESOURCE_ATTRIBUTES] = f"${{{identity.RESOURCE_ATTRIBUTES}}},{shared}"
    env[config.ACTIVE] = "1"
    env[config.RUN_ID] = t.identity.run_id
    env[config.FOLDER] = t.settings.folder  # absolute: workers have other working directories
    env.update(t.run_carrier())
    env["PYTHONPATH"] = _auto_instrumentation_folder() + os.pathsep + "${PYTHONPATH}"  # Ray expands it in the worker
    return env


def with_environment(kwargs: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `ray.init` with `env` in `runtime_env["env_vars"]`, where nobody has set these keys."""
    runtime_env = dict(kwargs.get("runtime_env") or {})
    env_vars = dict(runtime_env.get("env_vars") or {})
    taken = env_vars.keys() | _job_environment().keys()
    env_vars.update({key: value for key, value in env.items() if key not in taken})
    return {**kwargs, "runtime_env": {**runtime_env, "env_vars": env_vars}}


def _job_environment() -> dict[str, Any]:
    """`env_vars` of `ray job submit`; Ray raises if the driver gives one of them another value."""
    try:
        job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
        return dict((job.get("runtime_env") or {}).get("env_vars") or {})
    except (ValueError, AttributeError, TypeError):
        return {}


def _literal(key: str, value: str) -> str:
    """Ray expands `$NAME` in values; where the format allows, keep it from doing so."""
    return value.replace("$", "%24") if key.endswith(_PERCENT_ENCODED) else value


def _shared_attributes(text: str) -> str:
    """What of `OTEL_RESOURCE_ATTRIBUTES` is true in every process of the run."""
    return ",".join(pair for pair in text.split(",") if pair.strip() and not _OF_A_PLACE.match(pair.strip()))


def _auto_instrumentation_folder() -> str:
    from opentelemetry.instrumentation import auto_instrumentation

    return os.path.dirname(os.path.abspath(auto_instrumentation.__file__))

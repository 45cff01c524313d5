"""`verl.utils.ray_utils.auto_await` (verl 0.7.1 on): the caller's context inside, and the version of the weights.

verl's decorator may run the coroutine in another thread, where the context would be empty. The decorator itself looks
at its caller's frame, so decorated methods must never be wrapped from outside; what it decorates is wrapped instead.
"""

import functools
import inspect
from types import ModuleType
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from verl_otel import border, telemetry
from verl_otel.hooks.patches import Patches

_UPDATE_WEIGHTS = "CheckpointEngineManager.update_weights"


def install(module: ModuleType, patches: Patches) -> None:
    original = module.auto_await

    @functools.wraps(original)
    def auto_await(func: Any) -> Any:
        return original(_in_callers_context(func))

    patches.set_everywhere(module, "auto_await", auto_await)


def _in_callers_context(func: Any) -> Any:
    updates_weights = getattr(func, "__qualname__", "") == _UPDATE_WEIGHTS

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if not inspect.iscoroutine(result):
            return result
        version = (kwargs.get("global_steps", args[1] if len(args) > 1 else None)) if updates_weights else None
        return _run(result, otel_context.get_current(), version)

    return call


async def _run(coroutine: Any, context: Context, version: Any) -> Any:
    token = otel_context.attach(context)
    try:
        result = await coroutine
    finally:
        otel_context.detach(token)
    try:
        t = telemetry.peek()
        if t is not None and isinstance(version, int):
            t.steps.policy_version = version
    except Exception:
        border.caught("noting the version of the weights")
    return result

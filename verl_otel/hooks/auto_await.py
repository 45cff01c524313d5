"""`verl.utils.ray_utils.auto_await` (verl 0.7.1 on): the caller's context inside, and the parts of a weight sync.

verl's decorator may run the coroutine in another thread, where the context would be empty. The decorator itself looks
at its caller's frame, so decorated methods must never be wrapped from outside; what it decorates is wrapped instead.
"""

import functools
import inspect
from types import ModuleType
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from verl_otel import telemetry
from verl_otel.hooks.patches import Patches

_MANAGER = "CheckpointEngineManager."


def install(module: ModuleType, patches: Patches) -> None:
    original = module.auto_await

    @functools.wraps(original)
    def auto_await(func: Any) -> Any:
        return original(_in_callers_context(func))

    patches.set_everywhere(module, "auto_await", auto_await)


def install_manager(module: ModuleType, patches: Patches) -> None:
    """`verl.checkpoint_engine.base.CheckpointEngineManager.build_process_group`: the transfer begins."""
    manager = module.CheckpointEngineManager
    original = manager.build_process_group

    @functools.wraps(original)
    def build_process_group(self: Any, *args: Any, **kwargs: Any) -> Any:
        t = telemetry.peek()
        if t is not None:
            t.weight_sync.begin_transfer()
        return original(self, *args, **kwargs)

    patches.set(manager, "build_process_group", build_process_group)


def _in_callers_context(func: Any) -> Any:
    name = getattr(func, "__qualname__", "")
    call_of_manager = name[len(_MANAGER) :] if name.startswith(_MANAGER) else ""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if not inspect.iscoroutine(result):
            return result
        if call_of_manager:
            t = telemetry.peek()
            if t is not None:
                t.weight_sync.end_transfer(call_of_manager)
            manager, version, *_ = (*args, None)
            result = _with_spans(result, call_of_manager, kwargs.get("global_steps", version), manager)
        return _run(result, otel_context.get_current())

    return call


async def _run(coroutine: Any, context: Context) -> Any:
    token = otel_context.attach(context)
    try:
        return await coroutine
    finally:
        otel_context.detach(token)


async def _with_spans(coroutine: Any, call: str, version: Any, manager: Any) -> Any:
    t = telemetry.peek()
    if t is None:
        return await coroutine
    replicas = getattr(manager, "replicas", None)
    opened = t.weight_sync.enter(call, version, len(replicas) if isinstance(replicas, list) else None)
    try:
        result = await coroutine
    except BaseException as error:
        t.weight_sync.leave(opened, error)
        raise
    t.weight_sync.leave(opened, None, result)
    return result

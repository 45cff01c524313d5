"""`verl.single_controller.base.decorator.register` (verl 0.6.1 to 0.9.1): every method that runs on ranks.

The one chokepoint on the side of the workers: roles of a fused WorkerDict, plain worker classes, SFT. Kept are what
verl and Ray look at: the attributes that `register` sets, and whether the method is a coroutine function.
"""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
from verl_otel.hooks.closing import closing
from verl_otel.hooks.patches import Patches
from verl_otel.tracing import propagation


def install(module: ModuleType, patches: Patches) -> None:
    original = module.register

    @functools.wraps(original)
    def register(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        decorate = original(*args, **kwargs)

        def decorator(func: Any) -> Any:
            registered = decorate(func)
            try:
                return propagation.with_carrier(_with_span(registered))
            except Exception:
                border.caught(f"wrapping the worker method {getattr(func, '__name__', func)}")
                return registered

        return decorator

    patches.set_everywhere(module, "register", register)


def _with_span(method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call(*args: Any, **kwargs: Any) -> Any:
            t = telemetry.current()
            if t is None:
                return await method(*args, **kwargs)
            with closing(t.workers.leave, t.workers.enter(args[0] if args else None, method.__name__)):
                return await method(*args, **kwargs)

    else:

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            t = telemetry.current()
            if t is None:
                return method(*args, **kwargs)
            with closing(t.workers.leave, t.workers.enter(args[0] if args else None, method.__name__)):
                return method(*args, **kwargs)

    return call

"""`verl.single_controller.ray.base._bind_workers_method_to_parent` (verl 0.6.1 to 0.9.1): fused WorkerDicts.

verl binds each registered method of a role to the class `WorkerDict`, which Ray pickles by value. The methods that it
has bound are wrapped to take the carrier and to say for which role they were called. The wrapper travels with the
class, so it refers to nothing of ours by name, and works in a process that does not have this package.
"""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_otel import border
from verl_otel.hooks.patches import Patches
from verl_otel.tracing import propagation, workers


def install(module: ModuleType, patches: Patches) -> None:
    original = module._bind_workers_method_to_parent

    @functools.wraps(original)
    def _bind_workers_method_to_parent(cls: Any, key: str, user_defined_cls: Any) -> Any:
        before = set(vars(cls))
        result = original(cls, key, user_defined_cls)
        for name in set(vars(cls)) - before:
            try:
                method = vars(cls)[name]
                if hasattr(method, module.MAGIC_ATTR):
                    setattr(cls, name, _travelling(method, key))
            except Exception:
                border.caught(f"wrapping {name} of a worker group")
        return result

    patches.set(module, "_bind_workers_method_to_parent", _bind_workers_method_to_parent)


def enter(carrier: object, key: str) -> tuple[Any, Any] | None:
    """Runs in the worker: attach the context of the call and its role; returns what `leave` takes."""
    try:
        return propagation.attach(carrier), workers.in_group(key)
    except Exception:
        border.caught("entering a worker call")
        return None


def leave(tokens: tuple[Any, Any] | None) -> None:
    """Runs in the worker: detach what `enter` attached."""
    for token in reversed(tokens or ()):
        propagation.detach(token)


def _travelling(method: Callable[..., Any], key: str) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call(self: Any, *args: Any, _verl_otel_carrier: Any = None, **kwargs: Any) -> Any:
            try:
                from verl_otel.hooks import worker_group
            except ImportError:
                return await method(self, *args, **kwargs)
            tokens = worker_group.enter(_verl_otel_carrier, key)
            try:
                return await method(self, *args, **kwargs)
            finally:
                worker_group.leave(tokens)

    else:

        @functools.wraps(method)
        def call(self: Any, *args: Any, _verl_otel_carrier: Any = None, **kwargs: Any) -> Any:
            try:
                from verl_otel.hooks import worker_group
            except ImportError:
                return method(self, *args, **kwargs)
            tokens = worker_group.enter(_verl_otel_carrier, key)
            try:
                return method(self, *args, **kwargs)
            finally:
                worker_group.leave(tokens)

    propagation.declare_carrier(call, method, propagation.BY_VALUE)
    return call

"""`ray.actor._make_actor` (Ray 2.41 to 2.60), which `ray.remote(<class>)` calls: rollout servers.

Of all backends, verl's (`vLLMHttpServer`, `SGLangHttpServer`, `TRTLLMHttpServer`: 0.6.1 to 0.9.1) and users' own: a
class whose name says that it is a server (`verl_otel.identity`) and that has a coroutine `generate`. Ray is given a
subclass of it, which it pickles by value, with a `generate` that takes the trace context and counts the request. Like
those of `worker_group`, this method refers to nothing of ours by name, and works in a process without this package.
"""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
from verl_otel.hooks.patches import Patches
from verl_otel.identity import ROLLOUT_SERVER, role_of_class
from verl_otel.tracing import propagation


def install(module: ModuleType, patches: Patches) -> None:
    original = module._make_actor

    @functools.wraps(original)
    def _make_actor(cls: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if is_server(cls):
                cls = observed(cls)
        except Exception:
            border.caught("wrapping a rollout server")
        return original(cls, *args, **kwargs)

    patches.set(module, "_make_actor", _make_actor)


def is_server(cls: Any) -> bool:
    """Whether a class is that of a rollout server."""
    return role_of_class(cls.__name__) == ROLLOUT_SERVER and inspect.iscoroutinefunction(getattr(cls, "generate", None))


def observed(cls: Any) -> Any:
    """A subclass of a server's class, of the same name, whose `generate` is wrapped."""
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls)(cls.__name__, (cls,), {**names, "generate": _travelling(cls.generate)})


def enter(server: Any, carrier: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs in the server: begin a request; returns what `leave` takes. Never raises."""
    try:
        t = telemetry.current()
        if t is None:
            return None
        prompt = kwargs.get("prompt_ids", args[0] if args else None)
        return t.servers, t.servers.enter(server, carrier, prompt)
    except Exception:
        border.caught("beginning a request of a rollout server")
        return None


def leave(opened: Any, output: Any, error: BaseException | None = None) -> None:
    """Runs in the server: end the request that `enter` began. Never raises."""
    if opened is not None:
        servers, request = opened
        servers.leave(request, output, error)


def _travelling(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def generate(self: Any, *args: Any, _verl_otel_carrier: Any = None, **kwargs: Any) -> Any:
        try:
            from verl_otel.hooks import rollout_server
        except Exception:  # it is not there, or cannot be imported there
            return await method(self, *args, **kwargs)
        request = rollout_server.enter(self, _verl_otel_carrier, args, kwargs)
        try:
            output = await method(self, *args, **kwargs)
        except BaseException as error:
            rollout_server.leave(request, None, error)
            raise
        rollout_server.leave(request, output)
        return output

    propagation.declare_carrier(generate, method, propagation.BY_VALUE)
    return generate

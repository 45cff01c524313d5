"""Ray actors (`ray.actor.ActorClass._remote`, `ActorMethod._remote`; Ray 2.41 to 2.60): calls carry the trace context.

A call gets the carrier only if the method on the other side takes it: methods that verl binds to `WorkerDict` travel by
value with our wrapper in them; a class that travels by reference is wrapped only where its process is instrumented too,
so that process is asked once, without waiting. The actors that this process makes are kept (weakly), for `flush_actors`
at the end of training: Ray ends them without running their exit handlers.
"""

import functools
import inspect
import sys
import weakref
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
from verl_otel.hooks.patches import Patches
from verl_otel.tracing import propagation

_children: weakref.WeakSet[Any] = weakref.WeakSet()
_asked: dict[str, Any] = {}
"""Actor id -> the names of its methods that take a carrier, or the reference to the answer."""


def install(module: ModuleType, patches: Patches) -> None:
    _wrap_creation(module.ActorClass, patches)
    _wrap_calls(module.ActorMethod, patches)


def _wrap_creation(actor_class: Any, patches: Patches) -> None:
    original = actor_class._remote

    @functools.wraps(original)
    def _remote(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = original(self, *args, **kwargs)
        try:
            _children.add(handle)
        except Exception:
            border.caught("remembering an actor")
        return handle

    patches.set(actor_class, "_remote", _remote)


def _wrap_calls(actor_method: Any, patches: Patches) -> None:
    original = actor_method._remote

    @functools.wraps(original)
    def _remote(self: Any, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        try:
            kind = propagation.carrier_kind(_signature(self))
            if kind and telemetry.peek() is not None and (kind == propagation.BY_VALUE or _takes_carrier(self)):
                carrier = propagation.inject()
                if carrier:
                    kwargs = {**(kwargs or {}), propagation.CARRIER: carrier}
        except Exception:
            border.caught("passing the trace context to an actor")
        return original(self, args, kwargs, *more, **options)

    patches.set(actor_method, "_remote", _remote)


def _actor_of(method: Any) -> Any:
    return getattr(method, "_actor", None) or method._actor_ref()


def _signature(method: Any) -> Any:
    signature = getattr(method, "_signature", None)
    return _actor_of(method)._ray_method_signatures.get(method._method_name) if signature is None else signature


def _takes_carrier(method: Any) -> bool:
    actor = _actor_of(method)
    key = actor._ray_actor_id.hex()
    answer = _asked.get(key)
    if answer is None:
        _asked[key] = actor.__ray_call__.remote(methods_with_carrier)
        return False
    if not isinstance(answer, frozenset):
        ray = sys.modules["ray"]
        ready, _ = ray.wait([answer], timeout=0)
        if not ready:
            return False
        try:
            answer = frozenset(ray.get(answer))
        except Exception:  # the package is not there, or the actor is gone: never ask again
            answer = frozenset()
        _asked[key] = answer
    return method._method_name in answer


def methods_with_carrier(actor: Any) -> list[str]:
    """Runs in the actor's process: which of its methods take the carrier."""
    found = []
    for name, method in inspect.getmembers(type(actor), callable):
        signature = getattr(inspect.unwrap(method), "__signature__", None)  # Ray wraps what it finds, ours too
        if signature is not None and propagation.carrier_kind([*signature.parameters.values()]):
            found.append(name)
    return found


def flush_actors(timeout: float) -> None:
    """Let the actors that this process made send what they have, waiting `timeout` seconds at most."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    calls = []
    for actor in list(_children):
        try:
            calls.append(actor.__ray_call__.remote(_flush, timeout))
        except Exception:
            border.caught("asking an actor to flush")
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=timeout)


def _flush(actor: Any, timeout: float) -> None:
    """Runs in the actor's process."""
    t = telemetry.peek()
    if t is not None:
        t.flush(timeout)

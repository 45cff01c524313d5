"""Ray actors (`ray.actor.ActorClass._remote`, `ActorMethod._remote`; Ray 2.41 to 2.60): calls carry the trace context.

A call gets the carrier only if the method on the other side takes it: methods that verl binds to `WorkerDict` travel by
value with our wrapper in them; a class that travels by reference is wrapped only where its process is instrumented too,
so that process is asked once, without waiting. The actors that this process makes are kept (weakly): they are asked for
what users have logged there, and to flush at the end of training, since Ray ends them without running exit handlers.
Behind each call of a rank for a stage the rank is asked for its own values (`verl_otel.metrics.ranks`). The call to
save a checkpoint says where it goes.
"""

import functools
import inspect
import re
import sys
import time
import weakref
from types import ModuleType
from typing import Any

from opentelemetry.trace import get_current_span

from verl_otel import border, telemetry
from verl_otel.hooks.patches import Patches
from verl_otel.hooks.ray_answers import Answers, connected_ray
from verl_otel.identity import AGENT_LOOP, LAUNCHER, REWARD_WORKER, ROLLOUT_SERVER, TRAINER, role_of_class
from verl_otel.metrics.ranks import Called
from verl_otel.tracing import propagation
from verl_otel.tracing.errors import failure_of

_children: weakref.WeakSet[Any] = weakref.WeakSet()
_ranks: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Of these, the ranks of worker groups, and which rank: from the environment that verl gives them."""

_PAUSING = frozenset(
    (
        *("abort_all_requests", "sleep", "release_kv_cache"),
        *("resume_kv_cache", "wake_up", "resume_generation"),
    )
)
"""Methods of verl's rollout servers, of all backends, that a weight sync calls."""

_rollouters: weakref.WeakSet[Any] = weakref.WeakSet()
"""fully_async's, which the trainer has not made; it asks the agent-loop and reward workers that it has made."""

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
            rank = ((kwargs.get("runtime_env") or {}).get("env_vars") or {}).get("RANK")
            if rank is not None:
                _ranks[handle] = str(rank)
        except Exception:
            border.caught("remembering an actor")
        return handle

    patches.set(actor_class, "_remote", _remote)


def _wrap_calls(actor_method: Any, patches: Patches) -> None:
    original = actor_method._remote

    @functools.wraps(original)
    def _remote(self: Any, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        called = None
        try:
            kind = propagation.carrier_kind(_signature(self))
            if kind and telemetry.peek() is not None and (kind == propagation.BY_VALUE or _takes_carrier(self)):
                carrier = propagation.inject()
                if carrier:
                    kwargs = {**(kwargs or {}), propagation.CARRIER: carrier}
                    called = None if _is_plumbing(self._method_name) else (_actor_of(self), kind)
                if self._method_name.endswith("save_checkpoint"):
                    _saving(*(args or ()), **(kwargs or {}))
            elif self._method_name == "reset_staleness":
                _met_rollouter(_actor_of(self))
        except Exception:
            border.caught("passing the trace context to an actor")
        result = original(self, args, kwargs, *more, **options)
        if called is not None:
            _will_report(*called, self._method_name)
        elif self._method_name in _PAUSING:
            _watch(self._method_name, result)
        return result

    patches.set(actor_method, "_remote", _remote)


def _is_plumbing(method: str) -> bool:
    """`_query_...`, or `<role>__query_...` of a fused worker: calls without a span."""
    return method.startswith("_") or "__" in method


_ROLE = re.compile(r"(?:actor_rollout_ref|actor_rollout|actor|critic|ref|rollout|rm|teacher)_(?=.)")
"""What verl puts before the name of a method of a fused worker."""


def _will_report(actor: Any, kind: str, method: str) -> None:
    try:
        t = telemetry.peek()
        if t is not None and t.identity.role in (TRAINER, LAUNCHER) and _role(actor) != ROLLOUT_SERVER:
            stage = get_current_span().get_span_context().span_id
            method = _ROLE.sub("", method, count=1) if kind == propagation.BY_VALUE else method
            call = Called(_ranks.get(actor, "?"), method, time.time_ns())
            t.ranks.called(stage, actor._ray_actor_id, call, functools.partial(Answers.of, [actor], _report, stage))
    except Exception:
        border.caught("asking a rank for its values")


def _met_rollouter(rollouter: Any) -> None:
    """fully_async's rollouter, whose class travels by value without our wrapper, has new weights; it may validate them.

    Told here and not with the call to validate: Ray may run calls of an async actor in another order, and the trainer
    waits for the answer to this one before it asks for the validation.
    """
    t = telemetry.peek()
    if t is not None and t.identity.role == TRAINER:
        _rollouters.add(rollouter)
        rollouter.__ray_call__.remote(_will_validate, propagation.inject(t.steps.current_context()))


def _will_validate(actor: Any, carrier: Any) -> None:
    """Runs in the rollouter's process."""
    t = telemetry.peek()
    if t is not None:
        t.steps.validates_for(propagation.extract(carrier))


def _saving(local_path: Any = None, *more: Any, **options: Any) -> None:
    """A rank is called to save its part of a checkpoint."""
    t = telemetry.peek()
    if t is not None:
        t.checkpoints.saving(local_path)


def _watch(method: str, answer: Any) -> None:
    """A call that pauses a rollout server, or lets it go on."""
    try:
        t = telemetry.peek()
        answered = None if t is None else t.weight_sync.server_called(method)
        if answered is not None:
            answer.future().add_done_callback(answered)
    except Exception:
        border.caught("watching the call of a rollout server")


def _report(actor: Any, stage: int) -> Any:
    """Runs in the rank's process."""
    t = telemetry.peek()
    return None if t is None else t.report(stage)


def ask_for_values() -> Answers | None:
    """Ask the agent-loop and reward workers of this run for what users have logged there."""
    if connected_ray() is None:
        return None
    return Answers.of([*_workers_of_users(), *list(_rollouters)], _logged)


def _workers_of_users() -> list[Any]:
    """Of the actors that this process made those in which users' code runs. (Ranks are asked with their stages.)"""
    return [actor for actor in list(_children) if _role(actor) in {AGENT_LOOP, REWARD_WORKER}]


def _role(actor: Any) -> str:
    return role_of_class(actor._ray_actor_creation_function_descriptor.class_name)


def _logged(actor: Any) -> Any:
    """Runs in the actor's process, which must not wait: what those below it have logged is in its next answer."""
    t = telemetry.peek()
    if t is None:
        return None
    taken = t.user.take()
    for answer in Answers.of(_workers_of_users(), _logged).references:
        answer.future().add_done_callback(functools.partial(_absorb, t.user))
    return taken


def _absorb(user: Any, answer: Any) -> None:
    try:
        user.absorb(answer.result() or ())
    except Exception:  # the process is gone, or does not have this package
        border.caught("what users have logged in a worker")


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
    Answers.of(list(_children), _flush, timeout).wait(timeout)


def end_run(error: BaseException | None, timeout: float) -> None:
    """Tell the actors that this process made that the run is over, and let them and those that they made send what they
    have, waiting `timeout` seconds at most."""
    Answers.of(list(_children), _end_run, failure_of(error), timeout).wait(timeout)


def _end_run(actor: Any, failure: dict[str, str], timeout: float) -> None:
    """Runs in the actor's process."""
    t = telemetry.peek()
    if t is not None:
        t.run_ended(failure)
        flush_actors(timeout / 2)
        t.flush(timeout / 2)


def _flush(actor: Any, timeout: float) -> None:
    """Runs in the actor's process."""
    t = telemetry.peek()
    if t is not None:
        t.trajectories.end_open()
        t.flush(timeout)

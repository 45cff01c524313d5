"""Context across Ray calls: W3C trace context and baggage, through the standard propagator API.

The carrier travels as the keyword argument `CARRIER`, which only methods that we wrapped declare and take off again:
the wrapped method's own signature stays as verl wrote it. Callables of the four kinds that Ray knows (plain, coroutine,
generator, async generator) keep their kind.
"""

import asyncio
import contextvars
import functools
import inspect
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.trace import get_current_span

from verl_otel import border

CARRIER = "_verl_otel_carrier"

BY_VALUE, BY_REFERENCE = "by value", "by reference"
"""How a wrapped method gets to the other process: with our wrapper in it, or as a name that is wrapped there or not."""


def inject(context: Context | None = None) -> dict[str, str] | None:
    """A context, by default the current one, as a carrier; None if there is no valid span in it."""
    if not get_current_span(context).get_span_context().is_valid:
        return None
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context)
    return carrier or None


def extract(carrier: object) -> Context | None:
    """The context in a carrier, None if there is none. Never raises."""
    try:
        return propagate.extract(carrier) if isinstance(carrier, dict) and carrier else None
    except Exception:
        border.caught("reading the trace context of a call")
        return None


def with_carrier(func: Callable[..., Any]) -> Callable[..., Any]:
    """`func` with the extra keyword argument `CARRIER`, run in the context that arrives by it.

    A plain closure: classes that Ray pickles by value keep it, which they would not keep a wrapt proxy.
    """
    call = _call_kind(func)

    if call == "coroutine":

        @functools.wraps(func)
        async def wrapper(*args: Any, _verl_otel_carrier: object = None, **kwargs: Any) -> Any:
            token = attach(_verl_otel_carrier)
            try:
                return await func(*args, **kwargs)
            finally:
                detach(token)

    elif call == "generator":

        @functools.wraps(func)
        def wrapper(*args: Any, _verl_otel_carrier: object = None, **kwargs: Any) -> Any:
            context = extract(_verl_otel_carrier)
            generator = func(*args, **kwargs)
            step, value = generator.send, None
            while True:
                # Attached only while the generator's own code runs: what is between two items belongs to the caller.
                token = _enter(context)
                try:
                    item = step(value)
                except StopIteration as stop:
                    return stop.value
                finally:
                    detach(token)
                try:
                    step, value = generator.send, (yield item)
                except BaseException as error:  # also GeneratorExit, which `throw` turns into a close
                    step, value = generator.throw, error

    elif call == "async generator":

        @functools.wraps(func)
        async def wrapper(*args: Any, _verl_otel_carrier: object = None, **kwargs: Any) -> Any:
            context = extract(_verl_otel_carrier)
            generator = func(*args, **kwargs)
            step, value = generator.asend, None
            while True:
                token = _enter(context)
                try:
                    item = await step(value)
                except StopAsyncIteration:
                    return
                finally:
                    detach(token)
                try:
                    step, value = generator.asend, (yield item)
                except BaseException as error:
                    step, value = generator.athrow, error

    else:

        @functools.wraps(func)
        def wrapper(*args: Any, _verl_otel_carrier: object = None, **kwargs: Any) -> Any:
            token = attach(_verl_otel_carrier)
            try:
                return func(*args, **kwargs)
            finally:
                detach(token)

    declare_carrier(wrapper, func, BY_REFERENCE)
    return wrapper


def declare_carrier(wrapper: Callable[..., Any], func: Callable[..., Any], kind: str) -> None:
    """Show the parameter `CARRIER` in the signature of `wrapper`, for Ray's checks and for our handshake.

    Ray takes the signature of what it finds by following `__wrapped__`; that has to be the wrapper itself.
    """
    parameters = [p for p in inspect.signature(func).parameters.values() if p.name != CARRIER]
    last = parameters[-1:] if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    head = parameters[: len(parameters) - len(last)]
    carrier = inspect.Parameter(CARRIER, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
    wrapper.__dict__.pop("__wrapped__", None)
    wrapper.__signature__ = inspect.Signature([*head, carrier, *last])  # type: ignore[attr-defined]


def carrier_kind(signature: Any) -> str | None:
    """`BY_VALUE` or `BY_REFERENCE` if a method with these parameters takes a carrier, None if it does not.

    Args:
        signature: list of `inspect.Parameter`, as Ray keeps it for each method of an actor.
    """
    for parameter in reversed(signature or ()):
        if parameter.name == CARRIER:
            return parameter.annotation
    return None


class _ContextExecutor(ThreadPoolExecutor):
    """Runs what it is given in the context of the caller, as `asyncio.to_thread` does."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        return super().submit(contextvars.copy_context().run, fn, *args, **kwargs)


_with_executor: "weakref.WeakSet[asyncio.AbstractEventLoop]" = weakref.WeakSet()


def into_threads() -> None:
    """Let what the running event loop gives to its default executor keep its context: verl runs tokenizers and users'
    reward functions there, by `run_in_executor`, which does not copy it. Once per loop; never raises."""
    try:
        loop = asyncio.get_running_loop()
        if loop not in _with_executor:
            _with_executor.add(loop)
            loop.set_default_executor(_ContextExecutor(thread_name_prefix="asyncio"))
    except RuntimeError:  # no loop is running, or it is closing
        pass
    except Exception:
        border.caught("keeping the context in threads")


def _call_kind(func: Callable[..., Any]) -> str:
    if inspect.isasyncgenfunction(func):
        return "async generator"
    if inspect.isgeneratorfunction(func):
        return "generator"
    return "coroutine" if inspect.iscoroutinefunction(func) else "plain"


def _enter(context: Context | None) -> Any:
    return None if context is None else otel_context.attach(context)


def attach(carrier: object) -> Any:
    """Attach the context in a carrier; returns what `detach` takes. Never raises."""
    return _enter(extract(carrier))


def detach(token: Any) -> None:
    """Detach what `attach` attached, if anything."""
    if token is not None:
        otel_context.detach(token)

"""Exceptions on spans."""

import asyncio

from opentelemetry.semconv.attributes import exception_attributes as names
from opentelemetry.trace import Span, Status, StatusCode

from verl_otel import border
from verl_otel.redaction import kept, shown, traceback_of

_NO_ERRORS = frozenset({"GeneratorExit", "TrainingStopException"})
"""A generator that is closed, and what verl ends a loop by when all is done (fully_async)."""


def fail(span: Span, error: BaseException | None) -> None:
    """Record the exception that ends a span and give it ERROR status; nothing for None, for a closed generator, and for
    an exception by which verl says that all is done.

    Never raises: the exception may be of a class that cannot even be printed.
    """
    if error is None or type(error).__name__ in _NO_ERRORS:
        return
    try:
        if span.is_recording():
            span.add_event("exception", in_words(error))
    except Exception:
        border.caught("recording an exception")
    span.set_status(Status(StatusCode.ERROR, describe(error)))


def in_words(error: BaseException) -> dict[str, str]:
    """Type, message and stack under OpenTelemetry's names, without what looks like a secret; may raise."""
    kind = type(error)
    of_builtins = kind.__module__ == "builtins"
    return {
        names.EXCEPTION_TYPE: kind.__qualname__ if of_builtins else f"{kind.__module__}.{kind.__qualname__}",
        names.EXCEPTION_MESSAGE: kept(str(error)),
        names.EXCEPTION_STACKTRACE: traceback_of(error),
    }


def describe(error: BaseException) -> str:
    """Type and message, as `shown`."""
    try:
        return shown(f"{type(error).__name__}: {error}")
    except Exception:
        return type(error).__name__


def failure_of(error: BaseException | None) -> dict[str, str]:
    """Type and message under OpenTelemetry's names; nothing for None."""
    if error is None:
        return {}
    return {"exception.type": type(error).__qualname__, "exception.message": describe(error)}


def is_failure(error: BaseException) -> bool:
    """Whether an exception says that something went wrong: being cancelled does not, nor does what `fail` ignores."""
    return not isinstance(error, asyncio.CancelledError) and type(error).__name__ not in _NO_ERRORS


def type_of(error: BaseException) -> str:
    """The value of `error.type`: the class of the exception, or of the one in another process behind it."""
    cause = getattr(error, "cause", None)  # of Ray's RayTaskError
    return type(cause if isinstance(cause, BaseException) else error).__qualname__

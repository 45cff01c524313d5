"""Exceptions on spans."""

from opentelemetry.trace import Span, Status, StatusCode


def fail(span: Span, error: BaseException | None) -> None:
    """Record the exception that ends a span and give it ERROR status; nothing for None and for a closed generator."""
    if error is None or isinstance(error, GeneratorExit):
        return
    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"[:500]))

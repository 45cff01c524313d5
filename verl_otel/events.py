"""Events: OTLP log records with an event name and a map as body (contract: design section 3.5)."""

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry._logs import Logger, LogRecord, SeverityNumber
from opentelemetry.context import Context


def emit(
    logger: Logger,
    name: str,
    body: Mapping[str, Any],
    attributes: Mapping[str, Any],
    *,
    context: Context | None = None,
    time_ns: int | None = None,
    severity: SeverityNumber = SeverityNumber.INFO,
) -> None:
    """Emit one event.

    Args:
        body: values of any type that OTLP has; doubles keep their full precision.
        context: the span to which the event belongs; default the current one.
        time_ns: Unix time in nanoseconds; default now.
    """
    now = time.time_ns()
    record = LogRecord(
        timestamp=now if time_ns is None else time_ns,
        observed_timestamp=now,
        context=context,
        severity_number=severity,
        body=dict(body),
        attributes=dict(attributes),
        event_name=name,
    )
    logger.emit(record)

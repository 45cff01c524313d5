"""What is said when telemetry cannot be sent: one warning that says what to do, instead of the SDK's line for each try.

A Collector that is away for an hour would otherwise fill the log of every rank.
"""

import logging
import os
from urllib.parse import urlsplit

from verl_otel import border, config

_LOGGERS = (
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http._log_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.metrics._internal.export",
)


class _Once(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        border.warn_once(
            "sending",
            "telemetry cannot be sent to %s; the run goes on without it. Check that an OpenTelemetry Collector listens "
            "there (OTEL_EXPORTER_OTLP_ENDPOINT). The first message was: %s",
            _endpoint(),
            record.getMessage()[:300],
        )
        return False


_filter = _Once()


def install() -> None:
    """Say it once in this process from now on."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_filter)  # adding it twice changes nothing


def _endpoint() -> str:
    """Host and port of the configured endpoint, without user name, password and path."""
    for variable in config.ENDPOINT_VARIABLES:
        value = os.environ.get(variable)
        if value:
            try:
                return urlsplit(value).netloc.rpartition("@")[2] or "the configured endpoint"
            except ValueError:
                break
    return "the configured endpoint"

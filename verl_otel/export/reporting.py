"""What is said when telemetry cannot be sent: one warning that says what to do, instead of the SDK's line for each try.

A Collector that is away for an hour would otherwise fill the log of every rank.
"""

import logging
import os
import re
from urllib.parse import unquote, urlsplit

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
            without_secrets(record.getMessage())[:300],
        )
        return False


class _NoHeaders(logging.Filter):
    """What OpenTelemetry cannot read of `OTEL_EXPORTER_OTLP_HEADERS`, it logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            border.warn_once(
                "headers", "a part of OTEL_EXPORTER_OTLP_HEADERS is not name=value, and is left out (not shown here)"
            )
            return False
        return True


_filter = _Once()
_no_headers = _NoHeaders()


def install() -> None:
    """Say it once in this process from now on."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_filter)  # adding it twice changes nothing
    logging.getLogger("opentelemetry.util.re").addFilter(_no_headers)


def without_secrets(text: str) -> str:
    """A message of others, without user, password, path and query of URLs, and without the headers that are set."""
    text = re.sub(r"(https?://)[^\s/@'\"]*@", r"\1", text)
    text = re.sub(r"(url: )\S+", r"\1...", text)  # of urllib3: path and query
    text = re.sub(r"(https?://[^\s/?'\")]+)[/?][^\s'\")]*", r"\1/...", text)
    for name, value in os.environ.items():
        if name.startswith("OTEL_EXPORTER_OTLP_") and name.endswith("HEADERS"):
            for part in value.split(","):
                secret = part.partition("=")[2].strip()
                for form in {secret, unquote(secret)} - {""}:
                    text = text.replace(form, "...")
    return text


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

"""OTLP/HTTP exporters: requests of bounded size, handed to the process's outbox (`verl_otel.export.outbox`).

They take the place of the SDK's own, which wait for the network where they are called and give up what they cannot
send.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.common._internal.metrics_encoder import OTLPMetricExporterMixin
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from verl_otel import border, config
from verl_otel.export import otlp_http, otlp_json, otlp_metrics
from verl_otel.export.files import process_name, run_folder
from verl_otel.export.outbox import DELIVERED, DROPPED, REPLAYED, SPOOLED, Outbox, Request
from verl_otel.export.spool import SPOOL, Spool
from verl_otel.semconv import attributes as attr

MAX_REQUEST = 3 << 20
"""Bytes of a request, before compression; larger ones are sent in parts. gRPC behind the Collector takes 4 MiB."""

_lock = threading.Lock()
_outbox: Outbox | None = None
_counts: dict[tuple[str, str, str], int] = {}


def outbox(resource: Any, signal: str) -> Outbox:
    """The outbox of this process, made when the first exporter is, and open for a signal.

    Raises:
        ValueError: the configured endpoint is no URL.
    """
    global _outbox
    endpoint = otlp_http.Endpoint(signal)
    with _lock:
        if _outbox is None:
            attributes = resource.attributes
            root, run_id = config.Settings.from_environ().folder, str(attributes.get(attr.RUN_ID, "no-run"))
            folder = os.path.join(run_folder(root, run_id), SPOOL)
            pending = config.number(os.environ, config.MAX_PENDING, config.DEFAULT_PENDING, 0) * (1 << 20)
            _outbox = Outbox({}, Spool(folder, process_name(attributes)), count, pending)
    _outbox.open(signal, endpoint)
    return _outbox


def current() -> Outbox | None:
    """The outbox of this process, if it has one."""
    return _outbox


def close(timeout: float) -> None:
    """Send what is pending, `timeout` seconds at most, spool the rest, and say what did not arrive."""
    if _outbox is None:
        return
    _outbox.close(timeout)
    sent = kept = lost = 0
    for (_, outcome, _), items in counts().items():
        sent += items if outcome == DELIVERED else 0
        kept += items if outcome == SPOOLED else -items if outcome == REPLAYED else 0
        lost += items if outcome == DROPPED else 0
    if kept > 0 or lost > 0:
        border.logger.warning(
            "verl-otel: of this process' telemetry %d items were sent, %d are kept in %s (send them with: verl-otel "
            "replay), %d are lost",
            sent,
            kept,
            _outbox.folder,
            lost,
        )


def count(signal: str, outcome: str, items: int, reason: str) -> None:
    """Count what became of items: `delivered`, `spooled` or `dropped`, and `replayed`: taken out of the spool again."""
    with _lock:
        _counts[signal, outcome, reason] = _counts.get((signal, outcome, reason), 0) + items


def counts() -> dict[tuple[str, str, str], int]:
    """(signal, outcome, reason) -> items, since the start of the process."""
    with _lock:
        return dict(_counts)


def _in_child() -> None:
    """A forked child counts for itself."""
    global _lock
    _lock = threading.Lock()
    _counts.clear()


os.register_at_fork(after_in_child=_in_child)


def _put(outbox: Outbox, signal: str, items: Sequence[Any], encode: Callable[[Sequence[Any]], Any]) -> bool:
    """Encode and hand over, in requests of bounded size. What cannot be encoded costs only itself."""
    if not items:
        return True
    try:
        request = encode(items)
        size = otlp_json.items(signal, request)
        parts, too_large = otlp_json.split(signal, request, MAX_REQUEST)
    except Exception:
        border.caught(f"encoding {signal}")
        if len(items) == 1:
            count(signal, DROPPED, 1, "not_encodable")
            return False
        half = len(items) // 2
        return all([_put(outbox, signal, items[:half], encode), _put(outbox, signal, items[half:], encode)])
    if too_large:
        count(signal, DROPPED, too_large, "too_large")
        border.warn_once(
            f"size of {signal}",
            "%d of %s are larger than %d bytes each, and are left out",
            too_large,
            signal,
            MAX_REQUEST,
        )
    for part in parts:
        alone = len(parts) == 1 and not too_large
        outbox.put(Request(signal, part, size if alone else otlp_json.items_of_bytes(signal, part)))
    return not too_large


class OtlpSpanExporter(SpanExporter):
    """Spans to the outbox."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return (
            SpanExportResult.SUCCESS if _put(self._outbox, "traces", spans, encode_spans) else SpanExportResult.FAILURE
        )

    def shutdown(self) -> None:
        pass


class OtlpLogExporter(LogRecordExporter):
    """Events to the outbox."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        ok = _put(self._outbox, "logs", batch, encode_logs)
        return LogRecordExportResult.SUCCESS if ok else LogRecordExportResult.FAILURE

    def force_flush(self, timeout_millis: int = 10_000) -> bool:
        return True

    def shutdown(self) -> None:
        pass


class OtlpMetricExporter(MetricExporter, OTLPMetricExporterMixin):
    """Metrics to the outbox. Temporality as `OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE` says."""

    says_what_ends = True

    def __init__(self, outbox: Outbox) -> None:
        self._common_configuration()
        self._outbox = outbox

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        ok = True
        for group in metrics_data.resource_metrics:
            for scope in group.scope_metrics:

                def encode(metrics: Sequence[Any], group: Any = group, scope: Any = scope) -> Any:
                    one = ScopeMetrics(scope.scope, list(metrics), scope.schema_url)
                    return otlp_metrics.encode(MetricsData([ResourceMetrics(group.resource, [one], group.schema_url)]))

                ok = _put(self._outbox, "metrics", scope.metrics, encode) and ok
        return MetricExportResult.SUCCESS if ok else MetricExportResult.FAILURE

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        pass

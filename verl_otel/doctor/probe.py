"""The test data of one examination: a span, a metric and an event, marked so that nobody takes them for a run's.

They carry no run id, so MLflow gets no run of them and no dashboard shows them. In Prometheus they are one series for
each host, however often a doctor is called: its value is the time of the last call.
"""

import os
import secrets
import threading
import time
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import SEVERITY_NUMBER_INFO
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.version import __version__


class Probe:
    """The test data, and to which signals' endpoints it was delivered."""

    def __init__(self) -> None:
        self.time_ns = time.time_ns()
        self.value = self.time_ns / 1e9
        """Of the metric: Unix time in seconds."""
        self.id = f"doctor-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(self.value))}-{secrets.token_hex(3)}"
        self.trace_id = secrets.token_bytes(16)
        self._span_id = secrets.token_bytes(8)
        self._delivered: frozenset[str] = frozenset()
        self._sent = threading.Event()

    def request(self, signal: str) -> bytes:
        """The OTLP request with this signal's test data."""
        return {"traces": self._span, "metrics": self._metric, "logs": self._event}[signal]()

    def sent(self, delivered: frozenset[str]) -> None:
        """Sending has ended; these signals were taken."""
        self._delivered = delivered
        self._sent.set()

    def delivered(self, end: float) -> frozenset[str]:
        """The signals that were taken; waits for it, until `end` by `time.monotonic()`."""
        self._sent.wait(max(0.0, end - time.monotonic()))
        return self._delivered

    def _span(self) -> bytes:
        request = ExportTraceServiceRequest()
        span = _scope(request.resource_spans, "scope_spans").spans.add(
            name=attr.SPAN_DOCTOR,
            kind=Span.SPAN_KIND_INTERNAL,
            trace_id=self.trace_id,
            span_id=self._span_id,
            start_time_unix_nano=self.time_ns - 1_000_000,
            end_time_unix_nano=self.time_ns,
        )
        _add(span.attributes, {attr.DOCTOR_ID: self.id})
        return request.SerializeToString()

    def _metric(self) -> bytes:
        request = ExportMetricsServiceRequest()
        name, unit, description = names.DOCTOR_TIMESTAMP.arguments
        metric = _scope(request.resource_metrics, "scope_metrics").metrics.add(
            name=name, unit=unit, description=description
        )
        point = metric.gauge.data_points.add(as_double=self.value, time_unix_nano=self.time_ns)
        _add(point.attributes, {attr.RANK: attr.ALL_RANKS, attr.STAGE: "other", attr.MODEL_TYPE: "none"})
        return request.SerializeToString()

    def _event(self) -> bytes:
        request = ExportLogsServiceRequest()
        record = _scope(request.resource_logs, "scope_logs").log_records.add(
            event_name=attr.EVENT_DOCTOR,
            time_unix_nano=self.time_ns,
            observed_time_unix_nano=self.time_ns,
            severity_number=SEVERITY_NUMBER_INFO,
        )
        _add(record.attributes, {attr.DOCTOR_ID: self.id})
        return request.SerializeToString()


def _scope(groups: Any, scopes: str) -> Any:
    """The one scope of a request, under the one resource."""
    host = os.uname().nodename
    group = groups.add()
    who = {attr.SERVICE_NAME: attr.SERVICE_DOCTOR, attr.SERVICE_NAMESPACE: "verl", attr.SERVICE_INSTANCE_ID: host}
    _add(group.resource.attributes, {**who, attr.HOST_NAME: host})
    scope = getattr(group, scopes).add()
    scope.scope.name, scope.scope.version = "verl_otel", __version__
    return scope


def _add(attributes: Any, values: dict[str, str]) -> None:
    for key, value in values.items():
        attributes.add(key=key).value.string_value = value

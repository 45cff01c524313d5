"""OTLP requests as lines of JSON: the OTLP File Exporter format, which the Collector's `otlpjsonfile` reads too."""

import base64
import json
from collections.abc import Iterator
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

_REQUESTS: dict[str, Any] = {
    "traces": ExportTraceServiceRequest,
    "metrics": ExportMetricsServiceRequest,
    "logs": ExportLogsServiceRequest,
}
_RESPONSES: dict[str, Any] = {
    "traces": ExportTraceServiceResponse,
    "metrics": ExportMetricsServiceResponse,
    "logs": ExportLogsServiceResponse,
}
_REJECTED = {"traces": "rejected_spans", "metrics": "rejected_data_points", "logs": "rejected_log_records"}
_SIGNAL_OF_FIELD = {"resourceSpans": "traces", "resourceMetrics": "metrics", "resourceLogs": "logs"}
_ID_FIELDS = frozenset({"traceId", "spanId", "parentSpanId"})


def from_bytes(signal: str, content: bytes) -> Message:
    """A request from its protobuf bytes."""
    return _REQUESTS[signal].FromString(content)


def to_line(request: Message) -> bytes:
    """A request as one line."""
    content = MessageToDict(request, use_integers_for_enums=True)
    # OTLP/JSON has ids in hex; protobuf's own JSON has bytes in base64.
    _map_ids(content, lambda text: base64.b64decode(text).hex())
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def from_line(line: bytes) -> tuple[str, Message] | None:
    """Signal and request of a line; None if it is none: torn, or foreign."""
    try:
        content = json.loads(line)
        signal = next(signal for field, signal in _SIGNAL_OF_FIELD.items() if field in content)
        _map_ids(content, lambda text: base64.b64encode(bytes.fromhex(text)).decode())
        return signal, ParseDict(content, _REQUESTS[signal](), ignore_unknown_fields=True)
    except (ValueError, TypeError, AttributeError, StopIteration, RecursionError, OverflowError, ParseError):
        return None


def empty(signal: str) -> bytes:
    """A line of nothing, without its end."""
    return next(b'{"%s":[]}' % field.encode() for field, of in _SIGNAL_OF_FIELD.items() if of == signal)


def items(signal: str, request: Any) -> int:
    """How many spans, data points or log records a request has."""
    return sum(map(len, _lists(signal, request)))


def items_of_bytes(signal: str, content: bytes) -> int:
    """How many items a request of these bytes has."""
    return items(signal, from_bytes(signal, content))


def split(signal: str, request: Any, max_bytes: int) -> tuple[list[bytes], int]:
    """A request as requests of at most `max_bytes`, and how many items are too large even alone, and are left out."""
    content = request.SerializeToString()
    if len(content) <= max_bytes:
        return [content], 0
    count = items(signal, request)
    if count <= 1:
        return [], count
    parts: list[bytes] = []
    too_large = 0
    for first, last in ((0, count // 2), (count // 2, count)):
        half = type(request)()
        half.CopyFrom(request)
        _keep(signal, half, first, last)
        of_half, too_large_of_half = split(signal, half, max_bytes)
        parts += of_half
        too_large += too_large_of_half
    return parts, too_large


def rejected(signal: str, response: bytes) -> int:
    """How many items of a request were not taken, by the answer to it (OTLP's partial success)."""
    try:
        answer = _RESPONSES[signal].FromString(response)
    except Exception:  # not of OTLP: it was taken all the same
        return 0
    return max(0, getattr(answer.partial_success, _REJECTED[signal]))


def _scopes(signal: str, request: Any) -> Iterator[Any]:
    """The lists with what a scope has: spans, log records, or metrics."""
    if signal == "traces":
        yield from (scope.spans for group in request.resource_spans for scope in group.scope_spans)
    elif signal == "logs":
        yield from (scope.log_records for group in request.resource_logs for scope in group.scope_logs)
    else:
        yield from (scope.metrics for group in request.resource_metrics for scope in group.scope_metrics)


def _lists(signal: str, request: Any) -> Iterator[Any]:
    """The lists with what a request has: spans, log records, or data points."""
    if signal != "metrics":
        yield from _scopes(signal, request)
        return
    for metrics in _scopes(signal, request):
        for metric in metrics:
            kind = metric.WhichOneof("data")
            if kind:
                yield getattr(metric, kind).data_points


def _keep(signal: str, request: Any, first: int, last: int) -> None:
    """Remove all items of a request but those from `first` to `last`."""
    passed = 0
    for found in _lists(signal, request):
        size = len(found)
        begin, end = (min(max(limit - passed, 0), size) for limit in (first, last))
        del found[end:]
        del found[:begin]
        passed += size
    if signal == "metrics":
        for metrics in _scopes(signal, request):
            for i in reversed(range(len(metrics))):
                kind = metrics[i].WhichOneof("data")
                if not kind or not getattr(metrics[i], kind).data_points:
                    del metrics[i]


def _map_ids(node: Any, change: Any) -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in _ID_FIELDS and isinstance(value, str):
                node[key] = change(value)
            else:
                _map_ids(value, change)
    elif isinstance(node, list):
        for value in node:
            _map_ids(value, change)

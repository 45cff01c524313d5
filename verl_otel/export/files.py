"""The embedded default: OTLP as JSON lines in local files, for when no endpoint is configured.

Each process appends to files of its own, `<folder>/<run id>/<role>-<host>-<pid>.{traces,metrics,logs}.jsonl`; each line
is one OTLP export request in the JSON encoding (the OTLP File Exporter format, which the Collector's `otlpjsonfile`
receiver reads). Where the process sends the same over OTLP/HTTP, and spools what it cannot send, the file is a copy and
its name says so: `*.traces.copy.jsonl`. Called on exporting threads only; a write that fails costs that batch and one
warning, nothing else.
"""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import Message
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from verl_otel import border, config
from verl_otel.export import otlp_json, otlp_metrics, providers
from verl_otel.semconv import attributes as attr

MAX_BYTES = 1 << 30
"""A file that has reached this size takes no more."""

COPY = ".copy.jsonl"
"""The end of the name of a file with what its process sends itself."""


def run_folder(root: str, run_id: str) -> str:
    """Where the files of a run are. The run id may come from anywhere: it cannot lead out of `root`."""
    return os.path.join(root, re.sub(r"[^\w.-]|^\.+", "_", run_id) or "_")


def process_name(attributes: Any) -> str:
    """What the files of the process with these resource attributes begin with, before its pid."""
    return f"{attributes.get(attr.PROCESS_ROLE, 'other')}-{os.uname().nodename}"


class _Lines:
    """Append-only lines of one signal of one process; the file is made at the first line."""

    def __init__(self, signal: str) -> None:
        self._signal = signal
        self._file: Any = None
        self._pid = 0

    def write(self, request: Message, resource: Resource) -> bool:
        try:
            file = self._file if self._file is not None and self._pid == os.getpid() else self._open(resource)
            start = file.tell()
            if start >= MAX_BYTES:
                border.warn_once("file size", "%s has reached %d bytes and takes no more", file.name, MAX_BYTES)
                return False
            line = otlp_json.to_line(request)
            if file.write(line) == len(line):
                return True
            file.truncate(start)  # what was written of it would spoil the next line
            raise OSError("the disk is full")
        except OSError as error:
            border.warn_once(
                f"writing {self._signal}",
                "telemetry cannot be written (%s): set %s to a folder that can be written, or an OTLP endpoint",
                error,
                config.FOLDER,
            )
            return False

    def _open(self, resource: Resource) -> Any:
        attributes = resource.attributes
        root = config.Settings.from_environ().folder
        folder = run_folder(root, str(attributes.get(attr.RUN_ID, "no-run")))
        os.makedirs(folder, mode=0o700, exist_ok=True)
        both = {providers.FILE_EXPORTER, providers.OTLP_HTTP} <= {*providers.exporter_names(self._signal)}
        name = f"{process_name(attributes)}-{os.getpid()}.{self._signal}{COPY if both else '.jsonl'}"
        descriptor = os.open(os.path.join(folder, name), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a process of the same name ended in mid-line
            self._file.write(b"\n")
        self._pid = os.getpid()
        return self._file

    def close(self) -> None:
        if self._file is not None and self._pid == os.getpid():
            self._file.close()
        self._file = None


def _by_resource(items: Sequence[Any]) -> Iterator[tuple[Resource, list[Any]]]:
    grouped: dict[int, tuple[Resource, list[Any]]] = {}
    for item in items:
        grouped.setdefault(id(item.resource), (item.resource, []))[1].append(item)
    yield from grouped.values()


class FileSpanExporter(SpanExporter):
    """Spans to `*.traces.jsonl`; `OTEL_TRACES_EXPORTER=verl_otel_file`."""

    def __init__(self) -> None:
        self._lines = _Lines("traces")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        ok = all([self._lines.write(encode_spans(group), resource) for resource, group in _by_resource(spans)])
        return SpanExportResult.SUCCESS if ok else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._lines.close()


class FileMetricExporter(MetricExporter):
    """Metrics to `*.metrics.jsonl`; `OTEL_METRICS_EXPORTER=verl_otel_file`."""

    says_what_ends = True

    def __init__(self) -> None:
        super().__init__()
        self._lines = _Lines("metrics")

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        ok = all(
            [
                self._lines.write(otlp_metrics.encode(MetricsData([group])), group.resource)
                for group in metrics_data.resource_metrics
            ]
        )
        return MetricExportResult.SUCCESS if ok else MetricExportResult.FAILURE

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self._lines.close()


class FileLogExporter(LogRecordExporter):
    """Events to `*.logs.jsonl`; `OTEL_LOGS_EXPORTER=verl_otel_file`."""

    def __init__(self) -> None:
        self._lines = _Lines("logs")

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        ok = all([self._lines.write(encode_logs(group), resource) for resource, group in _by_resource(batch)])
        return LogRecordExportResult.SUCCESS if ok else LogRecordExportResult.FAILURE

    def force_flush(self, timeout_millis: int = 10_000) -> bool:
        return True

    def shutdown(self) -> None:
        self._lines.close()

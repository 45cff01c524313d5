"""A Collector with some of the configurations of collector/, on free ports."""

import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from verl_otel.stack.binaries import binary
from verl_otel.stack.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]

_REQUESTS = {
    "traces": ExportTraceServiceRequest,
    "metrics": ExportMetricsServiceRequest,
    "logs": ExportLogsServiceRequest,
}

TO_FILES = """
exporters:
  file: {path: received.jsonl, flush_interval: 100ms}
service:
  pipelines:
    traces: {exporters: [file]}
    metrics: {exporters: [file]}
    logs: {exporters: [file]}
"""
"""A further configuration: what arrives goes to a file instead of to the backends."""


class Collector:
    """`with Collector(folder, "gateway.yaml", "variants/sql.yaml", more=..., VARIABLE=...) as collector: ...`"""

    def __init__(self, folder: Path, *files: str, more: str = "", **variables: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        ports = free_ports(["grpc", "http", "health", "self"])
        self.grpc, self.http, self._health = (f"127.0.0.1:{ports[name]}" for name in ("grpc", "http", "health"))
        self._self = f"http://127.0.0.1:{ports['self']}/metrics"
        self._command = [str(binary("verl-otelcol"))]
        for file in files:
            self._command += ["--config", str(ROOT / "collector" / file)]
        if more:
            (folder / "more.yaml").write_text(more)
            self._command += ["--config", "more.yaml"]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "VERL_OTEL_", "JAEGER_", "KAFKA_"))}
        self._environment = {
            **kept,
            "VERL_OTEL_LISTEN_GRPC": self.grpc,
            "VERL_OTEL_LISTEN_HTTP": self.http,
            "VERL_OTEL_HEALTH": self._health,
            "VERL_OTEL_SELF_PORT": str(ports["self"]),
            "VERL_OTEL_QUEUE_FOLDER": "queue",
            **variables,
        }

    @property
    def url(self) -> str:
        return f"http://{self.http}"

    def start(self) -> "Collector":
        with (self.folder / "collector.log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=self.folder, env=self._environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://{self._health}", timeout=5).close()
                return self
            except OSError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise RuntimeError(self.log[-3000:]) from None
                time.sleep(0.1)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)

    def kill(self) -> None:
        """As a crash does."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "Collector":
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()

    @property
    def log(self) -> str:
        return (self.folder / "collector.log").read_text(errors="replace")

    def own_metrics(self) -> dict[str, float]:
        """The Collector's own metrics: series as they are written -> value."""
        with urllib.request.urlopen(self._self, timeout=10) as response:
            lines = response.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def received(self, signal: str) -> list[Any]:
        """With TO_FILES: the requests of a signal (traces, metrics, logs) that have arrived so far."""
        file = self.folder / "received.jsonl"
        key = {"traces": "resourceSpans", "metrics": "resourceMetrics", "logs": "resourceLogs"}[signal]
        found = []
        for line in file.read_text().split("\n")[:-1] if file.exists() else []:
            if key in (content := json.loads(line)):
                found.append(json_format.ParseDict(content, _REQUESTS[signal](), ignore_unknown_fields=True))
        return found

    def spans(self) -> list[Any]:
        """With TO_FILES: all spans that have arrived so far, each as often as it came."""
        return [span for request in self.received("traces") for resource in request.resource_spans
                for scope in resource.scope_spans for span in scope.spans]  # fmt: skip

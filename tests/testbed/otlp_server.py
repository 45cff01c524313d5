"""An OTLP/HTTP endpoint that misbehaves on demand, and keeps what it has taken."""

import gzip
import itertools
import socket
import struct
import threading
import zlib
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from verl_otel.export import otlp_json

FAULTS = ("hangs", "is slow", "resets", "400", "401", "404", "429", "500", "503", "garbage", "not TLS", "is not there")
"""What an endpoint can do wrong. `not TLS` and `is not there` are of the URL: see `url_of`."""


class Server(ThreadingHTTPServer):
    """See the module. `fault` is one of `FAULTS`, or "", and can be changed at any time; `faults` are per signal."""

    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, fault="", port=0, delay=8.0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.fault, self.faults, self.delay = fault, {}, delay
        self.later = False
        """Whether it first takes one request."""
        self.retry_after = "1"
        self.broken = lambda signal, content: False
        self.rejected = 0
        self.taken, self.headers, self.tried = [], [], Counter()
        self.ended = threading.Event()
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def port(self):
        return self.server_address[1]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def url_of(self, fault):
        """Where to send to meet a fault, which is set."""
        self.fault = fault
        if fault == "not TLS":
            return f"https://127.0.0.1:{self.port}"
        return "http://127.0.0.1:1" if fault == "is not there" else self.url

    def items(self, signal):
        """How many items of a signal were taken."""
        return sum(otlp_json.items_of_bytes(of, content) for of, content in list(self.taken) if of == signal)

    def names(self):
        """The names of the spans that were taken, in their order."""
        requests = [otlp_json.from_bytes(of, content) for of, content in list(self.taken) if of == "traces"]
        return [s.name for r in requests for g in r.resource_spans for scope in g.scope_spans for s in scope.spans]

    def handle_error(self, request, client_address):
        pass

    def close(self):
        self.ended.set()
        self.shutdown()
        self.server_close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server, signal = self.server, self.path.partition("?")[0].rpartition("/")[2]
        content = self.rfile.read(int(self.headers["content-length"]))
        if server.ended.is_set():  # on a connection that was kept
            return self.reset()
        fault = server.faults.get(signal, server.fault)
        if server.later and not server.taken:
            fault = ""
        with server.lock:
            server.tried[signal] += 1
            server.headers.append(dict(self.headers))
        encoding = self.headers.get("content-encoding")
        content = {"gzip": gzip.decompress, "deflate": zlib.decompress}.get(encoding, bytes)(content)
        if server.broken(signal, content):
            return self.answer(500)
        if fault == "hangs":
            server.ended.wait()
            return self.reset()
        if fault == "is slow":
            server.ended.wait(server.delay)
        elif fault == "resets":
            return self.reset()
        elif fault == "garbage":
            self.wfile.write(b"\0\1garbage\r\n" * 3)
            self.close_connection = True
            return None
        elif fault and not fault.isdecimal():
            return self.reset()
        elif fault:
            return self.answer(int(fault))
        with server.lock:
            server.taken.append((signal, content))
        response = ExportTraceServiceResponse()
        if server.rejected:
            response.partial_success.rejected_spans = server.rejected
            response.partial_success.error_message = "some are too old"
        return self.answer(200, response.SerializeToString())

    def answer(self, status, content=b""):
        self.send_response(status)
        if status in {429, 503}:
            self.send_header("Retry-After", self.server.retry_after)
        if 300 <= status < 400:
            self.send_header("Location", f"{self.server.url}/elsewhere")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, *_):
        pass


_number = itertools.count(1)


def spans(*names, text=""):
    """A request of spans of these names, as bytes."""
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for name in names:
        n = next(_number)
        span = scope.spans.add(name=name, trace_id=n.to_bytes(16, "big"), span_id=n.to_bytes(8, "big"))
        span.start_time_unix_nano, span.end_time_unix_nano = n, n + 1
        if text:
            span.attributes.add(key="text").value.string_value = text
    return request.SerializeToString()


def points(count):
    """A request of one metric with this many points, as bytes."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="m")
    for i in range(count):
        metric.gauge.data_points.add(as_double=i, time_unix_nano=next(_number))
    return request.SerializeToString()


def records(count):
    """A request of log records, as bytes."""
    request = ExportLogsServiceRequest()
    scope = request.resource_logs.add().scope_logs.add()
    for _ in range(count):
        scope.log_records.add(event_name="verl.step", time_unix_nano=next(_number)).body.string_value = "b"
    return request.SerializeToString()

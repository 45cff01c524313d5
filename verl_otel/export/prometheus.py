"""Metrics for a Prometheus without a Collector: `OTEL_METRICS_EXPORTER=prometheus`.

Every process serves its metrics on a port of its own and leaves a file that says where,
`<VERL_OTEL_FOLDER>/prometheus/<run id>-<role>-<host>-<pid>.json` (`verl_otel.export.targets`): one job with the glob
`prometheus/*.json` finds every process of every run (`deploy/prometheus/scrape-processes.yaml`). The names of metrics
are those that the Collector's way gives; there are no exemplars.

- `OTEL_EXPORTER_PROMETHEUS_HOST`: where to listen. Default `localhost`; for a Prometheus on another node `0.0.0.0`, and
  then `VERL_OTEL_FOLDER` has to be a folder that this Prometheus sees too.
- `OTEL_EXPORTER_PROMETHEUS_PORT`: default 0, a free port. A port given here goes to the first process on a node, the
  others get free ones.

A process that ends normally removes its file, and the launcher those of its whole run, since Ray ends its workers
without asking them. One that is killed while the run goes on leaves its file, and its target is down (`up == 0`).
Another process may get its port later: the path in the file is of this process alone, so that nobody else's numbers are
taken for its own.

A Pushgateway is not used: it goes on serving the last values of dead processes, as if they were alive, until somebody
deletes them; it has no `up` for a process; and it is one more service, on which all metrics depend. Processes that live
for hours and can be found are to be scraped.

A scrape is served by daemon threads of ours and waits for nothing but another scrape. A forked child neither serves nor
holds the port: it would show a frozen copy of its parent's values.
"""

import errno
import io
import os
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_PROMETHEUS_HOST, OTEL_EXPORTER_PROMETHEUS_PORT
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.semconv._incubating.attributes.k8s_attributes import K8S_CLUSTER_NAME
from prometheus_client import CollectorRegistry, make_wsgi_app

from verl_otel import border, config, forks
from verl_otel.export import targets
from verl_otel.identity import LAUNCHER
from verl_otel.semconv import attributes as attr
from verl_otel.semconv.prometheus import prometheus_label

TARGET_LABELS = (
    attr.RUN_ID,
    attr.RUN_ATTEMPT,
    attr.PROJECT_NAME,
    attr.EXPERIMENT_NAME,
    attr.PROCESS_ROLE,
    attr.WORKER_GROUP,
    attr.HOST_NAME,
    K8S_CLUSTER_NAME,
    attr.SERVICE_INSTANCE_ID,
)
"""Resource attributes that are labels of a target, and so of all its series: what tells runs and processes apart."""

CLIENT_TIMEOUT = 10.0
"""Seconds that a client may take to send its request or to read the answer, and that it waits for another scrape."""

Extend = Callable[[MetricsData], MetricsData]


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def get_stderr(self) -> Any:
        return io.StringIO()


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """Listens from the start; `run()` serves until `close()`."""

    daemon_threads = True

    def __init__(self, family: int, address: tuple[str, int]) -> None:
        self.address_family = family
        self._closing = False
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer would ask the DNS for the name of the host
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            if not self._closing:
                time.sleep(0.1)  # no file descriptors left: the connection goes on waiting, and would be tried at once
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client went away

    def run(self) -> None:
        while not self._closing:
            self.handle_request()
        self.server_close()

    def close(self) -> None:
        """Stop listening, at once."""
        self._closing = True
        try:
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes up `run`
        except OSError:
            pass


class PrometheusReader(PrometheusMetricReader):
    """Serves what the SDK has, when it is asked; makes no difference to any other registry of `prometheus_client`.

    The port is opened by a background thread, since the name of the host may have to be looked up. What fails there is
    a warning.

    Args:
        resource: of the provider that gets this reader.
        extend: called at each scrape, with what the SDK has collected; gives what is served. What it raises is reported
            once, and its part is left out.
    """

    def __init__(self, resource: Resource, extend: Extend | None = None) -> None:
        registry = CollectorRegistry(auto_describe=False)
        super().__init__(registry=registry)
        self._resource = resource
        self._labels = {
            prometheus_label(key): str(resource.attributes[key]) for key in TARGET_LABELS if key in resource.attributes
        }
        self._run_id = str(resource.attributes.get(attr.RUN_ID, "no-run"))
        self._extend = extend
        self._answer = make_wsgi_app(registry)
        self._scraping = threading.Lock()
        self._path = f"/metrics/{secrets.token_hex(8)}"
        self._changing = threading.Lock()
        self._closed = False
        self._server: _Server | None = None
        self._file = ""
        self._started = threading.Event()
        forks.in_child(self._forget)
        threading.Thread(target=self._run, name="verl-otel-prometheus", daemon=True).start()

    def address(self, timeout: float = 10.0) -> str:
        """`host:port` as Prometheus is told, once it is known; empty if there is none after `timeout` seconds."""
        self._started.wait(timeout)
        return _address(self._server) if self._server is not None else ""

    # ---- the metrics ----------------------------------------------------------------------------------------------

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True  # what is collected without a scrape would be kept, and served beside the next collection

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        if self._extend is not None and metrics_data is not None:
            try:
                metrics_data = self._extend(metrics_data)
            except Exception:
                border.caught("adding to the metrics that Prometheus scrapes")
        super()._receive_metrics(metrics_data, timeout_millis, **kwargs)

    def _app(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith("/metrics/") and path != self._path:
            start_response("404 Not Found", [])
            return [b"this is another process\n"]
        if not self._scraping.acquire(timeout=CLIENT_TIMEOUT):  # two collections at once would be served twice
            start_response("503 Service Unavailable", [])
            return [b"another scrape does not end\n"]
        try:
            return self._answer(environ, start_response)
        except Exception:
            border.caught("a scrape by Prometheus")
        finally:
            self._scraping.release()
        start_response("500 Internal Server Error", [])
        return [b"see the warning of verl-otel in the log of the process\n"]

    # ---- the port and the file ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            server = _listen()
        except Exception as error:
            border.warn_once(
                "listening for Prometheus",
                "the metrics of this process cannot be scraped (%s): check %s",
                error,
                OTEL_EXPORTER_PROMETHEUS_HOST,
            )
            self._started.set()
            return
        server.set_app(self._app)
        with self._changing:
            if self._closed:
                server.server_close()
                return
            self._server = server
            try:
                self._announce(_address(server))
            except Exception as error:
                border.warn_once(
                    "telling Prometheus",
                    "the metrics of this process are at http://%s/metrics, but Prometheus does not find them (%s): set "
                    "%s to a folder that can be written",
                    _address(server),
                    error,
                    config.FOLDER,
                )
        self._started.set()
        server.run()

    def _announce(self, address: str) -> None:
        folder = os.path.join(config.Settings.from_environ().folder, targets.PROCESSES)
        role = self._resource.attributes.get(attr.PROCESS_ROLE, "other")
        name = f"{self._run_id}-{role}-{os.uname().nodename}-{os.getpid()}"
        self._file = targets.write(folder, name, address, {**self._labels, "__metrics_path__": self._path})

    def _forget(self) -> None:
        """In a forked child: give the port up, which stays the parent's."""
        server, self._server, self._closed = self._server, None, True
        self._changing = threading.Lock()  # a thread that is not in the child may have held it
        if server is not None:
            server.socket.close()

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        with self._changing:
            if self._closed:
                return
            self._closed = True
            super().shutdown(timeout_millis, **kwargs)
            if self._server is not None:
                self._server.close()
            if self._file:
                targets.remove(self._file)
        if self._file and self._resource.attributes.get(attr.PROCESS_ROLE) == LAUNCHER:
            self._remove_those_of_the_run()

    def _remove_those_of_the_run(self) -> None:
        if config.ACTIVE in os.environ:
            return  # started by a process of the run: the run goes on
        attempt = self._resource.attributes.get(attr.RUN_ATTEMPT)
        targets.remove_all(os.path.dirname(self._file), self._run_id, attempt)


def _listen() -> _Server:
    """A server on the configured address, or on a free port of it. Raises OSError if there is no such address."""
    host = (os.environ.get(OTEL_EXPORTER_PROMETHEUS_HOST) or "localhost").strip().strip("[]")
    port = int(config.number(os.environ, OTEL_EXPORTER_PROMETHEUS_PORT, 0, 0))
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    try:
        return _Server(family, (str(address[0]), port))
    except (OSError, OverflowError) as error:
        if port == 0:
            raise
        if getattr(error, "errno", None) != errno.EADDRINUSE:  # otherwise another process of the node has it
            border.warn_once(
                OTEL_EXPORTER_PROMETHEUS_PORT, "port %d cannot be used (%s); using a free one", port, error
            )
        return _Server(family, (str(address[0]), 0))


def _address(server: _Server) -> str:
    """`host:port` at which Prometheus reaches the server: the address that it listens on, or of the node if on all."""
    host, port = str(server.server_address[0]), server.server_address[1]
    if host in ("0.0.0.0", "::"):
        host = _node_address()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _node_address() -> str:
    """The address of this node, as Ray knows it, or from which it would reach others; else its name."""
    try:
        return str(sys.modules["ray"].util.get_node_ip_address())
    except Exception:  # Ray is not loaded, or not wholly
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address of nobody (RFC 5737); nothing is sent
            return probe.getsockname()[0]
        except OSError:
            return os.uname().nodename

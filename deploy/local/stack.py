"""Collector, Jaeger, Prometheus, MLflow and the bridge on this machine: start them, wait until they answer, stop them.

    python deploy/local/stack.py [--folder FOLDER] [--fixed-ports]

Runs until interrupted. Everything listens on loopback. Logs and data are in FOLDER.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from binaries import ROOT, binary

FIXED = {
    "otlp_grpc": 4317,
    "otlp_http": 4318,
    "collector_health": 13133,
    "collector_self": 8888,
    "jaeger": 16686,
    "jaeger_grpc": 16685,
    "jaeger_otlp": 14317,
    "jaeger_health": 13134,
    "prometheus": 9090,
    "mlflow": 5000,
    "bridge": 4320,
}


def free_ports(names: list[str]) -> dict[str, int]:
    """A free loopback port for each name."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in names]
    ports = {name: s.getsockname()[1] for name, s in zip(names, sockets, strict=True)}
    for s in sockets:
        s.close()
    return ports


@dataclass(frozen=True)
class Service:
    """One program of the stack: how it is started, and the URL that answers when it is up."""

    command: list[str]
    environment: dict[str, str]
    health: str


class Stack:
    """The running stack. `with Stack(folder) as stack: ... stack.url("jaeger")`.

    Args:
        folder: logs and data.
        ports: by name, as in `FIXED`; free ones by default.
        environment: for all of them.
        traces_on_disk: Jaeger's traces outlive its restart.
    """

    def __init__(
        self,
        folder: Path,
        ports: dict[str, int] | None = None,
        environment: dict[str, str] | None = None,
        traces_on_disk: bool = False,
    ) -> None:
        self.folder = folder
        self.ports = ports or free_ports(list(FIXED))
        self.environment = environment or {}
        self.traces_on_disk = traces_on_disk
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def url(self, name: str) -> str:
        """Base URL of one of the ports."""
        return f"http://127.0.0.1:{self.ports[name]}"

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    def start(self, report: Callable[[str], None] = lambda _: None) -> "Stack":
        """Start everything, the destinations before the Collector, and wait until all of it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        services = self._services()
        for name, service in services.items():
            report(f"starting {name}")
            self._spawn(name, service)
        for name, service in services.items():
            self._wait(name, service)
            report(f"{name} answers")
        return self

    def kill(self, name: str) -> None:
        """End one of them as a crash does (SIGKILL)."""
        process = self.processes[name]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def restart(self, name: str) -> None:
        """Start one again that has ended, on the same ports and with the same data, and wait until it answers."""
        service = self._services()[name]
        self._spawn(name, service)
        self._wait(name, service)

    def stop(self) -> None:
        """Stop what was started, the Collector first, so that it can hand over what it has."""
        for process in reversed(list(self.processes.values())):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 15
        for process in self.processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.processes.clear()

    def __enter__(self) -> "Stack":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _services(self) -> dict[str, Service]:
        """What there is, in the order in which it is started."""
        python = sys.executable
        return {
            "mlflow": Service(
                [
                    *(python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.ports["mlflow"])),
                    *("--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db", "--workers", "1"),
                    *("--artifacts-destination", str(self.folder / "mlflow-artifacts")),
                ],
                {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                self.url("mlflow") + "/health",
            ),
            "jaeger": Service(
                [str(binary("jaeger")), *self._jaeger_configs()],
                {
                    "JAEGER_HTTP": self.address("jaeger"),
                    "JAEGER_GRPC": self.address("jaeger_grpc"),
                    "JAEGER_OTLP": self.address("jaeger_otlp"),
                    "JAEGER_HEALTH": self.address("jaeger_health"),
                    "JAEGER_FOLDER": str(self.folder / "jaeger"),
                    "OTEL_TRACES_SAMPLER": "always_off",  # its own traces would go to localhost:4317
                },
                self.url("jaeger") + "/api/v3/services",
            ),
            "prometheus": Service(
                [
                    str(binary("prometheus")),
                    f"--config.file={ROOT / 'deploy' / 'prometheus' / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={self.folder / 'prometheus'}",
                    f"--web.listen-address={self.address('prometheus')}",
                    "--web.enable-otlp-receiver",
                    "--enable-feature=exemplar-storage",
                ],
                {},
                self.url("prometheus") + "/-/ready",
            ),
            "bridge": Service(
                [
                    *(python, "-m", "verl_otel.cli", "bridge"),
                    *("--port", str(self.ports["bridge"]), "--mlflow", self.url("mlflow")),
                ],
                {},
                self.url("bridge") + "/healthz",
            ),
            "collector": Service(
                [str(binary("verl-otelcol")), "--config", str(ROOT / "collector" / "local.yaml")],
                {
                    "VERL_OTEL_LISTEN_GRPC": self.address("otlp_grpc"),
                    "VERL_OTEL_LISTEN_HTTP": self.address("otlp_http"),
                    "VERL_OTEL_HEALTH": self.address("collector_health"),
                    "VERL_OTEL_SELF_PORT": str(self.ports["collector_self"]),
                    "VERL_OTEL_QUEUE_FOLDER": str(self.folder / "queue"),
                    "JAEGER_OTLP": self.address("jaeger_otlp"),
                    "PROMETHEUS_URL": self.url("prometheus"),
                    "MLFLOW_BRIDGE_URL": self.url("bridge"),
                },
                self.url("collector_health"),
            ),
        }

    def _jaeger_configs(self) -> list[str]:
        files = ["jaeger.yaml", *(["on-disk.yaml"] if self.traces_on_disk else [])]
        return [word for file in files for word in ("--config", str(ROOT / "deploy" / "jaeger" / file))]

    def _spawn(self, name: str, service: Service) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "VERL_OTEL_", "TRACEPARENT"))}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                service.command,
                env={**inherited, **self.environment, **service.environment},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                start_new_session=True,
            )

    def _wait(self, name: str, service: Service, seconds: float = 120) -> None:
        url = service.health
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.processes[name].poll() is not None:
                break
            try:
                with urllib.request.urlopen(url, timeout=2) as response:
                    if response.status < 300:
                        return
            except (OSError, urllib.error.URLError):
                pass
            time.sleep(0.2)
        log = self.folder / f"{name}.log"
        tail = log.read_text(errors="replace")[-2000:]
        self.stop()
        raise RuntimeError(f"{name} does not answer at {url}; the end of {log}:\n{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("stack"), help="logs and data (default: ./stack)")
    parser.add_argument("--fixed-ports", action="store_true", help="the usual ports (4318, 16686, 9090, 5000, ...)")
    options = parser.parse_args()
    stack = Stack(options.folder.resolve(), dict(FIXED) if options.fixed_ports else None)
    for end in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(end, lambda *_: sys.exit(0))
    try:
        stack.start(lambda line: print(line, flush=True))
        print(f"send OTLP to  {stack.url('otlp_http')}   (OTEL_EXPORTER_OTLP_ENDPOINT)")
        for name in ("jaeger", "prometheus", "mlflow"):
            print(f"{name:<12}  {stack.url(name)}")
        sys.stdout.flush()
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        stack.stop()


if __name__ == "__main__":
    main()

"""The programs of the stack: how each is started, and where it answers when it is up."""

import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from verl_otel import config
from verl_otel.stack.configuration import COLLECTOR, DEPLOY, for_this_machine

if TYPE_CHECKING:
    from verl_otel.stack.stack import Stack

RELAY_TOKEN = "VERL_OTEL_RELAY_TOKEN"

Start = tuple[list[str], dict[str, str]]
"""A command, and environment variables for it."""


@dataclass(frozen=True)
class Service:
    """One program.

    Args:
        port: name of the port at which it is used.
        health: name of a port, and the path there that answers when it is up.
        start: how it is started.
    """

    port: str
    health: str
    start: "Callable[[Stack], Start]"


def _mlflow(stack: "Stack") -> Start:
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(stack.ports["mlflow"])]
    store = ["--backend-store-uri", f"sqlite:///{stack.folder}/mlflow.db"]
    artifacts = ["--artifacts-destination", str(stack.folder / "mlflow-artifacts")]
    return [*command, "--workers", "1", *store, *artifacts], {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def _jaeger(stack: "Stack") -> Start:
    files = ["jaeger.yaml", *(["on-disk.yaml"] if stack.traces_on_disk else [])]
    configurations = [word for file in files for word in ("--config", str(DEPLOY / "jaeger" / file))]
    return [str(stack.program("jaeger")), *configurations], {
        "JAEGER_HTTP": stack.address("jaeger"),
        "JAEGER_GRPC": stack.address("jaeger_grpc"),
        "JAEGER_OTLP": stack.address("jaeger_otlp"),
        "JAEGER_HEALTH": stack.address("jaeger_health"),
        "JAEGER_FOLDER": str(stack.folder / "jaeger"),
        "OTEL_TRACES_SAMPLER": "always_off",  # its own traces would go to localhost:4317
    }


def _prometheus(stack: "Stack") -> Start:
    addresses = {"collector:8888": stack.address("collector_self"), "alertmanager:9093": stack.address("alertmanager")}
    settings = yaml.safe_load(for_this_machine(DEPLOY / "prometheus" / "prometheus.yaml", addresses))
    settings["rule_files"] = [str(stack.rules)]
    return [
        str(stack.program("prometheus")),
        f"--config.file={_write(stack.folder / 'prometheus.yaml', yaml.safe_dump(settings))}",
        f"--storage.tsdb.path={stack.folder / 'prometheus'}",
        f"--web.listen-address={stack.address('prometheus')}",
        "--web.enable-otlp-receiver",
        # Without native-histograms, a Prometheus before 3.8 loses every batch with an exponential histogram in it.
        "--enable-feature=exemplar-storage,native-histograms",
    ], {}


def _alertmanager(stack: "Stack") -> Start:
    addresses = {"relay:4321": stack.address("relay")}
    settings = yaml.safe_load(for_this_machine(DEPLOY / "alertmanager" / "alertmanager.yaml", addresses))
    authorization = {"authorization": {"credentials_file": str(_relay_token(stack))}}
    for receiver in settings["receivers"]:
        for hook in receiver["webhook_configs"]:
            hook["http_config"] = authorization
    return [
        str(stack.program("alertmanager")),
        f"--config.file={_write(stack.folder / 'alertmanager.yaml', yaml.safe_dump(settings))}",
        f"--storage.path={stack.folder / 'alertmanager'}",
        f"--web.listen-address={stack.address('alertmanager')}",
        "--cluster.listen-address=",  # one alone; it would listen on all addresses
    ], {}


def _relay(stack: "Stack") -> Start:
    command = [sys.executable, "-m", "verl_otel.cli", "alert-relay", "--port", str(stack.ports["relay"])]
    configuration = ["--config", stack.relay] if stack.relay else []
    given = ("VERL_OTEL_RELAY_", config.CONTROL)  # of the robot, and where runs are asked
    variables = {name: value for name, value in os.environ.items() if name.startswith(given)}
    return [*command, *configuration], {**variables, RELAY_TOKEN: _relay_token(stack).read_text(encoding="utf-8")}


def _relay_token(stack: "Stack") -> Path:
    """The file with what Alertmanager says to the relay: one of this stack's own, which only its owner can read."""
    path = stack.folder / "relay-token"
    if not path.exists():
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32))
    return path


def _bridge(stack: "Stack") -> Start:
    command = [sys.executable, "-m", "verl_otel.cli", "bridge"]
    return [*command, "--port", str(stack.ports["bridge"]), "--mlflow", stack.url("mlflow")], {}


def _collector(stack: "Stack") -> Start:
    return [str(stack.program("verl-otelcol")), "--config", str(COLLECTOR / "local.yaml")], {
        "VERL_OTEL_LISTEN_GRPC": stack.address("otlp_grpc"),
        "VERL_OTEL_LISTEN_HTTP": stack.address("otlp_http"),
        "VERL_OTEL_HEALTH": stack.address("collector_health"),
        "VERL_OTEL_SELF_PORT": str(stack.ports["collector_self"]),
        "VERL_OTEL_QUEUE_FOLDER": str(stack.folder / "queue"),
        "JAEGER_OTLP": stack.address("jaeger_otlp"),
        "PROMETHEUS_URL": stack.url("prometheus"),
        "MLFLOW_BRIDGE_URL": stack.url("bridge"),
    }


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


SERVICES = {
    "mlflow": Service("mlflow", "mlflow/health", _mlflow),
    "jaeger": Service("jaeger", "jaeger/api/v3/services", _jaeger),
    "prometheus": Service("prometheus", "prometheus/-/ready", _prometheus),
    "alertmanager": Service("alertmanager", "alertmanager/-/ready", _alertmanager),
    "relay": Service("relay", "relay/healthz", _relay),
    "bridge": Service("bridge", "bridge/healthz", _bridge),
    "collector": Service("otlp_http", "collector_health/", _collector),
}
"""In the order in which they are started: the destinations before the Collector. `Stack.services` are those it has."""

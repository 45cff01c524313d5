"""The configurations of collector/ and deploy/, given to the real programs."""

import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from verl_otel.stack.binaries import binary
from verl_otel.stack.ports import free_ports

pytestmark = pytest.mark.stack

ROOT = Path(__file__).resolve().parents[2]
COLLECTOR = ROOT / "collector"
VARIANT = "variants/prometheus-scrape.yaml"


def collector_command(*arguments: str, files: tuple[str, ...]) -> list[str]:
    configs = [word for file in files for word in ("--config", str(COLLECTOR / file))]
    return [str(binary("verl-otelcol")), *arguments, *configs]


def environment(**variables: str) -> dict[str, str]:
    """This process' environment without what would configure a Collector, and with `variables`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "VERL_OTEL_", "JAEGER_", "PROMETHEUS_"))}
    return {**kept, **variables}


@pytest.mark.parametrize(
    "files",
    [("local.yaml",), ("agent.yaml",), ("gateway.yaml",), ("local.yaml", VARIANT), ("gateway.yaml", VARIANT)],
    ids=" + ".join,
)
def test_the_collector_accepts_its_configuration(files: tuple[str, ...], tmp_path: Path) -> None:
    command = collector_command("validate", files=files)
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_collector_refuses_a_wrong_configuration(tmp_path: Path) -> None:
    """`validate` is worth something: it finds a key that no component has."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((COLLECTOR / "local.yaml").read_text().replace("num_consumers", "number_of_consumers"))
    command = [str(binary("verl-otelcol")), "validate", "--config", str(wrong)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "number_of_consumers" in done.stderr


def check_prometheus_configuration(path: Path) -> None:
    command = [str(binary("promtool")), "check", "config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_its_configuration() -> None:
    check_prometheus_configuration(ROOT / "deploy" / "prometheus" / "prometheus.yaml")


def test_prometheus_accepts_the_scrape_job_of_the_readme(tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", (COLLECTOR / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (job,) = [block for block in blocks if "scrape_configs" in block]
    config = tmp_path / "prometheus.yaml"
    settings = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yaml").read_text())
    (scrape,) = yaml.safe_load(job)["scrape_configs"]
    settings["scrape_configs"].append(scrape)
    settings["rule_files"] = []  # beside it
    config.write_text(yaml.safe_dump(settings))
    check_prometheus_configuration(config)
    assert scrape["static_configs"][0]["targets"][0] in (COLLECTOR / VARIANT).read_text()


def test_the_scrape_variant_shows_the_labels_of_the_point_and_of_the_run(tmp_path: Path) -> None:
    ports = free_ports(["grpc", "http", "health", "self", "scrape"])
    address = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    variables = environment(
        VERL_OTEL_LISTEN_GRPC=address["grpc"],
        VERL_OTEL_LISTEN_HTTP=address["http"],
        VERL_OTEL_HEALTH=address["health"],
        VERL_OTEL_SELF_PORT=str(ports["self"]),
        VERL_OTEL_SCRAPE_LISTEN=address["scrape"],
    )
    with (tmp_path / "collector.log").open("wb") as log:
        command = collector_command(files=("local.yaml", VARIANT))
        process = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=log, stderr=log)
    try:
        wait_for(f"http://{address['health']}", "")
        send_a_gauge(f"http://{address['http']}/v1/metrics")
        text = wait_for(f"http://{address['scrape']}/metrics", "verl_training_step{")
    finally:
        process.terminate()
        process.wait(30)
    (series,) = [line for line in text.splitlines() if line.startswith("verl_training_step{")]
    assert dict(re.findall(r'(\w+)="([^"]*)"', series)) == {
        "job": "verl-worker",
        "instance": "one",
        "rank": "3",
        "stage": "update_actor",
        "model_type": "actor",
        "verl_run_id": "20260101-000000-abcdef",
        "verl_run_attempt": "2",
        "verl_process_role": "worker",
        "host_name": "node-1",
    }


def send_a_gauge(url: str) -> None:
    resource = Resource(
        {
            "service.name": "verl-worker",
            "service.instance.id": "one",
            "host.name": "node-1",
            "verl.run.id": "20260101-000000-abcdef",
            "verl.run.attempt": 2,
            "verl.process.role": "worker",
        }
    )
    provider = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter(url))], resource)
    gauge = provider.get_meter("test").create_gauge("verl.training.step")
    gauge.set(7, {"rank": 3, "stage": "update_actor", "model_type": "actor"})
    provider.shutdown()


def wait_for(url: str, content: str, seconds: float = 30) -> str:
    """The text at `url`, as soon as it has `content` in it."""
    deadline = time.monotonic() + seconds
    answer = "nothing"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                answer = response.read().decode()
            if content in answer:
                return answer
        except (OSError, urllib.error.URLError) as error:
            answer = str(error)
        time.sleep(0.1)
    raise AssertionError(f"{content!r} is not at {url}; last answer: {answer[:1000]}")

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
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.metrics.v1.metrics_pb2 import DataPointFlags
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from validators import validator

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


def combinations() -> list[tuple[str, ...]]:
    """Each Collector alone, and with each variant that goes over it: the first lines of a variant say over which."""
    collectors = ("local.yaml", "agent.yaml", "gateway.yaml")
    found: list[tuple[str, ...]] = [(collector,) for collector in collectors]
    for variant in sorted((COLLECTOR / "variants").glob("*.yaml")):
        comment = "".join(line for line in variant.read_text().splitlines(True) if line.startswith("#"))
        over = [collector for collector in collectors if collector in comment] or collectors
        found += [(collector, f"variants/{variant.name}") for collector in over]
    return found


CONTRIB_ONLY = {"variants/rollout-servers.yaml": "prometheus"}
"""Variants with a component that only otel/opentelemetry-collector-contrib has -> its type."""


@pytest.mark.parametrize("files", combinations(), ids=" + ".join)
def test_the_collector_accepts_its_configuration(files: tuple[str, ...], tmp_path: Path) -> None:
    command = collector_command("validate", files=files)
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    if files[-1] in CONTRIB_ONLY:
        (unknown,) = re.findall(r'unknown type: "(\w+)"', done.stderr)
        assert unknown == CONTRIB_ONLY[files[-1]]
    else:
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


@pytest.mark.parametrize("name", ["scrape-processes.yaml", "scrape-rollout-servers.yaml"])
def test_prometheus_accepts_the_scrape_jobs(name: str) -> None:
    check_prometheus_configuration(ROOT / "deploy" / "prometheus" / name)


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


@pytest.mark.parametrize("files", [("jaeger.yaml",), ("jaeger.yaml", "on-disk.yaml")], ids=" + ".join)
def test_jaeger_accepts_its_configuration(files: tuple[str, ...], tmp_path: Path) -> None:
    configs = [word for file in files for word in ("--config", str(ROOT / "deploy" / "jaeger" / file))]
    command = [str(binary("jaeger")), "validate", *configs]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["alertmanager.yaml", "other-receivers.yaml"])
def test_alertmanager_accepts_its_configuration(name: str) -> None:
    command = [str(binary("amtool")), "check-config", str(ROOT / "deploy" / "alertmanager" / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def compose(path: Path) -> subprocess.CompletedProcess[str]:
    # This version of the program knows no variable of its environment.
    command = [validator("compose"), "-no-interpolation", str(path)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)


def test_compose_accepts_its_file(tmp_path: Path) -> None:
    file = ROOT / "deploy" / "compose.yaml"
    done = compose(file)
    assert done.returncode == 0, done.stderr
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(file.read_text().replace("restart: unless-stopped", "restarts: unless-stopped", 1))
    assert "restarts" in compose(wrong).stderr


CHECKED = {
    "collector/*.yaml": "here, by the Collector; builder.yaml by building it; kustomization.yaml by test_kubernetes",
    "collector/variants/*.yaml": "here, by the Collector",
    "deploy/alertmanager/*.yaml": "here, by amtool",
    "deploy/compose.yaml": "here, by compose's library",
    "deploy/jaeger/*.yaml": "here, by Jaeger",
    "deploy/kubernetes/**/*.yaml": "test_kubernetes, by kustomize and the schemas",
    "deploy/prometheus/*.yaml": "here, by promtool; rules and their tests by promtool too, in the tests of the rules",
    "deploy/prometheus/alerts-test/*.yaml": "by promtool, in the tests of the rules",
    "deploy/grafana/**/*.yaml": "by the tests of the dashboards",
}
"""Which real program reads a file. A new file needs one too."""


def test_every_configuration_is_given_to_a_real_program() -> None:
    known = {path for pattern in CHECKED for path in ROOT.glob(pattern)}
    there = {path for folder in ("collector", "deploy") for path in (ROOT / folder).rglob("*.y*ml")}
    assert there and there <= known, sorted(map(str, there - known))


def test_the_scrape_variant_shows_the_labels_of_the_point_and_of_the_run_until_it_ends(tmp_path: Path) -> None:
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
        send_a_gauge(f"http://{address['http']}/v1/metrics", ended=True)
        wait_for(f"http://{address['scrape']}/metrics", "verl_training_step{", there=False)
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


def send_a_gauge(url: str, ended: bool = False) -> None:
    """One point of a gauge, or that its series has ended."""
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
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], resource, shutdown_on_exit=False)
    gauge = provider.get_meter("test").create_gauge("verl.training.step")
    gauge.set(7, {"rank": 3, "stage": "update_actor", "model_type": "actor"})
    found = reader.get_metrics_data()
    assert found is not None
    request = encode_metrics(found)
    if ended:
        (point,) = request.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points
        point.ClearField("as_int")
        point.flags = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
    headers = {"content-type": "application/x-protobuf"}
    urllib.request.urlopen(urllib.request.Request(url, request.SerializeToString(), headers), timeout=30).close()


def wait_for(url: str, content: str, seconds: float = 30, there: bool = True) -> str:
    """The text at `url`, as soon as it has `content` in it, or has it no more."""
    deadline = time.monotonic() + seconds
    answer = "nothing"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                answer = response.read().decode()
            if (content in answer) == there:
                return answer
        except (OSError, urllib.error.URLError) as error:
            answer = str(error)
        time.sleep(0.1)
    raise AssertionError(f"{content!r} is {'not ' * there}at {url}; last answer: {answer[:1000]}")

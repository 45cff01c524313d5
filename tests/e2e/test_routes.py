"""The opt-in routes of the Collector, with the real programs behind them (Kafka: test_kafka.py)."""

import os
import re
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from asking import eventually
from collectors import TO_FILES, Collector
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import DataPointFlags
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Status, StatusCode, set_span_in_context
from prometheus_server import Prometheus

from verl_otel.stack.binaries import binary
from verl_otel.stack.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.stack

VARIANTS = ROOT / "collector" / "variants"
BASES = {"to-kafka": ["agent.yaml"], "from-kafka": ["gateway.yaml"]}
ROUTES = ["sql", "influx", "clickhouse", "to-kafka", "from-kafka", "remote-write", "tail-sampling", "span-metrics"]
RESOURCE = {
    "service.name": "verl-trainer",
    "service.instance.id": "one",
    "host.name": "node-1",
    "verl.run.id": "run-a",
    "verl.run.attempt": 1,
    "verl.project.name": "gsm8k",
    "verl.experiment.name": "ppo",
    "verl.process.role": "trainer",
    "k8s.cluster.name": "east",
}


def validate(folder, *configs, **variables):
    command = [str(binary("verl-otelcol")), "validate"]
    for config in configs:
        command += ["--config", str(config)]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ROUTES)
def test_the_collector_accepts_the_variant(name, tmp_path):
    for base in BASES.get(name, ["local.yaml", "gateway.yaml"]):
        done = validate(tmp_path, VARIANTS.parent / base, VARIANTS / f"{name}.yaml")
        assert done.returncode == 0, done.stderr


def test_the_variants_can_be_given_together(tmp_path):
    files = [VARIANTS / f"{name}.yaml" for name in ROUTES if name != "to-kafka"]
    variables = {"VERL_OTEL_RECEIVER": "kafka", "KAFKA_BROKERS": "[a:9092,b:9092]"}
    done = validate(tmp_path, VARIANTS.parent / "gateway.yaml", *files, **variables)
    assert done.returncode == 0, done.stderr


def test_the_configurations_of_the_readme_are_accepted(tmp_path):
    readme = (VARIANTS.parent / "README.md").read_text()
    for name, base, variant in (("kafka-to", "agent", "to-kafka"), ("kafka-from", "gateway", "from-kafka")):
        (block,) = re.findall(rf"^```yaml\n(# {name}.*?)^```", readme, re.MULTILINE | re.DOTALL)
        (tmp_path / "more.yaml").write_text(block)
        configs = [VARIANTS.parent / f"{base}.yaml", VARIANTS / f"{variant}.yaml", "more.yaml"]
        done = validate(tmp_path, *configs, KAFKA_PASSWORD="secret")
        assert done.returncode == 0, done.stderr
    (endpoint,) = re.findall(r'--config "(yaml:exporters::otlp_http/prometheus::[^"]+)"', readme)
    done = validate(tmp_path, VARIANTS.parent / "gateway.yaml", endpoint)
    assert done.returncode == 0, done.stderr


# ---- Prometheus by remote write, and span metrics


@pytest.fixture
def prometheus(tmp_path):
    """With our configuration, taking remote write."""
    options = ("--web.enable-remote-write-receiver", "--web.enable-otlp-receiver", "--enable-feature=exemplar-storage")
    with Prometheus(tmp_path, ROOT / "deploy" / "prometheus" / "prometheus.yaml", *options) as prometheus:
        yield prometheus


class Gauge:
    """A process with the gauge of the training step: `with Gauge(url) as gauge: gauge.set(7)`."""

    def __init__(self, url):
        self._provider = MeterProvider(
            [PeriodicExportingMetricReader(OTLPMetricExporter(f"{url}/v1/metrics"), 1e9)], Resource(RESOURCE)
        )
        meter = self._provider.get_meter("verl_otel")
        self._gauge = meter.create_gauge("verl.training.step")
        self._duration = meter.create_histogram("verl.stage.duration", "s")

    def set(self, value):
        labels = {"rank": "all", "stage": "step", "model_type": "none"}
        self._gauge.set(value, labels)
        self._duration.record(value, labels)
        self._provider.force_flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._provider.shutdown()


def test_remote_write_gives_the_series_that_a_push_gives(prometheus, tmp_path):
    wanted = {}
    for way, files in (("push", ()), ("remote write", ("variants/remote-write.yaml",))):
        variables = {"PROMETHEUS_URL": prometheus.url, "REMOTE_WRITE_URL": f"{prometheus.url}/api/v1/write"}
        with Collector(tmp_path / way, "local.yaml", *files, **variables) as collector:
            value = "7" if way == "push" else "8"
            with Gauge(collector.url) as gauge:
                gauge.set(int(value))
            assert eventually(lambda value=value: [v[1] for _, v in prometheus.ask("verl_training_step")] == [value])
            wanted[way] = [labels for labels, _ in prometheus.ask('{__name__=~"verl_.+"}')]
    assert len(wanted["push"]) > 5  # the gauge, and the buckets of the histogram
    assert wanted["remote write"] == wanted["push"]


def test_remote_write_loses_nothing_while_the_store_is_away(prometheus, tmp_path):
    files = ("local.yaml", "variants/remote-write.yaml")
    with Collector(tmp_path / "c", *files, REMOTE_WRITE_URL=f"{prometheus.url}/api/v1/write") as collector:
        with Gauge(collector.url) as gauge:
            for step in range(1, 31):
                gauge.set(step)
                if step == 10:
                    prometheus.kill()
                if step == 20:
                    prometheus.start()
                time.sleep(0.1)

        def ask():
            return [float(value) for _, found in prometheus.ask("verl_training_step[10m]") for _, value in found]

        wanted = [*map(float, range(1, 31)), 30.0]  # the last once more, at the process' end
        eventually(lambda: ask() == wanted)
        assert ask() == wanted


class Trainer:
    """A process that makes the traces of steps."""

    def __init__(self, url):
        self.provider = TracerProvider(resource=Resource(RESOURCE), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(f"{url}/v1/traces")
        self.provider.add_span_processor(SimpleSpanProcessor(exporter))
        self._tracer = self.provider.get_tracer("verl_otel")
        self.late = {}

    def step(self, number, seconds=1.0, error=False, end=True, late=False):
        """A step with a stage, and a worker's call below it; returns the trace's id."""
        now = time.time_ns()
        stage_labels = {"rank": "all", "stage": "update", "model_type": "actor", "verl.timer": "update_actor"}
        step_labels = {"rank": "all", "stage": "step", "model_type": "none", "verl.timer": "step"}
        root = self._tracer.start_span(
            "verl.step", attributes={**step_labels, "verl.step.number": number}, start_time=now - int(seconds * 1e9)
        )
        below = set_span_in_context(root)
        stage = self._tracer.start_span("verl.update_actor", below, attributes=stage_labels, start_time=now - 10**8)
        worker = self._tracer.start_span("verl.worker.update_actor", set_span_in_context(stage), start_time=now - 10**8)
        if error:
            worker.set_status(Status(StatusCode.ERROR))
            stage.set_status(Status(StatusCode.ERROR))
        if late:
            self.late[number] = worker
        else:
            worker.end(now)
        stage.end(now)
        if end:
            root.end(now)
        return root.get_span_context().trace_id

    def other(self):
        span = self._tracer.start_span("verl.run")
        span.end()
        return span.get_span_context().trace_id


SOON = """
processors:
  tail_sampling:
    decision_wait_after_root_received: 1s
"""


def test_tail_sampling_keeps_what_failed_was_slow_has_no_end_and_each_nth(tmp_path):
    files = ("local.yaml", "variants/tail-sampling.yaml")
    variables = {"VERL_OTEL_KEEP_EACH": "5", "VERL_OTEL_KEEP_SLOWER_MS": "20000", "VERL_OTEL_STEP_MAX": "4s"}
    with Collector(tmp_path, *files, more=SOON + TO_FILES, **variables) as collector:
        trainer = Trainer(collector.url)
        traces = {number: trainer.step(number, late=number in (5, 6)) for number in range(1, 13)}
        traces |= {"slow": trainer.step(21, seconds=30), "failed": trainer.step(22, error=True)}
        traces |= {"killed": trainer.step(23, end=False), "set-up": trainer.other()}

        def kept():
            found = {}
            for span in collector.spans():
                # The file has hexadecimal, read as base64.
                found.setdefault(span.trace_id, set()).add(span.name)
            return found

        assert eventually(lambda: len(kept()) >= 6)
        for number in (5, 6):
            trainer.late[number].end()
        time.sleep(3)
        found = {int(to_hex(trace), 16): names for trace, names in kept().items()}
    wanted = {5, 10, "slow", "failed", "killed", "set-up"}
    assert {name for name, trace in traces.items() if trace in found} == wanted and len(found) == len(wanted)
    whole = {"verl.step", "verl.update_actor", "verl.worker.update_actor"}
    for name in (5, 10, "slow", "failed"):  # what is late follows the decision: of step 5 kept, of step 6 not
        assert found[traces[name]] == whole
    assert found[traces["killed"]] == whole - {"verl.step"}


def to_hex(trace_id):
    import base64

    return base64.b64encode(trace_id).decode()


def test_span_metrics_count_each_stage_once_and_no_sampled_span(prometheus, tmp_path):
    files = ("local.yaml", "variants/span-metrics.yaml", "variants/tail-sampling.yaml")
    quick = "connectors: {span_metrics: {metrics_flush_interval: 200ms}}"
    with Collector(tmp_path / "c", *files, more=quick, PROMETHEUS_URL=prometheus.url) as collector:
        trainer = Trainer(collector.url)
        for number in range(1, 8):
            trainer.step(number, error=number == 7)

        def calls():
            found = prometheus.ask("traces_span_metrics_calls_total")
            return {(labels["span_name"], labels["status_code"]): int(value[1]) for labels, value in found}

        wanted = {
            ("verl.step", "STATUS_CODE_UNSET"): 7,
            ("verl.update_actor", "STATUS_CODE_UNSET"): 6,
            ("verl.update_actor", "STATUS_CODE_ERROR"): 1,
        }
        eventually(lambda: calls() == wanted)
        assert calls() == wanted
        (duration,) = prometheus.ask('traces_span_metrics_duration_seconds_sum{span_name="verl.step"}')
        assert float(duration[1][1]) == pytest.approx(7.0)
        labels = {"verl_run_id": "run-a", "verl_run_attempt": "1", "stage": "step", "model_type": "none", "rank": "all"}
        assert {name: duration[0].get(name) for name in labels} == labels
        assert prometheus.ask("verl_stage_duration_seconds_count") == []  # ours is another metric


@pytest.mark.parametrize(("base", "variant"), [("agent", "to-kafka"), ("gateway", "from-kafka")])
def test_a_collector_starts_while_kafka_is_away(base, variant, tmp_path):
    nowhere = free_ports(["kafka"])["kafka"]
    files = (f"{base}.yaml", f"variants/{variant}.yaml")
    with Collector(tmp_path, *files, KAFKA_BROKERS=f"[127.0.0.1:{nowhere}]") as collector:
        time.sleep(2)
        assert collector.process.poll() is None, collector.log[-2000:]


def test_a_clickhouse_that_is_away_holds_up_nothing(tmp_path):
    """There is no ClickHouse here that the exporter knows: what is tested is that the others do not wait for it."""
    nowhere = free_ports(["clickhouse"])["clickhouse"]
    variables = {"CLICKHOUSE_URL": f"tcp://127.0.0.1:{nowhere}?dial_timeout=1s"}
    with Collector(tmp_path, "local.yaml", "variants/clickhouse.yaml", more=TO_FILES, **variables) as collector:
        Trainer(collector.url).step(1)
        assert eventually(lambda: len(collector.spans()) == 3)


def test_clickhouse_is_not_given_the_points_that_say_that_a_gauge_has_ended(tmp_path):
    """It would store them as 0. A file stands in for it."""
    to_file = TO_FILES.replace("metrics: {", "metrics/clickhouse: {").replace("traces: {", "traces/clickhouse: {")
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="verl.loss")
    for rank, value in (("0", 0.5), ("1", None)):
        point = metric.gauge.data_points.add(time_unix_nano=time.time_ns())
        point.attributes.add(key="rank").value.string_value = rank
        if value is None:
            point.flags = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
        else:
            point.as_double = value
    with Collector(tmp_path, "local.yaml", "variants/clickhouse.yaml", more=to_file) as collector:
        headers = {"content-type": "application/x-protobuf"}
        asked = urllib.request.Request(f"{collector.url}/v1/metrics", request.SerializeToString(), headers)
        urllib.request.urlopen(asked, timeout=10).close()
        (received,) = eventually(lambda: collector.received("metrics"))
    points = received.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points
    assert [point.as_double for point in points] == [0.5]

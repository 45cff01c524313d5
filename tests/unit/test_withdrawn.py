"""Series of gauges that have ended (`metrics/withdrawn.py`): one point without a value, so that nothing is shown."""

import json
import os
import subprocess
import sys
import textwrap
import time

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from verl_otel.config import Levels
from verl_otel.export import otlp_json, otlp_metrics, providers
from verl_otel.metrics import withdrawn as withdrawn_module
from verl_otel.metrics.instruments import Instruments
from verl_otel.metrics.withdrawn import Withdrawn
from verl_otel.semconv import metrics as names

RESOURCE = Resource({"service.name": "test", "verl.run.id": "run-1"})
LABELS = {"rank": "1", "stage": "update", "model_type": "actor"}
NO_RECORDED_VALUE = 1


class Pipeline:
    """Gauges, and what comes of them at each export."""

    def __init__(self):
        self.reader = InMemoryMetricReader()
        provider = MeterProvider([self.reader], RESOURCE, shutdown_on_exit=False)
        self.withdrawn = Withdrawn(RESOURCE, InstrumentationScope("verl_otel", "1"))
        self.instruments = Instruments(provider.get_meter("verl_otel", "1"), Levels({}), withdrawn=self.withdrawn)
        self.exported = {}

    def collect(self):
        return self.reader.get_metrics_data() or MetricsData([])

    def export(self, data=None, exporter=""):
        """As `points_of`, of what one exporter sends."""
        data = self.collect() if data is None else data
        data, self.exported[exporter] = self.withdrawn.extend(data, self.exported.get(exporter, 0))
        return points_of(otlp_metrics.encode(data))


def points_of(request):
    """(rank, value, time) of the points of the loss, in their order; a point without value has None."""
    found = []
    for metric in (m for group in request.resource_metrics for scope in group.scope_metrics for m in scope.metrics):
        for point in metric.gauge.data_points if metric.name == names.LOSS.name else ():
            (rank,) = (a.value.string_value for a in point.attributes if a.key == "rank")
            value = point.as_double if point.WhichOneof("value") else None
            assert (value is None) == (point.flags == NO_RECORDED_VALUE)
            found.append((rank, value, point.time_unix_nano))
    return found


def values(points):
    return [(rank, value) for rank, value, _ in points]


@pytest.fixture
def pipeline():
    return Pipeline()


def loss(rank):
    return {**LABELS, "rank": rank}


def test_a_series_that_ends_has_one_point_without_a_value_and_the_others_go_on(pipeline):
    pipeline.instruments.set(names.LOSS, loss("0"), 1.0)
    pipeline.instruments.set(names.LOSS, loss("1"), 2.0)
    assert values(pipeline.export()) == [("0", 1.0), ("1", 2.0)]
    pipeline.instruments.withdraw(names.LOSS, loss("1"))
    pipeline.instruments.withdraw(names.LOSS, loss("1"))
    assert values(pipeline.export()) == [("0", 1.0), ("1", None)]
    assert values(pipeline.export()) == [("0", 1.0)]


def test_it_is_the_same_series_at_the_time_of_its_end(pipeline):
    pipeline.instruments.set(names.LOSS, LABELS, 2.0)
    (of_value,) = otlp_metrics.encode(pipeline.collect()).resource_metrics
    before = time.time_ns()
    pipeline.instruments.withdraw(names.LOSS, LABELS)
    after = time.time_ns()
    data, _ = pipeline.withdrawn.extend(MetricsData([]), 0)
    (of_end,) = otlp_metrics.encode(data).resource_metrics
    assert (of_end.resource, of_end.scope_metrics[0].scope) == (of_value.resource, of_value.scope_metrics[0].scope)
    (good,), (end,) = of_value.scope_metrics[0].metrics, of_end.scope_metrics[0].metrics
    assert (end.name, end.unit, end.description) == (good.name, good.unit, good.description)
    (point,) = end.gauge.data_points
    assert sorted(a.SerializeToString() for a in point.attributes) == sorted(
        a.SerializeToString() for a in good.gauge.data_points[0].attributes
    )
    assert before < point.time_unix_nano <= after + 1_000_000
    assert point.time_unix_nano // 1_000_000 > good.gauge.data_points[0].time_unix_nano // 1_000_000
    assert not point.WhichOneof("value")


def test_a_series_that_has_a_value_again_before_the_export_has_not_ended(pipeline):
    pipeline.instruments.set(names.LOSS, LABELS, 1.0)
    pipeline.export()
    pipeline.instruments.withdraw(names.LOSS, LABELS)
    pipeline.instruments.set(names.LOSS, LABELS, 3.0)
    assert values(pipeline.export()) == [("1", 3.0)]
    pipeline.instruments.withdraw(names.LOSS, LABELS)
    assert values(pipeline.export()) == [("1", None)]


def test_a_series_that_comes_and_ends_again_before_the_export_has_ended(pipeline):
    pipeline.instruments.set(names.LOSS, LABELS, 1.0)
    pipeline.export()
    pipeline.instruments.withdraw(names.LOSS, LABELS)
    pipeline.instruments.set(names.LOSS, LABELS, 3.0)
    pipeline.instruments.withdraw(names.LOSS, LABELS)
    assert values(pipeline.export()) == [("1", None)]
    assert pipeline.export() == []


def test_of_a_series_that_nobody_has_seen_no_end_is_told(pipeline):
    """Such as a stage that is shorter than the time between two exports."""
    pipeline.instruments.set(names.LOSS, LABELS, 1.0)
    pipeline.instruments.withdraw(names.LOSS, LABELS)
    assert pipeline.export() == []


def test_an_end_after_the_collection_comes_after_the_value_that_was_collected(pipeline):
    pipeline.instruments.set(names.LOSS, LABELS, 1.0)
    data = pipeline.collect()
    pipeline.instruments.withdraw(names.LOSS, LABELS)
    (_, value, seen), (_, none, end) = pipeline.export(data)
    assert (value, none) == (1.0, None)
    assert end // 1_000_000 > seen // 1_000_000


def test_the_sdk_may_take_the_time_of_a_value_only_after_its_end(pipeline):
    """Points have the time at which all callbacks are through."""
    pipeline.instruments.set(names.LOSS, LABELS, 1.0)

    def ends():
        pipeline.instruments.withdraw(names.LOSS, LABELS)
        time.sleep(0.01)
        return {"x": 1.0}

    pipeline.instruments.observe(names.FAILURES, ends, "verl.otel.site")
    points = pipeline.export()
    assert values(points) == [("1", 1.0), ("1", None)]
    assert points[1][2] // 1_000_000 > points[0][2] // 1_000_000


def test_each_exporter_gets_each_end_once(pipeline):
    pipeline.instruments.set(names.LOSS, LABELS, 1.0)
    pipeline.export()
    pipeline.instruments.withdraw(names.LOSS, LABELS)
    assert values(pipeline.export(exporter="a")) == values(pipeline.export(exporter="b")) == [("1", None)]
    assert pipeline.export(exporter="a") == pipeline.export(exporter="b") == []


def test_too_many_ends_that_are_told_to_nobody_are_counted(pipeline, monkeypatch):
    monkeypatch.setattr(withdrawn_module, "MAX_SERIES", 2)

    def end(count):
        for rank in range(count):
            pipeline.instruments.set(names.LOSS, loss(str(rank)), 1.0)
        pipeline.collect()
        for rank in range(count):
            pipeline.instruments.withdraw(names.LOSS, loss(str(rank)))

    end(2)
    assert len(pipeline.export()) == 2
    end(2)  # in the place of those that were told
    assert len(pipeline.export()) == 2
    end(5)
    dropped = [
        (dict(point.attributes), point.value)
        for group in pipeline.collect().resource_metrics
        for metric in group.scope_metrics[0].metrics
        if metric.name == "verl.otel.dropped"
        for point in metric.data.data_points
    ]
    assert dropped == [({"verl.otel.signal": "metrics", "verl.otel.reason": "too_many_withdrawn"}, 3)]
    assert len(pipeline.withdrawn._ended) == 2


def test_without_a_meter_provider_of_ours_nothing_is_kept(memory):
    assert memory.process().instruments._withdrawn is None


class Other(MetricExporter):
    """An exporter of somebody else, which cannot encode a point without a value."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.result = MetricExportResult.SUCCESS

    def export(self, metrics_data, timeout_millis=10_000, **kwargs):
        self.seen.append(metrics_data)
        return self.result

    def force_flush(self, timeout_millis=10_000):
        return True

    def shutdown(self, timeout_millis=30_000, **kwargs):
        pass


@pytest.fixture
def ended(pipeline, monkeypatch):
    """A series has ended, and the exporters of a process will say so."""
    monkeypatch.setattr(providers, "_extend", lambda data: data)
    monkeypatch.setattr(providers, "_add_withdrawn", pipeline.withdrawn.extend)
    pipeline.instruments.set(names.LOSS, LABELS, 1.0)
    pipeline.collect()
    pipeline.instruments.withdraw(names.LOSS, LABELS)


@pytest.mark.usefixtures("ended")
def test_only_exporters_that_can_encode_such_points_are_given_them():
    other = Other()
    providers._Extended(other).export(MetricsData([]))
    assert other.seen == [MetricsData([])]


@pytest.mark.usefixtures("ended")
def test_an_export_that_fails_is_made_up_for_by_the_next():
    other = Other()
    other.says_what_ends, other.result = True, MetricExportResult.FAILURE
    exporter = providers._Extended(other)
    exporter.export(MetricsData([]))
    other.result = MetricExportResult.SUCCESS
    exporter.export(MetricsData([]))
    exporter.export(MetricsData([]))
    assert [values(points_of(otlp_metrics.encode(data))) for data in other.seen] == [[("1", None)], [("1", None)], []]


# ---- through the providers of a process -----------------------------------------------------------------------------

SCRIPT = """
    from verl_otel import telemetry
    from verl_otel.semconv import metrics as names
    telemetry.enable()
    t = telemetry.current()
    labels = {"rank": "1", "stage": "update", "model_type": "actor"}
    t.instruments.set(names.LOSS, labels, 1.0)
    t.providers.meter.force_flush()
    t.instruments.withdraw(names.LOSS, labels)
    t.providers.meter.force_flush()
    t.providers.meter.force_flush()
    t.close()
"""


def run(tmp_path, **environ):
    environ = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "VERL_OTEL_"))},
        "VERL_OTEL_FOLDER": str(tmp_path),
        "OTEL_METRIC_EXPORT_INTERVAL": "3600000",
        **environ,
    }
    subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], env=environ, check=True, timeout=60)


def test_a_recording_has_it_as_json_once(tmp_path):
    run(tmp_path, OTEL_METRICS_EXPORTER="verl_otel_file")
    points = [
        {key: point[key] for key in ("asDouble", "flags") if key in point}
        for file in tmp_path.rglob("*.metrics.jsonl")
        for line in file.read_text().splitlines()
        for group in json.loads(line)["resourceMetrics"]
        for scope in group["scopeMetrics"]
        for metric in scope["metrics"]
        if metric["name"] == "verl.loss"
        for point in metric["gauge"]["dataPoints"]
    ]
    assert points == [{"asDouble": 1.0}, {"flags": NO_RECORDED_VALUE}]


def test_an_endpoint_gets_it_once_also_after_an_outage(tmp_path, server):
    server.fault = "503"
    run(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=server.url, OTEL_EXPORTER_OTLP_TIMEOUT="2")
    spooled = [otlp_json.from_line(line) for f in tmp_path.rglob("*.jsonl") for line in f.read_bytes().splitlines()]
    requests = [found[1] for found in spooled if found is not None and found[0] == "metrics"]
    assert [value for request in requests for _, value, _ in points_of(request)] == [1.0, None]


def test_an_endpoint_gets_it_once(tmp_path, server):
    run(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=server.url)
    requests = [otlp_json.from_bytes(signal, content) for signal, content in server.taken if signal == "metrics"]
    assert [value for request in requests for _, value, _ in points_of(request)] == [1.0, None]

"""Histograms of many values at once (`metrics/distributions.py`): the same as the SDK would have made of each value."""

import json
import math
import os
import subprocess
import sys
import textwrap

import numpy
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from verl_otel.metrics import distributions as distributions_module
from verl_otel.metrics.distributions import Distributions
from verl_otel.semconv import metrics as names

LABELS = (("model_type", "reward"), ("rank", "all"), ("stage", "reward"))
BOUNDS = names.REWARD_SCORE.boundaries

# The SDK's histograms refuse negative values, which rewards and advantages have.
values = st.floats(0, 1e9) | st.sampled_from([bound for bound in BOUNDS if bound >= 0])


@pytest.fixture
def made():
    return new()


def new():
    return Distributions(Resource({"service.name": "test"}), InstrumentationScope("verl_otel", "1"))


def points_of(data):
    return {
        metric.name: list(metric.data.data_points)
        for of_resource in data.resource_metrics
        for of_scope in of_resource.scope_metrics
        for metric in of_scope.metrics
    }


def point_of(made, metric=names.REWARD_SCORE):
    (point,) = points_of(made.extend(MetricsData([])))[metric.name]
    return point


def by_the_sdk(metric, numbers):
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("test")
    histogram = meter.create_histogram(*metric.arguments, explicit_bucket_boundaries_advisory=metric.boundaries)
    for number in numbers:
        histogram.record(number, dict(LABELS))
    (point,) = points_of(reader.get_metrics_data())[metric.name]
    return point


@given(st.lists(st.lists(values, min_size=1, max_size=30), min_size=1, max_size=4))
@example([[bound for bound in BOUNDS if bound >= 0]])
@example([[0.0, -0.0, math.nextafter(1.0, 0), 1.0, math.nextafter(1.0, 2)], [0.0]])
def test_the_point_is_the_one_that_the_sdk_makes_value_by_value(arrays):
    made = new()
    for array in arrays:
        assert made.record(names.REWARD_SCORE, LABELS, numpy.asarray(array))
    ours, theirs = point_of(made), by_the_sdk(names.REWARD_SCORE, [value for array in arrays for value in array])
    assert list(ours.bucket_counts) == list(theirs.bucket_counts)
    assert list(ours.explicit_bounds) == list(theirs.explicit_bounds)
    assert (ours.count, ours.min, ours.max) == (theirs.count, theirs.min, theirs.max)
    assert ours.sum == pytest.approx(theirs.sum, rel=1e-9, abs=1e-6)
    assert dict(ours.attributes) == dict(theirs.attributes)


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.float64, numpy.int64])
def test_arrays_of_any_type_are_counted_as_numpy_counts_them(made, dtype):
    array = numpy.concatenate([numpy.random.default_rng(7).normal(0, 4, 5000), BOUNDS]).astype(dtype)
    made.record(names.REWARD_SCORE, LABELS, array)
    point, bounds = point_of(made), BOUNDS
    # numpy's buckets are closed below, OpenTelemetry's above: count those of the negated values
    edges = [-math.inf, *(-bound for bound in reversed(bounds)), math.inf]
    counts, _ = numpy.histogram(-array.astype(float), edges)
    assert list(point.bucket_counts) == counts[::-1].tolist()
    assert point.sum == pytest.approx(float(array.astype(float).sum()))
    assert (point.min, point.max) == (float(array.min()), float(array.max()))


def test_points_are_cumulative_since_one_start(made):
    made.record(names.REWARD_SCORE, LABELS, numpy.asarray([1.0]))
    first = point_of(made)
    made.record(names.REWARD_SCORE, LABELS, numpy.asarray([2.0, 3.0]))
    second = point_of(made)
    assert (first.count, first.sum, second.count, second.sum) == (1, 1.0, 3, 6.0)
    assert sum(first.bucket_counts) == 1  # what was exported is not changed
    assert first.start_time_unix_nano == second.start_time_unix_nano < first.time_unix_nano <= second.time_unix_nano


def test_series_of_a_metric_are_kept_apart(made):
    for rank in ("0", "1"):
        made.record(names.GENERATE_DURATION, (("rank", rank),), numpy.asarray([float(rank) + 1]))
    points = points_of(made.extend(MetricsData([])))["verl.generate.duration"]
    assert {point.attributes["rank"]: point.sum for point in points} == {"0": 1.0, "1": 2.0}


def test_too_many_series_are_refused_and_those_that_are_there_go_on(made, monkeypatch):
    monkeypatch.setattr(distributions_module, "MAX_SERIES", 2)
    one = numpy.asarray([1.0])
    assert made.record(names.REWARD_SCORE, (("rank", "0"),), one)
    assert made.record(names.REWARD_VALUE, (("rank", "0"),), one)
    assert not made.record(names.REWARD_SCORE, (("rank", "1"),), one)
    assert made.record(names.REWARD_SCORE, (("rank", "0"),), one)
    found = points_of(made.extend(MetricsData([])))
    assert {name: [point.count for point in points] for name, points in found.items()} == {
        "verl.reward.score": [2],
        "verl.reward.value": [1],
    }


def test_nothing_is_added_where_nothing_was_recorded(made):
    data = MetricsData([])
    assert made.extend(data) is data


def test_what_the_sdk_has_collected_stays(made):
    reader = InMemoryMetricReader()
    MeterProvider([reader], shutdown_on_exit=False).get_meter("test").create_counter("theirs").add(1)
    made.record(names.REWARD_SCORE, LABELS, numpy.asarray([1.0]))
    assert list(points_of(made.extend(reader.get_metrics_data()))) == ["theirs", "verl.reward.score"]


def test_the_points_can_be_sent_and_read_back(made):
    made.record(names.REWARD_SCORE, LABELS, numpy.asarray([-1.0, 0.0, 1.0, 1.0, 250.0]))
    sent = encode_metrics(made.extend(MetricsData([]))).SerializeToString()
    (of_resource,) = ExportMetricsServiceRequest.FromString(sent).resource_metrics
    (of_scope,) = of_resource.scope_metrics
    (metric,) = of_scope.metrics
    (point,) = metric.histogram.data_points
    assert [(a.key, a.value.string_value) for a in of_resource.resource.attributes] == [("service.name", "test")]
    assert (of_scope.scope.name, of_scope.scope.version) == ("verl_otel", "1")
    assert (metric.name, metric.unit, metric.description) == names.REWARD_SCORE.arguments
    assert metric.histogram.aggregation_temporality == 2  # cumulative
    assert (point.count, point.sum, point.min, point.max) == (5, 251.0, -1.0, 250.0)
    expected = [0] * (len(BOUNDS) + 1)
    for value in (-1.0, 0.0, 1.0, 1.0, 250.0):
        expected[sum(bound < value for bound in BOUNDS)] += 1
    assert list(point.bucket_counts) == expected
    assert list(point.explicit_bounds) == list(BOUNDS)


def run(script, folder, **environ):
    """Run a script as a process of a run that records to files; returns the requests of each file, by its kind."""
    environ = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "VERL_OTEL_"))},
        "VERL_OTEL_FOLDER": str(folder),
        "OTEL_METRIC_EXPORT_INTERVAL": "3600000",
        **environ,
    }
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environ, check=True, timeout=60)
    lines = (line for file in folder.rglob("*.jsonl") for line in file.read_text().splitlines())
    return [json.loads(line) for line in lines]


def exported(requests, name):
    """The points of a metric, one list for each export."""
    return [
        [point for metric in metrics for point in metric["histogram"]["dataPoints"]]
        for request in requests
        for of_resource in request.get("resourceMetrics", ())
        for of_scope in of_resource["scopeMetrics"]
        if (metrics := [metric for metric in of_scope["metrics"] if metric["name"] == name])
    ]


def test_through_the_providers_a_histogram_is_once_in_each_export_and_cumulative(tmp_path):
    requests = run(
        """
        import numpy
        from verl_otel import telemetry
        from verl_otel.semconv import metrics as names
        telemetry.enable()
        t = telemetry.current()
        labels = {"rank": "all", "stage": "reward", "model_type": "reward"}
        t.instruments.record_all(names.REWARD_SCORE, labels, numpy.asarray([1.0, 2.0]))
        t.providers.meter.force_flush()
        t.instruments.record_all(names.REWARD_SCORE, labels, numpy.asarray([4.0]))
        t.providers.meter.force_flush()
        t.close()
        """,
        tmp_path,
        OTEL_METRICS_EXPORTER="verl_otel_file",
    )
    exports = exported(requests, "verl.reward.score")
    assert len(exports) >= 2
    assert all(len(points) == 1 for points in exports)
    figures = [(int(points[0]["count"]), points[0]["sum"]) for points in exports]
    assert figures[:2] == [(2, 3.0), (3, 7.0)]
    assert set(figures[2:]) <= {(3, 7.0)}
    resources = [r["resource"]["attributes"] for request in requests for r in request.get("resourceMetrics", ())]
    assert len({json.dumps(attributes, sort_keys=True) for attributes in resources}) == 1

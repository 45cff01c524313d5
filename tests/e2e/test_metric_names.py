"""The registry's metrics through the real Collector to the real Prometheus: the names that they have there."""

import math
from pathlib import Path

import pytest
from asking import eventually, prometheus

from verl_otel.semconv import registry

pytestmark = [pytest.mark.stack]

GOLDEN = Path(__file__).parent / "data" / "prometheus_names.txt"
RUN_ID = "metric-names"
OTEL_NAME = "otel.name"
"""An attribute of this test's points: the name that the series had before."""


def send_a_point_of_each(stack, metrics):
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    exporter = OTLPMetricExporter(stack.url("otlp_http") + "/v1/metrics")
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)
    resource = Resource({"service.name": "verl-trainer", "verl.run.id": RUN_ID})
    provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    meter = provider.get_meter("test")
    for metric in metrics:
        labels = {"rank": "all", "stage": metric.stage, "model_type": metric.model_type, OTEL_NAME: metric.name}
        if metric.instrument == "gauge":
            meter.create_gauge(*metric.arguments).set(1, labels)
        elif metric.instrument == "updowncounter":
            meter.create_up_down_counter(*metric.arguments).add(1, labels)
        elif metric.instrument == "counter":
            meter.create_counter(*metric.arguments).add(1, labels)
        else:
            histogram = meter.create_histogram(
                *metric.arguments, explicit_bucket_boundaries_advisory=list(metric.boundaries)
            )
            histogram.record(1, labels)
    assert provider.force_flush()
    provider.shutdown()


def names_in_prometheus(stack):
    """otel name -> the names of its series."""
    selector = f'{{verl_run_id="{RUN_ID}",otel_name!=""}}'
    found = {}
    for series in prometheus(stack, f"count by (__name__, otel_name) ({selector})"):
        found.setdefault(series["metric"]["otel_name"], set()).add(series["metric"]["__name__"])
    return found


def test_each_metric_has_the_name_in_prometheus_that_is_written_down(stack, tmp_path):
    metrics = registry.load().metrics
    send_a_point_of_each(stack, metrics.values())
    eventually(lambda: names_in_prometheus(stack).keys() == metrics.keys())
    lines = []
    for name, series in sorted(names_in_prometheus(stack).items()):
        if metrics[name].instrument == "histogram":
            (base,) = {one.rpartition("_")[0] for one in series}
            assert series == {f"{base}_bucket", f"{base}_count", f"{base}_sum"}
        else:
            (base,) = series
        lines.append(f"{name} {base}\n")
    written = tmp_path / GOLDEN.name
    written.write_text("".join(lines))
    assert written.read_text() == GOLDEN.read_text(), f"if it is meant: cp {written} {GOLDEN}"

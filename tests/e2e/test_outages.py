"""A run goes on while each backend, and then the Collector, is killed for some seconds: count what arrives.

What the run could not send to the killed Collector before it ended is in its spool, and is sent by `verl-otel replay`.
"""

import itertools
import os
import subprocess
import sys
import threading
import time
import urllib.request

import bed
import pytest
import requests
from asking import eventually, get, prometheus
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from steady import PER_SECOND, steady_trainer

from verl_otel.stack.stack import Stack

pytestmark = [pytest.mark.run, pytest.mark.stack]

AWAY = float(os.environ.get("VERL_OTEL_TEST_AWAY", 10))
"""Seconds for which each is away; 60 for the full measurement."""

LATE = 60 + 5 * AWAY
"""Seconds within which MLflow, the slowest, has caught up."""

BETWEEN = 2.0
HOUR = 3600


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with Stack(tmp_path_factory.mktemp("outages"), traces_on_disk=True) as stack:
        yield stack


@pytest.fixture(scope="module")
def trained(stack, tmp_path_factory):
    """Number of steps of a run during which everything was killed and came back."""
    folder = tmp_path_factory.mktemp("steady")
    with steady_trainer(folder, stack.url("otlp_http")) as end:
        assert eventually(lambda: steps_in_prometheus(stack), 240), (folder / "run.log").read_text()
        for names in (["jaeger"], ["prometheus"], ["mlflow", "bridge"], ["collector"]):
            for name in names:
                stack.kill(name)
            time.sleep(AWAY / 2)
            if names == ["jaeger"]:
                assert_up_to_date(stack)
            time.sleep(AWAY / 2)
            if names == ["mlflow", "bridge"]:  # MLflow takes long to start, and the run does not wait for it
                late = threading.Thread(target=stack.restart, args=names)
                late.start()
            else:
                stack.restart(*names)
            time.sleep(BETWEEN)
        time.sleep(BETWEEN)
        steps = end()
        late.join()
    assert steps > 3 * AWAY * PER_SECOND
    replay = [sys.executable, "-m", "verl_otel.cli", "replay", str(folder / "verl-otel")]
    subprocess.run([*replay, "--endpoint", stack.url("otlp_http")], env=bed.clean_environment(), check=True, timeout=60)
    return steps


def samples(stack, series, window="30m"):
    """[[time, value], ...] of a series as it was pushed."""
    found = prometheus(stack, f"{series}[{window}]")
    return [(time, float(value)) for result in found for time, value in result["values"]]


def steps_in_prometheus(stack):
    return {int(value) for _, value in samples(stack, 'verl_training_step{verl_run_id="steady"}')}


def assert_up_to_date(stack):
    """Prometheus has what was logged some seconds ago: it does not wait for a destination that is away."""
    newest = max(time for time, _ in samples(stack, 'verl_training_step{verl_run_id="steady"}'))
    assert time.time() - newest < 3


def missing(wanted, found):
    return sorted(set(range(1, wanted + 1)) - set(found))


def test_every_step_is_in_jaeger_whole(stack, trained):
    def ask():
        query = {"service": "verl-launcher", "operation": "verl.step", "limit": 5000, "lookback": "1h"}
        traces = get(stack.url("jaeger") + "/api/traces", **query)["data"]
        return sorted(sorted(span["operationName"] for span in trace["spans"]) for trace in traces)

    wanted = [["verl.step", "verl.update_actor"]] * trained
    eventually(lambda: ask() == wanted)
    assert ask() == wanted


def test_every_step_event_and_trace_is_in_mlflow_once(stack, trained):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(stack.url("mlflow"))

    def ask():
        experiment = client.get_experiment_by_name("outages")
        (run,) = client.search_runs([experiment.experiment_id])
        return run if run.info.status == "FINISHED" else None

    run = eventually(ask, LATE)
    assert run, "the run has not ended in MLflow"
    history = eventually(lambda: whole(client.get_metric_history(run.info.run_id, "actor/loss"), trained), LATE)
    assert [(metric.step, metric.value) for metric in history] == [(n, n / 7) for n in range(1, trained + 1)]
    traces = eventually(lambda: whole(traces_of(stack, run), trained), LATE)
    assert len(traces) == trained and {trace.info.state.name for trace in traces} == {"OK"}


def whole(found, wanted):
    return found if len(found) >= wanted else []


def traces_of(stack, run):
    import mlflow

    mlflow.set_tracking_uri(stack.url("mlflow"))
    try:
        return mlflow.search_traces(
            locations=[run.info.experiment_id],
            run_id=run.info.run_id,
            return_type="list",
            include_spans=False,
            max_results=5000,
        )
    finally:
        mlflow.set_tracking_uri(None)


def test_the_points_are_in_prometheus_with_their_own_times(stack, trained):
    """A gauge has one value at each export, and so now and then not that of a step; an outage would be a hole."""

    def holes():
        left = missing(trained, steps_in_prometheus(stack))
        return [step for step in left if step + 1 in left]

    eventually(lambda: not holes())
    assert holes() == []
    assert len(missing(trained, steps_in_prometheus(stack))) < 0.05 * trained
    times = {}
    for at, value in samples(stack, 'verl_training_step{verl_run_id="steady"}'):
        times.setdefault(int(value), at)
    # Not the time at which it was back: the steps keep their rhythm through every outage.
    ordered = [times[step] for step in sorted(times)]
    assert max(after - before for before, after in itertools.pairwise(ordered)) < 3


def test_what_is_too_late_for_prometheus_costs_only_itself(stack):
    """A day (out_of_order_time_window) before the newest point of all. Prometheus would refuse the whole request."""
    now = time.time()
    push(stack, "test.late", [("one", now)])
    assert eventually(lambda: samples(stack, "test_late"))
    late = [("one", now - 22 * HOUR), ("one", now - 25 * HOUR), ("new", now - 22 * HOUR), ("newer", now - 25 * HOUR)]
    push(stack, "test.late", [*late, ("no time", 0), ("last", now + 1)])

    def hours(series):
        return sorted(round((now - at) / HOUR) for at, _ in samples(stack, f"test_late{{series='{series}'}}", "30h"))

    assert eventually(lambda: hours("last"))
    assert [hours(series) for series in ("one", "new", "newer", "no time")] == [[0, 22], [22], [], []]


def push(stack, name, points):
    """Points of a gauge, (label, time), in one request to the Collector."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name=name)
    for series, at in points:
        point = metric.gauge.data_points.add(time_unix_nano=int(at * 1e9), as_double=1.0)
        point.attributes.add(key="series").value.string_value = series
    answer = requests.post(
        stack.url("otlp_http") + "/v1/metrics",
        data=request.SerializeToString(),
        headers={"content-type": "application/x-protobuf"},
        timeout=10,
    )
    assert answer.status_code == 200


LARGE = """
from opentelemetry import trace
from verl.utils.profiler import marked_timer
from verl.utils.tracking import Tracking

Tracking("outages", "large", default_backend=["console"], config={})
with marked_timer("step", {}):
    pass
tracer = trace.get_tracer("user")
for number in range(200):
    tracer.start_span("large", attributes={"text": "x" * 100_000, "number": number}).end()
"""


def test_spans_with_large_texts_all_arrive_cut(stack, tmp_path):
    """200 times 100 KB, by gRPC from the Collector to Jaeger, which takes 4 MiB in one message."""
    environment = bed.clean_environment(OTEL_EXPORTER_OTLP_ENDPOINT=stack.url("otlp_http"))
    command = [bed.INSTRUMENT, sys.executable, "-c", LARGE]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60)

    def ask():
        query = {"service": "verl-launcher", "operation": "large", "limit": 1000, "lookback": "1h"}
        traces = get(stack.url("jaeger") + "/api/traces", **query)["data"]
        spans = [span for trace in traces for span in trace["spans"]]
        return [{tag["key"]: tag["value"] for tag in span["tags"]} for span in spans]

    eventually(lambda: len(ask()) >= 200)
    found = ask()
    assert sorted(tags["number"] for tags in found) == list(range(200))
    assert {len(tags["text"]) for tags in found} == {4096}


def test_nothing_was_given_up_by_the_collector(stack, trained):
    with urllib.request.urlopen(f"{stack.url('collector_self')}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    failed = [line for line in lines if "enqueue_failed" in line and not line.startswith("#") and line[-2:] != " 0"]
    assert failed == []

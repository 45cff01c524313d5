"""PPO with critic and reference through the real Collector to the real Jaeger, Prometheus and MLflow."""

import json
import math
import signal
import time
import urllib.error
import urllib.request

import pytest
from asking import eventually, get, prometheus
from trees import STAGES_OF_PPO, assert_complete_ppo_step, assert_trajectories, root, step_traces, unnamed_share

from verl_otel.bridges.mlflow.runs import metric_name
from verl_otel.recording.reader import Span

pytestmark = [pytest.mark.run, pytest.mark.stack]


@pytest.fixture(scope="module")
def jaeger(stack, ppo_run):
    """Every span that Jaeger has of the run, as its query API gives them."""

    def ask():
        spans = []
        services = get(stack.url("jaeger") + "/api/services")["data"]
        for trace in get(stack.url("jaeger") + "/api/traces?service=verl-trainer&limit=100&lookback=2h")["data"]:
            found = [_span(span, trace["processes"]) for span in trace["spans"]]
            spans += [span for span in found if span.resource["verl.run.id"] == "ppo-run"]
        complete = len([s for s in spans if s.name == "verl.step"]) == 3 and "verl-launcher" in services
        return spans if complete and any(s.name == "verl.run" for s in spans) else None

    spans = eventually(ask)
    assert spans, "Jaeger does not have the steps"
    time.sleep(2)
    return ask()


def _span(span, processes):
    process = processes[span["processID"]]
    tags = {tag["key"]: tag["value"] for tag in span["tags"]}
    parents = [r["spanID"] for r in span["references"] if r["refType"] == "CHILD_OF"]
    return Span(
        trace_id=span["traceID"],
        span_id=span["spanID"],
        parent_id=parents[0] if parents else "",
        name=span["operationName"],
        start=span["startTime"] * 1000,
        end=(span["startTime"] + span["duration"]) * 1000,
        attributes=tags,
        resource={"service.name": process["serviceName"], **{tag["key"]: tag["value"] for tag in process["tags"]}},
        error=tags.get("otel.status_description") if tags.get("error") else None,
    )


def test_jaeger_has_each_step_with_all_stages_and_both_ranks(jaeger):
    steps = step_traces(jaeger)
    assert sorted(steps) == [1, 2, 3]
    for number, trace in steps.items():
        assert_complete_ppo_step(trace)
        assert_trajectories(trace)
        assert root(trace).resource["verl.run.id"] == "ppo-run"
        names = {s.name for s in trace}
        assert ("verl.checkpoint" in names) == (number in (2, 3))
        assert ("verl.validation" in names) == (number in (2, 3))
    assert {s.resource["service.name"] for s in jaeger} == {
        "verl-launcher",
        "verl-trainer",
        "verl-worker",
        "verl-agent-loop",
        "verl-rollout-server",
        "verl-reward",
    }


def test_a_step_has_no_large_gap_without_a_name(jaeger):
    shares = {number: unnamed_share(trace) for number, trace in step_traces(jaeger).items()}
    assert max(shares.values()) < 0.1, shares


def test_prometheus_has_the_contract_names_with_the_three_labels(stack, ppo_run):
    values = ppo_run.printed()[3]
    for name, more, key, labels in (
        ("verl_training_step", "", "training/global_step", {"stage": "step", "model_type": "none"}),
        ("verl_reward_mean", "", "critic/score/mean", {"stage": "reward", "model_type": "reward"}),
        ("verl_kl_divergence", 'verl_kl_type="loss"', "actor/kl_loss", {"stage": "update", "model_type": "actor"}),
        ("verl_grad_norm", 'model_type="critic"', "critic/grad_norm", {"stage": "update", "model_type": "critic"}),
    ):
        query = f'{name}{{verl_run_id="ppo-run",rank="all",{more}}}'
        (series,) = eventually(lambda query=query: prometheus(stack, query, ppo_run))
        labels = {**labels, "rank": "all", "verl_key": key, "verl_run_id": "ppo-run", "verl_run_attempt": "1"}
        assert {label: series["metric"].get(label) for label in labels} == labels
        assert series["metric"]["verl_experiment_name"] == "ppo" and series["metric"]["verl_project_name"] == "alpha"
        assert float(series["value"][1]) == pytest.approx(values[key], rel=1e-12)


def test_every_series_of_ours_carries_rank_stage_and_model_type(stack, ppo_run):
    series = prometheus(stack, '{__name__=~"verl_.+",__name__!~"verl_otel_.+",verl_run_id="ppo-run"}', ppo_run)
    bare = [s["metric"] for s in series if not {"rank", "stage", "model_type"} <= s["metric"].keys()]
    assert len(series) > 150 and bare == []


def test_each_key_that_verl_printed_is_one_series(stack, ppo_run):
    keys = {key for values in ppo_run.printed().values() for key in values}
    query = """count by (verl_key) ({verl_run_id='ppo-run',verl_key!='',rank='all',__name__!~'.+_total'})"""
    counted = {s["metric"]["verl_key"]: float(s["value"][1]) for s in prometheus(stack, query, ppo_run)}
    skipped = {key for key in keys if not math.isfinite(ppo_run.printed().get(3, {}).get(key, 0.0))}
    assert {key: counted.get(key) for key in keys - skipped} == dict.fromkeys(keys - skipped, 1.0)


def test_ranks_have_durations_with_exemplars_that_lead_to_the_trace(stack, ppo_run, jaeger):
    durations = prometheus(
        stack, 'verl_worker_duration_seconds_count{verl_run_id="ppo-run",verl_worker_method="update_actor"}', ppo_run
    )
    assert {(s["metric"]["rank"], s["metric"]["stage"], s["value"][1]) for s in durations} == {
        ("0", "update", "3"),
        ("1", "update", "3"),
    }
    query = 'verl_stage_duration_seconds_count{verl_run_id="ppo-run",verl_timer="update_actor"}'
    stages = prometheus(stack, query, ppo_run)
    assert [s["value"][1] for s in stages] == ["3"]
    now = time.time()
    query = {"query": "verl_stage_duration_seconds_bucket", "start": now - 3600, "end": now + 60}
    exemplars = get(f"{stack.url('prometheus')}/api/v1/query_exemplars", **query)["data"]
    found = {e["labels"]["trace_id"] for series in exemplars for e in series["exemplars"]}
    assert found & {root(trace).trace_id for trace in step_traces(jaeger).values()}


@pytest.fixture(scope="module")
def mlflow_run(stack, ppo_run):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(stack.url("mlflow"))

    def ask():
        experiment = client.get_experiment_by_name("alpha")
        runs = client.search_runs([experiment.experiment_id]) if experiment else []
        return runs if runs and runs[0].info.status != "RUNNING" else None

    (run,) = eventually(ask)  # one: nothing was made twice
    return client, run


def test_the_mlflow_run_has_every_step_of_every_key_with_the_printed_values_once(mlflow_run, ppo_run):
    client, run = mlflow_run
    assert (run.info.run_name, run.info.status) == ("ppo", "FINISHED")
    assert run.data.tags["verl.run.id"] == "ppo-run"
    assert run.data.params["algorithm.adv_estimator"] == "gae"
    printed = ppo_run.printed()
    keys = {key for values in printed.values() for key in values}
    ours = {name for name in run.data.metrics if name.startswith("verl.")}
    assert set(run.data.metrics) - ours == {metric_name(key) for key in keys}
    for key in keys:
        history = client.get_metric_history(run.info.run_id, metric_name(key))
        wanted = [(step, values[key]) for step, values in sorted(printed.items()) if key in values]
        assert [m.step for m in history] == [step for step, _ in wanted], key
        assert [m.value for m in history] == pytest.approx([v for _, v in wanted], rel=1e-12, nan_ok=True), key


def test_the_runs_traces_are_in_its_experiment_and_belong_to_it(mlflow_run, stack, jaeger):
    import mlflow

    _, run = mlflow_run
    mlflow.set_tracking_uri(stack.url("mlflow"))
    try:

        def ask():
            found = mlflow.search_traces(
                locations=[run.info.experiment_id], run_id=run.info.run_id, return_type="list", max_results=100
            )
            return found if len(found) == 5 and all(t.info.state.name == "OK" for t in found) else None

        traces = eventually(ask)
    finally:
        mlflow.set_tracking_uri(None)
    assert traces
    wanted = {trace[0].trace_id for trace in step_traces(jaeger).values()}
    assert wanted < {trace.info.trace_id.removeprefix("tr-") for trace in traces}
    by_id = {trace.info.trace_id.removeprefix("tr-"): trace for trace in traces}
    for trace_id in wanted:
        assert set(STAGES_OF_PPO) < {span.name for span in by_id[trace_id].data.spans}


def test_verls_own_loggers_wrote_what_our_step_events_say(ppo_run, mlflow_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    client, run = mlflow_run
    (written,) = (ppo_run.folder / "file").rglob("*.jsonl")
    by_file = {row["step"]: row["data"] for row in map(json.loads, written.read_text().splitlines())}
    ours = {}
    for key in {key for data in by_file.values() for key in data}:
        for metric in client.get_metric_history(run.info.run_id, metric_name(key)):
            ours.setdefault(metric.step, {})[key] = metric.value
    assert ours.keys() == by_file.keys()
    for step, data in by_file.items():
        assert ours[step] == pytest.approx(data, rel=1e-15, nan_ok=True)

    board = EventAccumulator(str(ppo_run.folder / "tensorboard"))
    board.Reload()
    tags = board.Tags()["scalars"]
    assert len(tags) > 100
    for tag in tags:
        for event in board.Scalars(tag):
            assert event.value == pytest.approx(ours[event.step][tag], rel=1e-6, nan_ok=True)  # 32-bit floats there

    from mlflow.tracking import MlflowClient

    own = MlflowClient(f"sqlite:///{ppo_run.folder}/own-mlflow.db")
    (own_run,) = own.search_runs([own.get_experiment_by_name("alpha").experiment_id])
    verls = {name: value for name, value in run.data.metrics.items() if not name.startswith("verl.")}
    assert own_run.data.metrics == pytest.approx(verls, rel=1e-15, nan_ok=True)


def test_the_queues_are_empty_and_nothing_was_refused(stack, ppo_run):
    with urllib.request.urlopen(f"{stack.url('collector_self')}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    failed = [line for line in lines if "send_failed" in line and not line.startswith("#") and not line.endswith(" 0")]
    assert failed == []


# ---- the Collector and the bridge, with data of other processes beside it


def resource(**attributes):
    from opentelemetry.sdk.resources import Resource

    return Resource({"service.name": "verl-trainer", "verl.run.attempt": 1, **attributes})


def send_trace(stack, name, **attributes):
    """One span, as a process with these resource attributes sends it; returns its trace id."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider(resource=resource(**attributes), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(stack.url("otlp_http") + "/v1/traces")))
    span = provider.get_tracer("test").start_span(name)
    span.end()
    return f"{span.get_span_context().trace_id:032x}"


def in_jaeger(stack, trace_id):
    try:
        return get(f"{stack.url('jaeger')}/api/traces/{trace_id}")["data"]
    except urllib.error.HTTPError:
        return None


def test_a_bad_point_does_not_cost_the_points_of_others(stack):
    """Delta temporality, which Prometheus refuses with the whole batch, and attributes that clash as labels."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import Counter, MeterProvider
    from opentelemetry.sdk.metrics.export import AggregationTemporality, PeriodicExportingMetricReader

    delta = {Counter: AggregationTemporality.DELTA}
    exporter = OTLPMetricExporter(stack.url("otlp_http") + "/v1/metrics", preferred_temporality=delta)
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)
    provider = MeterProvider([reader], resource=resource(**{"verl.run.id": "bad-points"}), shutdown_on_exit=False)
    meter = provider.get_meter("test")
    meter.create_counter("test.delta").add(2)
    meter.create_gauge("test.clash").set(3, {"a.b": "1", "a_b": "2", "job": "x", "instance": "y"})
    meter.create_gauge("test.good").set(4)
    provider.force_flush()

    def ask():
        return {s["metric"]["__name__"]: s["value"][1] for s in prometheus(stack, '{__name__=~"test_.+"}')}

    assert eventually(ask) == {"test_delta_total": "2", "test_clash": "3", "test_good": "4"}


def test_a_hanging_mlflow_does_not_delay_jaeger(stack):
    bridge = stack.processes["bridge"]
    bridge.send_signal(signal.SIGSTOP)
    try:
        trace_id = send_trace(stack, "while MLflow hangs", **{"verl.run.id": "hang", "verl.project.name": "gamma"})
        assert eventually(lambda: in_jaeger(stack, trace_id), 20)
    finally:
        bridge.send_signal(signal.SIGCONT)
    assert eventually(lambda: _traces_of(stack, "gamma")) == {trace_id}


def _traces_of(stack, project):
    import mlflow
    from mlflow.tracking import MlflowClient

    client = MlflowClient(stack.url("mlflow"))
    experiment = client.get_experiment_by_name(project)
    if experiment is None:
        return set()
    (run,) = client.search_runs([experiment.experiment_id])
    mlflow.set_tracking_uri(stack.url("mlflow"))
    try:
        found = mlflow.search_traces(
            locations=[experiment.experiment_id], run_id=run.info.run_id, return_type="list", include_spans=False
        )
    finally:
        mlflow.set_tracking_uri(None)
    return {trace.info.trace_id.removeprefix("tr-") for trace in found}


def test_projects_that_share_a_collector_have_their_traces_in_their_own_experiments(stack):
    wanted = {
        project: {send_trace(stack, "verl.step", **{"verl.run.id": f"of-{project}", "verl.project.name": project})}
        for project in ("delta", "epsilon")
    }
    assert eventually(lambda: all(_traces_of(stack, project) for project in wanted))
    assert {project: _traces_of(stack, project) for project in wanted} == wanted

"""Metrics that can be trusted: what verl's own `file` logger wrote, in Prometheus, in the step events and in MLflow."""

import json
import math
import statistics

import bed
import pytest
from asking import eventually, get, prometheus

from verl_otel.bridges.mlflow.runs import metric_name
from verl_otel.recording import reader
from verl_otel.semconv.metrics import series_of
from verl_otel.semconv.prometheus import prometheus_name

pytestmark = [pytest.mark.run, pytest.mark.stack]


def by_file_logger(run):
    """What verl's own `file` logger wrote: step -> key -> value."""
    (written,) = (run.folder / "file").rglob("*.jsonl")
    return {row["step"]: row["data"] for row in map(json.loads, written.read_text().splitlines())}


def samples(stack, selector):
    """Every sample of some series: [(labels, {Unix time: value})]."""
    found = prometheus(stack, f"{selector}[1h]")
    return [(series["metric"], {float(t): float(v) for t, v in series["values"]}) for series in found]


def mlflow_run_of(stack, project):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(stack.url("mlflow"))

    def ask():
        experiment = client.get_experiment_by_name(project)
        runs = client.search_runs([experiment.experiment_id]) if experiment else []
        return runs if runs and runs[0].info.status != "RUNNING" else None

    (run,) = eventually(ask)
    return client, run


def test_every_value_of_verls_file_logger_is_in_prometheus_at_its_step(stack, ppo_run):
    written = by_file_logger(ppo_run)
    assert len(written[3]) > 100
    ((_, steps),) = samples(stack, 'verl_training_step{verl_run_id="ppo-run"}')
    settled = {}  # the last export while verl was in a step has all of the step's values
    for at, step in sorted(steps.items()):
        settled[int(step)] = at
    wrong, compared = [], 0
    for key in {key for data in written.values() for key in data}:
        (gauge,) = [series for series in series_of(key) if series.metric.instrument == "gauge"]
        name = prometheus_name(gauge.metric.name, gauge.metric.unit, "gauge")
        found = samples(stack, f'{name}{{verl_run_id="ppo-run",rank="all",verl_key={json.dumps(key)}}}')
        values = found[0][1] if len(found) == 1 else {}
        for step, at in settled.items():
            expected = written[step].get(key)
            if expected is None:
                continue
            compared += 1
            value = values.get(at)
            if math.isfinite(expected) and value != pytest.approx(expected, rel=1e-15):
                wrong.append((key, step, expected, value))
            if not math.isfinite(expected) and value is not None:
                wrong.append((key, step, expected, value))
    assert wrong == []
    assert sorted(settled) == [1, 2, 3]
    assert compared > 300


def test_no_key_of_the_run_is_unknown(ppo_run):
    keys = {key for data in by_file_logger(ppo_run).values() for key in data}
    assert [key for key in keys if not series_of(key)[0].known] == []


def test_amounts_per_step_are_added_up_in_counters(stack, ppo_run):
    written = by_file_logger(ppo_run)
    ((_, tokens),) = samples(stack, 'verl_training_tokens_total{verl_run_id="ppo-run"}')
    assert list(tokens.values()) == sorted(tokens.values())
    assert tokens[max(tokens)] == sum(data.get("perf/total_num_tokens", 0) for data in written.values())


def test_statistics_over_ranks_are_those_of_the_ranks_own_series(stack, ppo_run):
    client, run = mlflow_run_of(stack, "alpha")
    for timer, model, metric, quantity in (
        ("update_actor", "actor", "verl_loss", "loss"),
        ("update_critic", "critic", "verl_loss", "loss"),
        ("update_actor", "actor", "verl_grad_norm", "grad_norm"),
        ("update_critic", "critic", "verl_learning_rate", "learning_rate"),
    ):
        selector = f'{metric}{{verl_run_id="ppo-run",rank!="all",stage="update",model_type="{model}"}}'
        ranks = {int(labels["rank"]): values[max(values)] for labels, values in samples(stack, selector)}
        assert sorted(ranks) == [0, 1], selector

        def of_step_event(statistic, timer=timer, quantity=quantity):
            history = client.get_metric_history(run.info.run_id, f"verl.ranks/{timer}/{quantity}/{statistic}")
            return {m.step: m.value for m in history}[3]

        assert of_step_event("mean") == pytest.approx(statistics.fmean(ranks.values()), rel=1e-12)
        assert of_step_event("std") == pytest.approx(statistics.pstdev(ranks.values()), rel=1e-12, abs=1e-15)
        assert of_step_event("min") == min(ranks.values()) == ranks[int(of_step_event("min_rank"))]
        assert of_step_event("max") == max(ranks.values()) == ranks[int(of_step_event("max_rank"))]


def test_the_mean_of_the_ranks_losses_is_the_loss_that_verl_prints(stack, ppo_run):
    client, run = mlflow_run_of(stack, "alpha")
    for timer, key in (("update_actor", "actor/loss"), ("update_critic", "critic/loss")):
        ours, verls = (
            {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)}
            for name in (f"verl.ranks/{timer}/loss/mean", key)
        )
        assert ours == pytest.approx(verls, rel=1e-4, abs=1e-7)  # verl averages 32-bit floats


def test_distributions_have_every_sample_of_the_run(stack, ppo_run):
    written = by_file_logger(ppo_run)
    trained = [data for step, data in sorted(written.items()) if step > 0]
    for metric, key in (
        ("verl_response_tokens", "response_length/mean"),
        ("verl_prompt_tokens", "prompt_length/mean"),
        ("verl_reward_score", "critic/score/mean"),
    ):
        ((_, count),) = samples(stack, f'{{__name__=~"{metric}(_[a-z]+)?_count",verl_run_id="ppo-run"}}')
        ((_, total),) = samples(stack, f'{{__name__=~"{metric}(_[a-z]+)?_sum",verl_run_id="ppo-run"}}')
        assert count[max(count)] % len(trained) == 0 and count[max(count)] > 0
        per_step = count[max(count)] / len(trained)
        assert total[max(total)] == pytest.approx(per_step * sum(data[key] for data in trained), rel=1e-4)


def test_requests_of_the_agent_loop_have_latency_and_throughput(stack, ppo_run):
    for metric in ("verl_generate_duration_seconds_count", "verl_generate_throughput_per_second_count"):
        found = prometheus(stack, f'{metric}{{verl_run_id="ppo-run"}}', ppo_run)
        assert {s["metric"]["stage"] for s in found} == {"rollout", "validation"}, metric
        assert all(float(s["value"][1]) > 0 for s in found)


def test_the_shares_of_the_stages_and_the_rest_are_the_step(stack, ppo_run):
    shares = prometheus(stack, 'sum(verl_step_stage_share_ratio{verl_run_id="ppo-run"})', ppo_run)
    rest = prometheus(stack, 'verl_step_unaccounted_seconds{verl_run_id="ppo-run"}', ppo_run)
    step = by_file_logger(ppo_run)[3]["timing_s/step"]
    assert float(shares[0]["value"][1]) + float(rest[0]["value"][1]) / step == pytest.approx(1, abs=1e-6)


# ---- a run in which rank 1's loss is NaN in the second step, with a reward function that logs metrics of its own


@pytest.fixture(scope="module")
def nan_run(tmp_path_factory, stack):
    folder = tmp_path_factory.mktemp("nan")
    run = bed.run(
        folder,
        [
            "grpo",
            *bed.FAST_SAMPLER,
            "trainer.project_name=nan",
            f"reward.custom_reward_function.path={bed.BED}/reward_logged.py",
        ],
        environment={
            "MODULES": "verl_cpu.register,loss_fault",
            "LOSS_FAULT": "nan",
            "REWARDS": str(folder / "rewards"),
            "OTEL_EXPORTER_OTLP_ENDPOINT": stack.url("otlp_http"),
            "OTEL_TRACES_EXPORTER": "otlp,verl_otel_file",
            "OTEL_LOGS_EXPORTER": "otlp,verl_otel_file",
            "VERL_OTEL_RUN_ID": "nan-run",
        },
    )
    assert run.returncode == 0, run.output[-4000:]
    return run


@pytest.fixture(scope="module")
def recorded(nan_run):
    return reader.load(nan_run.telemetry)


def test_prometheus_says_which_ranks_loss_is_not_a_number(stack, nan_run):
    query = 'verl_metric_non_finite_total{verl_run_id="nan-run",metric="verl.loss",rank!="all"}'
    (series,) = eventually(lambda: prometheus(stack, query))
    labels = {"rank": "1", "stage": "update", "model_type": "actor", "verl_key": "actor/loss"}
    assert {label: series["metric"][label] for label in labels} == labels
    assert series["value"][1] == "1"


def test_the_gauge_does_not_show_the_last_good_number(stack, nan_run):
    """While the loss of rank 1 is NaN, its series has no samples; rank 0's has."""
    selector = 'verl_loss{{verl_run_id="nan-run",rank="{}",stage="update"}}'
    ((_, good),), ((_, bad),) = (samples(stack, selector.format(rank)) for rank in (0, 1))
    assert len(set(good.values())) == 3 and len(set(bad.values())) == 2
    ((_, verls),) = samples(stack, 'verl_loss{verl_run_id="nan-run",rank="all",verl_key="actor/loss"}')
    assert len(set(verls.values())) == 2  # the loss that verl has averaged is NaN too


def test_whoever_looks_between_two_steps_does_not_see_the_last_good_number(stack, nan_run):
    """Prometheus by itself would show the last sample for five minutes."""
    selector = 'verl_loss{verl_run_id="nan-run",stage="update",verl_key="actor/loss",rank!="all"}'
    ((_, good),) = samples(stack, selector.replace('rank!="all"', 'rank="0"'))
    first_seen = {value: at for at, value in sorted(good.items(), reverse=True)}
    _, second, third = sorted(first_seen.values())
    found = get(f"{stack.url('prometheus')}/api/v1/query", query=selector, time=(second + third) / 2)["data"]["result"]
    assert [series["metric"]["rank"] for series in found] == ["0"]


def test_the_trace_says_rank_metric_and_step(recorded):
    found = [
        (s.attributes["rank"], s.name, event.attributes)
        for s in recorded.spans
        for event in s.events
        if event.name == "verl.non_finite" and event.attributes["metric"] == "verl.loss" and s.name != "verl.step"
    ]
    ((rank, name, attributes),) = found
    assert (rank, name) == ("1", "verl.worker.update_actor")
    assert (attributes["rank"], attributes["verl.step.number"]) == ("1", 2)
    (stage,) = [s for s in recorded.spans if s.attributes.get("verl.ranks.non_finite")]
    assert stage.name == "verl.update_actor"
    step = [s for s in recorded.spans if s.name == "verl.step" and s.attributes["verl.step.number"] == 2]
    assert {e.attributes["verl.key"] for e in step[0].events if e.name == "verl.non_finite"} >= {"actor/loss"}


def test_an_event_says_rank_metric_and_step(recorded):
    events = [e.attributes for e in recorded.events_named("verl.non_finite") if e.attributes["rank"] != "all"]
    found = {(e["rank"], e["metric"], e["verl.step.number"]) for e in events}
    assert ("1", "verl.loss", 2) in found and ("0", "verl.loss", 2) not in found


def test_a_users_metrics_reach_prometheus_and_the_mlflow_run(stack, nan_run, recorded):
    lengths = [json.loads(line) for line in (nan_run.folder / "rewards").read_text().splitlines()]
    events = recorded.events_named("verl.step")
    for name, scale in (("reward/creative_score", 10), ("reward/answer_length", 1)):
        bodies = [
            (e.body[prefix + name], e.body.get(f"{prefix}{name}/count", 1))
            for e in events
            for prefix in ("", "val/")
            if prefix + name in e.body
        ]
        assert sum(count for _, count in bodies) == len(lengths)  # each value of each process, once
        assert sum(mean * count for mean, count in bodies) == pytest.approx(sum(lengths) / scale)
    assert {e.attributes["verl.step.number"] for e in events if "reward/creative_score" in e.body} >= {1, 2, 3}

    gauge = prometheus(stack, 'verl_user_reward_creative_score{verl_run_id="nan-run"}')
    assert {s["metric"]["verl_key"] for s in gauge} == {"reward/creative_score"}
    counts = prometheus(stack, 'sum({__name__=~"verl_user_reward_answer_length.*_count",verl_run_id="nan-run"})')
    assert float(counts[0]["value"][1]) == len(lengths)

    client, run = mlflow_run_of(stack, "nan")
    history = client.get_metric_history(run.info.run_id, metric_name("reward/creative_score"))
    assert {m.step for m in history} >= {1, 2, 3}
    assert eventually(lambda: client.list_artifacts(run.info.run_id, "texts/reward/answer"))


def test_a_users_stage_is_a_span_in_the_trajectory_and_a_wrong_name_is_reported_once(nan_run, recorded):
    by_id = {s.span_id: s for s in recorded.spans}
    grades = [s for s in recorded.spans if s.name == "verl.grade"]
    below = [by_id[s.parent_id].name for s in grades]
    # A reward worker is asked once whether it takes the context of calls; what comes before its answer is the run's.
    assert set(below) <= {"verl.compute_score", "verl.run"} and below.count("verl.compute_score") > 10
    assert nan_run.output.count("'no name' is not the name of a metric") == 1


# ---- eight ranks on two nodes


def test_ranks_on_two_nodes_are_series_of_their_own(stack):
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    from verl_otel.config import Levels
    from verl_otel.identity import Identity
    from verl_otel.metrics.instruments import Instruments
    from verl_otel.semconv.metrics import LOSS

    for node in range(2):
        for local in range(8):
            rank = str(node * 8 + local)
            identity = Identity("two-nodes", 1, "worker", worker_group="WorkerDict", worker_index=rank)
            exporter = OTLPMetricExporter(stack.url("otlp_http") + "/v1/metrics")
            provider = MeterProvider(
                [PeriodicExportingMetricReader(exporter, math.inf)], identity.resource(), shutdown_on_exit=False
            )
            labels = {"rank": rank, "stage": "update", "model_type": "actor", "verl.key": "actor/loss"}
            Instruments(provider.get_meter("test"), Levels({})).set(LOSS, labels, float(rank))
            provider.force_flush()
            provider.shutdown()

    def ask():
        found = prometheus(stack, 'verl_loss{verl_run_id="two-nodes"}')
        return found if len(found) >= 16 else None

    found = eventually(ask)
    assert {s["metric"]["rank"]: float(s["value"][1]) for s in found} == {str(r): float(r) for r in range(16)}
    assert len(found) == 16

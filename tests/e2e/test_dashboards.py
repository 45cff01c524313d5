"""Every query of the Grafana dashboards against the real Prometheus, filled by a real run.

What a CPU run cannot have (GPUs, vLLM's metrics, faults, alerts) is made up from the registry and sent to the same
Prometheus, through the Collector, under runs of the project `made-up`: so no query stays untried.
"""

import dataclasses
import time
import urllib.parse

import grafana
import made_up_series
import pytest
from asking import eventually, get
from steady import steady_trainer

from verl_otel.dashboards import uids

pytestmark = [pytest.mark.run, pytest.mark.stack]

BOARDS = grafana.load()
QUERIES = [query for board in BOARDS.values() for query in grafana.queries_of(board)]

NOT_IN_A_PPO_RUN = {
    "ALERTS": "no alert fires",
    **dict.fromkeys(("hw_gpu_", "hw_power_", "hw_temperature_", "hw_errors_", "hw_energy_", "hw_status"), "no GPU"),
    "verl_worker_memory_": "no GPU",
    "DCGM_": "no GPU",
    **dict.fromkeys(("vllm:", "sglang:"), "neither engine runs on a CPU"),
    "otelcol_exporter_send_failed_": "there is none before the first failure",
    "verl_metric_non_finite_": "every value is finite",
    "verl_group_all_": "the scores of the test bed are no 0 and 1",
    "verl_rollout_throughput_": "of the V1 trainer, whose gen is only a wait",
    **dict.fromkeys(("verl_trajectory_failures_", "verl_tool_", "verl_compute_score_errors_"), "no tools, no failures"),
    "verl_sandbox_": "no sandbox",
    **dict.fromkeys(("verl_trainer_idle_", "verl_rollouter_idle_", "verl_fully_async_"), "no asynchronous trainer"),
    **dict.fromkeys(("verl_rollout_evicted", "verl_rollout_surplus"), "no asynchronous trainer"),
}
"""Beginning of a Prometheus name -> why the real run has no such series."""
NOTHING_IF_ALL_IS_WELL = {
    (uids.TELEMETRY, "Not delivered at once"),
    (uids.TELEMETRY, "Failures that were stopped"),
    (uids.FLEET, "Runs", "H"),  # alerts
    (uids.FLEET, "Stages that run now"),
    (uids.FLEET, "Longest since a step"),
    (uids.STAGES, "Stages that run now"),
}
"""Queries that filter for what does not happen in a run where all is well, or which has ended."""


def names_in(query):
    return grafana.names(grafana.put_in(query.expr, values_of(query)))


def values_of(query, run="", attempt=".*"):
    """The variables as they are with All chosen, but for the run."""
    return {**grafana.all_values(BOARDS[query.dashboard]), "run": run or ".*", "attempt": attempt}


@pytest.fixture(scope="module")
def prometheus(stack):
    return grafana.Prometheus(stack.url("prometheus"))


@pytest.fixture(scope="module")
def times(ppo_run):
    """A time range that ends just after the real run has ended, so that all of it is there."""
    end = ppo_run.log.stat().st_mtime + 5
    return end - 300, end


@pytest.fixture(scope="module")
def made_up(stack, times, prometheus):
    """`made-up`, in two attempts, and `made-up-twin`, which has the same series as the first, on the same GPUs."""
    names = set()
    for query in QUERIES:
        for name in names_in(query):
            base = next((name[: -len(part)] for part in ("_bucket", "_sum", "_count") if name.endswith(part)), name)
            known = {**made_up_series.by_prometheus_name(), **made_up_series.OTHERS}
            names |= {name, base} & known.keys()
    for run, attempt, seed in (("made-up", 1, 0), ("made-up", 2, 1), ("made-up-twin", 1, 0)):
        made_up_series.send(
            stack.url("otlp_http") + "/v1/metrics", made_up_series.payload(run, attempt, names, *times, seed=seed)
        )

    def there():
        count = 'count(count by (__name__, verl_run_id, verl_run_attempt) ({verl_project_name="made-up"}))'
        found = prometheus.ask("query", query=count, time=times[1])["result"]
        parts = sum(3 if is_histogram(name) else 1 for name in names)
        return found and float(found[0]["value"][1]) >= 3 * parts

    assert eventually(there), "Prometheus does not have the made-up series"


def is_histogram(name):
    known = made_up_series.by_prometheus_name()
    return (known[name].instrument if name in known else made_up_series.OTHERS[name][0]) == "histogram"


def lines(result, labels=("verl_run_id",)):
    """A result in a form that can be compared: its labels -> its values."""
    return {
        tuple(sorted(series["metric"].items())): series.get("values") or [series["value"]]
        for series in result
        if all(label in series["metric"] for label in labels)
    }


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_a_query_returns_data_of_the_real_run(query, prometheus, ppo_run, times):
    absent = [why for start, why in NOT_IN_A_PPO_RUN.items() for name in names_in(query) if name.startswith(start)]
    nothing = {(query.dashboard, query.panel), (query.dashboard, query.panel, query.ref)} & NOTHING_IF_ALL_IS_WELL
    result = prometheus.run(query, values_of(query, "ppo-run"), *times)
    if absent or nothing:
        return
    if "otelcol_" in query.expr:  # scraped, also after the run, and a rate needs two scrapes
        result = eventually(lambda: prometheus.run(query, values_of(query), time.time() - 300, time.time()))
    assert result
    assert {series["metric"].get("verl_run_id", "ppo-run") for series in result} == {"ppo-run"}


(STAGES_NOW, _) = (query for query in QUERIES if query.panel == "Stages that run now")


def test_stages_are_shown_while_they_run_and_not_after(prometheus, stack, tmp_path):
    """Prometheus itself may show the last point of a stage that has ended for five minutes."""

    def shown():
        now = time.time()
        found = prometheus.run(STAGES_NOW, values_of(STAGES_NOW, "slow-stages"), now - 300, now)
        return {series["metric"]["verl_timer"]: float(series["value"][1]) for series in found}

    with steady_trainer(tmp_path, stack.url("otlp_http"), "slow-stages", per_second=1 / 4) as end:
        stages = eventually(shown)
        assert list(stages) == ["update_actor"] and 0 < stages["update_actor"] < 60
        end()
    assert eventually(lambda: shown() == {})


def test_the_setup_is_not_shown_once_a_run_trains(prometheus, ppo_run, times):
    during = prometheus.run(
        dataclasses.replace(STAGES_NOW, instant=False), values_of(STAGES_NOW, "ppo-run"), *times, step=1
    )
    (setup,) = (series["values"] for series in during if series["metric"]["verl_timer"] == "setup")
    assert float(setup[-1][0]) < times[1] - 5  # `times` ends five seconds after the run
    assert prometheus.run(STAGES_NOW, values_of(STAGES_NOW, "ppo-run"), *times) == []


def test_the_time_since_a_step_is_shown_while_a_run_trains(prometheus, ppo_run, times):
    (query,) = (query for query in QUERIES if query.panel == "Longest since a step")
    (during,) = prometheus.run(dataclasses.replace(query, instant=False), values_of(query, "ppo-run"), *times, step=1)
    assert all(0 <= float(value) < 120 for _, value in during["values"])


(STATE,) = (query for query in QUERIES if (query.dashboard, query.panel, query.ref) == (uids.FLEET, "Runs", "A"))
FINISHED = -1


def test_a_run_reports_while_it_trains_and_is_in_the_table_as_finished_afterwards(prometheus, ppo_run, times):
    chosen = values_of(STATE, "ppo-run")
    (during,) = prometheus.run(dataclasses.replace(STATE, instant=False), chosen, *times, step=1)
    seen = [float(value) for _, value in during["values"]]
    assert seen == sorted(seen, key=lambda value: value == FINISHED) and seen[-1] == FINISHED
    assert min(seen[:10]) >= 0 and max(seen) < 60
    (later,) = prometheus.run(STATE, chosen, times[0], times[1] + 900)
    assert float(later["value"][1]) == FINISHED
    assert later["metric"] == during["metric"] and later["metric"]["verl_experiment_name"] == "ppo"


def test_a_run_that_never_said_that_it_ends_is_in_the_table_as_silent(stack, prometheus, times):
    request = made_up_series.payload("vanished", 1, {"verl_process_start_time_seconds"}, *times)
    made_up_series.send(stack.url("otlp_http") + "/v1/metrics", request)
    chosen = values_of(STATE, "vanished")
    eventually(lambda: prometheus.run(STATE, chosen, *times))
    (reporting,), (silent,) = (prometheus.run(STATE, chosen, times[0], times[1] + after) for after in (0, 900))
    assert float(reporting["value"][1]) < 60 and float(silent["value"][1]) == 300


def test_what_is_said_to_be_absent_from_the_real_run_is(prometheus, ppo_run, times):
    found = prometheus.ask("series", **{"match[]": '{verl_run_id="ppo-run"}', "start": times[0], "end": times[1]})
    names = {series["__name__"] for series in found}
    assert len(names) > 150
    there = {start: {name for name in names if name.startswith(start)} for start in NOT_IN_A_PPO_RUN}
    assert {start: found for start, found in there.items() if found} == {}


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_a_query_returns_data_where_its_series_are(query, prometheus, made_up, times):
    """On series that are made up: of everything, also of what the real run has not."""
    result = prometheus.run(query, values_of(query, "made-up", "1"), *times)
    assert result
    values = [float(v) for series in result for _, v in (series.get("values") or [series["value"]])]
    assert all(v == v for v in values), "NaN"


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_a_run_looks_the_same_whether_others_are_chosen_too(query, prometheus, made_up, times):
    """Another attempt, and another run with the same series on the same GPUs, are beside it and not added to it."""
    alone = lines(prometheus.run(query, values_of(query, "made-up", "1"), *times))
    both = lines(prometheus.run(query, values_of(query, "made-up|made-up-twin", "1|2"), *times))
    if alone and "verl_run_attempt" in dict(next(iter(alone))):
        assert {labels: both.get(labels) for labels in alone} == alone
        attempts = {(dict(labels)["verl_run_id"], dict(labels)["verl_run_attempt"]) for labels in both}
        assert attempts == {("made-up", "1"), ("made-up", "2"), ("made-up-twin", "1")}
    elif alone:
        assert query.expr.count("ALERTS") == 1, "an alert need not say which attempt it is about"


ON_HARDWARE = [query for query in QUERIES if query.dashboard == uids.HARDWARE and query.kind != "annotation"]


@pytest.mark.parametrize("query", ON_HARDWARE, ids=str)
def test_a_gpu_or_host_that_two_runs_share_counts_once(query, prometheus, made_up, times):
    """Both say the same of it."""
    one = prometheus.run(query, values_of(query, "made-up", "1"), *times)
    both = prometheus.run(query, values_of(query, "made-up|made-up-twin", "1"), *times)
    assert one and lines(both, ()) == lines(one, ())


@pytest.mark.parametrize("uid", BOARDS)
def test_each_variable_offers_the_runs_values_and_follows_those_before_it(uid, prometheus, ppo_run, made_up, times):
    board = BOARDS[uid]
    offered, values = {}, grafana.all_values(board)
    for variable in (v for v in board["templating"]["list"] if v["type"] == "query"):
        offered[variable["name"]] = prometheus.options(variable, values, *times)
        assert offered[variable["name"]], variable["name"]
    assert {"alpha", "made-up"} <= set(offered["project"]) and {"ppo-run", "made-up"} <= set(offered["run"])
    assert made_up_series.CLUSTER in offered["cluster"]
    values["project"] = "alpha"
    chosen = {
        v["name"]: prometheus.options(v, values, *times) for v in board["templating"]["list"] if v["type"] == "query"
    }
    assert "ppo-run" in chosen["run"] and "made-up" not in chosen["run"]
    assert set(chosen.get("rank", ())) <= {"0", "1"}
    assert "trainer" in chosen.get("role", ["trainer"])


def test_exemplars_of_the_panels_lead_to_traces_that_jaeger_has(stack, prometheus, ppo_run, times):
    found = {}
    for query in (query for query in QUERIES if query.exemplars):
        expr = grafana.put_in(query.expr, values_of(query, "ppo-run"))
        answer = prometheus.ask("query_exemplars", query=expr, start=times[0], end=times[1])
        found[str(query)] = {e["labels"]["trace_id"] for series in answer for e in series["exemplars"]}
    assert [name for name, ids in found.items() if not ids] == []
    for ids in found.values():
        assert get(f"{stack.url('jaeger')}/api/traces/{min(ids)}")["data"]


def test_the_collectors_own_metrics_have_the_names_that_the_panels_use(prometheus, ppo_run, times):
    """As Prometheus has scraped them."""
    there = {name for name in prometheus.ask("label/__name__/values") if name.startswith("otelcol_")}
    used = [names for query in QUERIES for names in [names_in(query)] if any(n.startswith("otelcol_") for n in names)]
    assert used
    for names in used:
        sent = {name.replace("_send_failed_", "_sent_") for name in names}  # one is there from the first failure on
        assert sent & there, names


def test_the_links_search_finds_the_steps_in_jaeger(stack, ppo_run):
    """What the link `Steps in Jaeger` of a run asks Jaeger's data source for."""
    tags = urllib.parse.quote('{"verl.run.id":"ppo-run"}')
    traces = eventually(
        lambda: get(
            f"{stack.url('jaeger')}/api/traces?service=verl-trainer&operation=verl.step&tags={tags}&lookback=2h"
        )["data"]
    )
    assert len(traces) == 3

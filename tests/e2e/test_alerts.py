"""The alert rules on a real run in the real Prometheus: they evaluate, see the run, and have nothing to say."""

import json
import re
import time
import urllib.parse
import urllib.request

import pytest
import yaml

from verl_otel.alerts import rules
from verl_otel.stack.configuration import DEPLOY

pytestmark = [pytest.mark.run, pytest.mark.stack]

RUN = {
    "verl_run_id": "ppo-run",
    "verl_run_attempt": "1",
    "verl_project_name": "alpha",
    "verl_experiment_name": "ppo",
}


def ask(stack, path, **parameters):
    url = f"{stack.url('prometheus')}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)["data"]


def ever(stack, selector):
    """The largest value that each series has had."""
    return ask(stack, "query", query=f"max_over_time({selector}[6h])")["result"]


@pytest.fixture(scope="module")
def evaluated(stack, ppo_run):
    """The rules, as Prometheus has them, after they were evaluated on the whole run."""
    after = time.time()
    for _ in range(240):
        (group,) = [group for group in ask(stack, "rules")["groups"] if group["name"] == rules.GROUP]
        last = group["lastEvaluation"]
        if last > time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(after + 2)):
            return group["rules"]
        time.sleep(0.25)
    raise AssertionError(f"the rules were evaluated last at {last}")


def test_all_rules_are_there_and_evaluate(evaluated):
    written = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert [rule["name"] for rule in evaluated] == [rule.get("alert") or rule["record"] for rule in written]
    assert {rule["name"]: rule.get("lastError") for rule in evaluated if rule["health"] != "ok"} == {}


def test_what_is_recorded_is_there_for_the_run(stack, evaluated):
    recorded = [rule["name"] for rule in evaluated if rule["type"] == "recording"]
    assert len(recorded) == 10
    for name in recorded:
        found = ever(stack, f'{name}{{verl_run_id="ppo-run"}}')
        assert found, name
        for series in found:
            assert RUN.items() <= series["metric"].items(), name
    assert {series["value"][1] for series in ever(stack, 'verl:steps:total{verl_run_id="ppo-run"}')} == {"3"}
    usual = {
        series["metric"]["verl_timer"] for series in ever(stack, 'verl:stage_usual:seconds{verl_run_id="ppo-run"}')
    }
    assert {"step", "gen", "update_actor", "update_critic", "testing", "save_checkpoint"} <= usual


def test_series_that_the_alerts_select_are_there_for_the_run(stack, ppo_run):
    """But for those of GPUs, of failures, and of what PPO with a penalty has not."""
    missing = set()
    for name in set(re.findall(r"\b(verl_\w+|hw_\w+)\{", (DEPLOY / "prometheus" / "alerts.yaml").read_text())):
        if not ever(stack, f'{name}{{verl_run_id="ppo-run"}}'):
            missing.add(name)
    assert {name for name in missing if not name.startswith("hw_")} <= {
        "verl_metric_non_finite_total",
        "verl_otel_failures_total",
        "verl_group_all_right_ratio",
        "verl_group_all_wrong_ratio",
    }


def test_a_good_run_raises_no_alert(stack, evaluated):
    assert ever(stack, 'ALERTS{verl_run_id="ppo-run",alertstate="firing"}') == []

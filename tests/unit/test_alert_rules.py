"""The alert rules: up to date, and tested by the real promtool (the cases are in `deploy/prometheus/alerts-test`)."""

import re
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

from verl_otel import cli
from verl_otel.alerts import rules, thresholds
from verl_otel.semconv import registry
from verl_otel.semconv.prometheus import prometheus_name
from verl_otel.stack.binaries import binary

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
CASES = sorted((ROOT / "deploy" / "prometheus" / "alerts-test").glob("*.yaml"))
PAGES = ROOT / "docs" / "alerts"
NAMES = {alert.name for alert in rules.ALERTS}

OF_OTHERS = re.compile(r"otelcol_exporter_\w+|DCGM_FI_DEV_XID_ERRORS|ALERTS")
"""Metrics of the Collector, of NVIDIA's exporter, and of Prometheus."""


def promtool(*arguments):
    result = subprocess.run([binary("promtool"), *arguments], capture_output=True, text=True, timeout=900)
    return result.returncode, result.stdout + result.stderr


def own(tmp_path, text):
    """The rules that `verl-otel alert-rules` makes with this file of thresholds."""
    given, made = tmp_path / "mine.yaml", tmp_path / "alerts.yaml"
    given.write_text(text)
    assert cli.main(["alert-rules", "--thresholds", str(given), "--output", str(made)]) == 0
    return made


def alerts_in(path):
    return [rule for rule in yaml.safe_load(path.read_text())["groups"][0]["rules"] if "alert" in rule]


def known_metrics():
    known = set()
    for metric in registry.load().metrics.values():
        name = prometheus_name(metric.name, metric.unit, metric.instrument)
        known |= (
            {f"{name}_{part}" for part in ("sum", "count", "bucket")} if metric.instrument == "histogram" else {name}
        )
    return known


def selected(expression):
    """The metrics that an expression selects."""
    found, left = set(), [promql_parser.parse(expression)]
    while left:
        node = left.pop()
        if isinstance(node, promql_parser.VectorSelector):
            found.add(node.name)
        for part in ("lhs", "rhs", "expr", "param", "vector_selector"):
            left += [value] if (value := getattr(node, part, None)) is not None else []
        left += list(getattr(node, "args", None) or [])
    return found


def test_the_committed_file_is_what_the_command_makes(tmp_path):
    made = tmp_path / RULES.name
    assert cli.main(["alert-rules", "-o", str(made)]) == 0
    assert made.read_text() == RULES.read_text(), "run: verl-otel alert-rules -o deploy/prometheus/alerts.yaml"


@pytest.mark.stack
def test_promtool_finds_nothing_to_complain_about():
    status, output = promtool("check", "rules", "--lint-fatal", str(RULES))
    assert status == 0, output


@pytest.mark.stack
@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_alerts_fire_and_are_silent_as_written(case):
    status, output = promtool("test", "rules", str(case))
    assert status == 0, output[-6000:]


def test_each_alert_fires_in_a_case_and_is_silent_in_a_look_alike():
    fires, silent, says = set(), set(), set()
    for path in CASES:
        for test in yaml.safe_load(path.read_text())["tests"]:
            series = " ".join(one["series"] for one in test["input_series"])
            for check in test["promql_expr_test"]:
                for name in re.findall(r'alertname="(\w+)"', check["expr"]):
                    fired = [sample["labels"] for sample in check["exp_samples"]]
                    fires |= {name for labels in fired if f'alertname="{name}"' in labels}
                    runs = set(re.findall(r'verl_run_id="([^"]+)"', series))
                    silent |= {name for run in runs if not any(f'"{run}"' in labels for labels in fired)}
                    silent |= set() if fired else {name}
            for check in test.get("alert_rule_test", ()):
                says |= {check["alertname"] for alert in check["exp_alerts"] if alert["exp_annotations"]}
    assert fires == silent == says == NAMES


def test_the_series_of_the_cases_exist():
    names = set()
    for path in CASES:
        for test in yaml.safe_load(path.read_text())["tests"]:
            names |= {one["series"].partition("{")[0] for one in test["input_series"]}
    assert {name for name in names if not OF_OTHERS.fullmatch(name)} <= known_metrics()


def test_rules_select_only_metrics_that_exist_or_were_recorded_before():
    recorded, metrics = set(), set()
    for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]:
        names = selected(rule["expr"])
        assert names
        description = rule.get("annotations", {}).get("description", "")
        for query in re.findall(r'printf "topk\(\d+, (.+?)\)" \$labels', description):
            names |= selected(query.replace("%[1]q", "'x'").replace("%[2]q", "'x'"))
        assert {name for name in names if ":" in name} <= recorded, rule
        metrics |= {name for name in names if ":" not in name and not OF_OTHERS.fullmatch(name)}
        recorded |= {rule["record"]} if "record" in rule else set()
    assert metrics <= known_metrics()
    assert "verl_kl_divergence" in metrics and len(metrics) > 20


def test_what_is_judged_by_values_waits_for_the_first_steps_and_is_of_all_ranks():
    of_values = {"VerlStraggler", "VerlGpuUnderused"}
    for alert in alerts_in(RULES):
        if 'rank="all"' in alert["expr"] or alert["alert"] in of_values:
            of_values.add(alert["alert"])
            (steps,) = re.findall(r"\nand on \([^)]+\) verl:steps:total >= (\d+)", alert["expr"])
            assert int(steps) >= 5, alert["alert"]
            for name, matchers in re.findall(r"\b(verl_\w+)\{([^}]*)\}", alert["expr"]):
                assert 'rank="all"' in matchers, f"{alert['alert']}: {name}"
            assert not re.search(r"\bverl_\w+\[", alert["expr"]), alert["alert"]
    assert NAMES - of_values == {
        *("VerlRunHung", "VerlStageSlow", "VerlStepTimeHigh", "VerlNonFinite", "VerlRankMissing", "VerlTelemetryLoss"),
        *("VerlRunFailed", "VerlGpuMemoryHigh", "VerlGpuEccErrors", "VerlGpuXid", "VerlCollectorQueueFilling"),
    }


def test_every_alert_has_what_a_message_needs():
    for alert in alerts_in(RULES):
        about_a_run = alert["alert"] != "VerlCollectorQueueFilling" and "component" not in alert["labels"]
        links = {"dashboard_url", "trace_url", "mlflow_url"} if about_a_run else set()
        assert alert["annotations"].keys() == {"summary", "description", "value", "runbook_url"} | links
        assert alert["labels"]["severity"] in thresholds.SEVERITIES
        assert alert["annotations"]["runbook_url"] == f"docs/alerts/{alert['alert']}.md"


def test_each_alert_has_a_page_and_each_page_an_alert():
    assert {path.stem for path in PAGES.glob("*.md")} - {"README"} == NAMES
    index = (PAGES / "README.md").read_text()
    severities = {alert["alert"]: alert["labels"]["severity"] for alert in alerts_in(RULES)}
    assert dict(re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| (\w+) \|", index, re.MULTILINE)) == severities
    for path in PAGES.glob("[!R]*.md"):
        text = path.read_text()
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings == ["What it means", "Look", "Usual causes", "What to do", "Tune or silence"], path
        shipped = thresholds.load().alerts[path.stem]
        assert shipped is not None
        for name, value in re.findall(r"^\| `(\w+)` \| `?([^`|]+?)`? \|", text, re.MULTILINE):
            written = "off" if shipped[name] is False else str(shipped[name]).replace("'", "")
            assert value == written, f"{path}: {name}"


def test_the_queries_on_the_pages_are_of_metrics_that_exist():
    recorded = {rule["record"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"] if "record" in rule}
    for path in PAGES.glob("[!R]*.md"):
        queries = re.findall(r"^```promql\n(.+?)\n```", path.read_text(), re.MULTILINE | re.DOTALL)
        assert queries, path
        for query in "\n\n".join(queries).split("\n\n"):
            names = {name for name in selected(query.replace("$run", "x")) if not OF_OTHERS.fullmatch(name)}
            assert names <= known_metrics() | recorded, f"{path}: {query}"
            # It does not see the first event of a counter of ours, which begins with it.
            assert "increase(verl_" not in query, f"{path}: {query}"


# ---- thresholds of one's own

KL = "verl_kl_divergence"
OVERRIDES = """
alerts:
  HighKLDivergence: {penalty: off, loss: off, rollout: off}
projects:
  bold: {HighKLDivergence: {update: 0.5}}
  a.b|c: {HighKLDivergence: off, VerlStepTimeHigh: {seconds: 1.5, times_usual: off, severity: info}}
"""


def kl_of(project):
    labels = (
        f'verl_run_id="{project}",verl_run_attempt="1",verl_project_name="{project}",verl_experiment_name="e",'
        'rank="all",instance="i"'
    )
    step = labels + ',stage="step",model_type="none"'
    return [
        {"series": f'{KL}{{{labels},stage="update",model_type="actor",verl_kl_type="update"}}', "values": "0.3x40"},
        {"series": f"verl_step_last_timestamp_seconds{{{step}}}", "values": "0+30x40"},
        {"series": f'verl_stage_duration_seconds_count{{{step},verl_timer="step"}}', "values": "0+1x40"},
        {"series": f'verl_stage_duration_seconds_sum{{{step},verl_timer="step"}}', "values": "0+30x40"},
        {"series": f'verl_stage_duration_seconds_count{{{labels},stage="update",verl_timer="u"}}', "values": "0+1x40"},
        {"series": f'verl_stage_duration_seconds_sum{{{labels},stage="update",verl_timer="u"}}', "values": "0+2x40"},
    ]


@pytest.mark.stack
def test_a_project_may_have_limits_of_its_own(tmp_path):
    made = own(tmp_path, OVERRIDES)
    status, output = promtool("check", "rules", "--lint-fatal", str(made))
    assert status == 0, output

    def firing(name, project, severity, **more):
        labels = {"alertname": name, "alertstate": "firing", "severity": severity, "verl_run_attempt": "1", **more}
        labels |= {"verl_run_id": project, "verl_project_name": project, "verl_experiment_name": "e"}
        return {"labels": "ALERTS{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}", "value": 1}

    def check(name, *expected):
        return {
            "expr": f'ALERTS{{alertname="{name}",alertstate="firing"}}',
            "eval_time": "18m",
            "exp_samples": expected,
        }

    # 0.3 is too much by default, not for `bold`; `a.b|c` has no such alert, and `aXb` is another project.
    case = {
        "rule_files": [str(made)],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [series for project in ("plain", "bold", "a.b|c", "aXb") for series in kl_of(project)],
                "promql_expr_test": [
                    check(
                        "HighKLDivergence",
                        *(
                            firing("HighKLDivergence", project, "warning", stage="update", verl_kl_type="update")
                            for project in ("plain", "aXb")
                        ),
                    ),
                    check("VerlStepTimeHigh", firing("VerlStepTimeHigh", "a.b|c", "info")),
                ],
            }
        ],
    }
    (tmp_path / "case.yaml").write_text(yaml.safe_dump(case))
    status, output = promtool("test", "rules", str(tmp_path / "case.yaml"))
    assert status == 0, output


def test_an_alert_that_is_off_for_all_may_be_on_for_a_project(tmp_path):
    made = alerts_in(
        own(tmp_path, "alerts: {VerlStraggler: off}\nprojects: {p: {VerlStraggler: {ratio: 3}, VerlNonFinite: off}}")
    )
    (straggler,) = [alert["expr"] for alert in made if alert["alert"] == "VerlStraggler"]
    assert 'verl_project_name="p"' in straggler and "> 3" in straggler and "!~" not in straggler
    (non_finite,) = [alert["expr"] for alert in made if alert["alert"] == "VerlNonFinite"]
    assert 'verl_project_name!~"p"' in non_finite


def test_one_alert_has_one_rule_for_all_projects_unless_they_last_or_weigh_differently(tmp_path):
    text = "projects: {p: {VerlStraggler: {ratio: 3}}, q: {VerlStraggler: {ratio: 4}}, r: {VerlStraggler: {for: 1h}}}"
    made = [alert for alert in alerts_in(own(tmp_path, text)) if alert["alert"] == "VerlStraggler"]
    assert [alert["for"] for alert in made] == ["10m", "1h"]
    assert [alert["expr"].count("verl_worker_straggler") for alert in made] == [3, 1]


def test_the_patterns_of_limits_and_links_are_filled_in(tmp_path):
    links, alerts = (
        "links: {runbook: 'https://runbooks/{alert}', mlflow: ''}",
        "alerts: {VerlNonFinite: {ignore: 'x.+'}}",
    )
    made = alerts_in(own(tmp_path, f"run: {{fresh: 90s}}\n{links}\n{alerts}"))
    assert {alert["annotations"]["runbook_url"].rpartition("/")[2] for alert in made} == NAMES
    assert not any("mlflow_url" in alert["annotations"] for alert in made)
    (non_finite,) = [alert["expr"] for alert in made if alert["alert"] == "VerlNonFinite"]
    assert 'metric!~"x.+"' in non_finite and "[90s]" in non_finite
    (missing,) = [alert["annotations"] for alert in made if alert["alert"] == "VerlRankMissing"]
    assert "[90s]" in missing["description"] and "[6h]" in missing["description"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("alerts: {VerlRunHangs: {for: 1m}}", "VerlRunHangs: there is no such alert"),
        ("alerts: {VerlRunHung: {floor: 1m}}", "alerts: VerlRunHung: floor: there is no such parameter"),
        ("alerts: {VerlRunHung: {for: soon}}", "'soon' is not a duration such as"),
        ("alerts: {VerlRunHung: {for: 10}}", "10 is not a duration such as"),
        ("alerts: {VerlRunHung: {times_usual: many}}", "'many' has to be a number, or off"),
        ("alerts: {VerlRunHung: {times_usual: on}}", "True has to be a number, or off"),
        ("alerts: {VerlRunHung: {times_usual: .inf}}", "inf has to be a number, or off"),
        ("alerts: {VerlStepTimeHigh: {seconds: -1}}", "seconds: -1 is below 0"),
        ("alerts: {VerlRunHung: {severity: page}}", "'page' is none of critical, warning, info"),
        ("alerts: {VerlRunHung: 5}", "has to be a mapping"),
        ("alerts: {VerlRewardFlat: {windows: 30m}}", "has to be a list of durations"),
        ("alerts: {VerlRewardFlat: {windows: [x]}}", "'x' is not a duration"),
        ("alerts: {VerlNonFinite: {ignore: '('}}", "is not a regular expression"),
        ("alerts: {VerlStepTimeHigh: {times_usual: off}}", "VerlStepTimeHigh: all its limits are off"),
        ("projects: {p: {VerlNo: off}}", "projects: p: VerlNo: there is no such alert"),
        ("project: {}", "project: there are only run, links, alerts, projects"),
        ("run: {fresh: 0.5}", "0.5 is not a duration"),
        ("links: {grafana: x}", "grafana: has to be the text of one of runbook, dashboard, trace, mlflow"),
        ("links: {runbook: 1}", "runbook: has to be the text of one of"),
        ("- a list", "has to be a mapping"),
        ("a: [", "while parsing"),
    ],
)
def test_a_mistake_in_the_file_is_said_with_its_place(tmp_path, capsys, text, said):
    given = tmp_path / "mine.yaml"
    given.write_text(text)
    assert cli.main(["alert-rules", "--thresholds", str(given)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("verl-otel: ")
    assert said in captured.err


def test_a_file_that_is_not_there_is_said(tmp_path, capsys):
    assert cli.main(["alert-rules", "--thresholds", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err

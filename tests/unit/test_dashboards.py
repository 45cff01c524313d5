"""The Grafana dashboards: made from the registry, and by Grafana's rules. Their queries are run in tests/e2e."""

import itertools
import json
import re
import sys
import urllib.parse
from pathlib import Path

import grafana
import made_up_series
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from opentelemetry.semconv._incubating.attributes.k8s_attributes import K8S_CLUSTER_NAME

from verl_otel import cli, dashboards
from verl_otel.dashboards import layout, panels, queries, uids
from verl_otel.semconv import registry
from verl_otel.semconv.prometheus import prometheus_label

ROOT = Path(__file__).resolve().parents[2]
BOARDS = grafana.load()
QUERIES = [query for board in BOARDS.values() for query in grafana.queries_of(board)]
PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")
OTHER_LABELS = {
    "__name__",
    "le",
    "alertname",
    "alertstate",
    "severity",
    "instance",
    "exporter",
    "data_type",
    "receiver",
    "filter",
}
"""Labels that are not attributes of ours: of Prometheus, its alerts and the Collector."""

RUNS_TOGETHER = {"Scores of samples", "Mean duration of a call: method by rank"}
"""Panels that show all chosen runs as one, and say so."""

every_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
every_query = pytest.mark.parametrize("query", QUERIES, ids=str)


def put_in(query):
    return grafana.put_in(query.expr, grafana.all_values(BOARDS[query.dashboard]))


def test_the_committed_files_are_what_the_code_makes():
    written = {path.name: path.read_text() for path in grafana.DASHBOARDS.iterdir()}
    assert written == dashboards.files(), "run: verl-otel dashboards --output deploy/grafana/dashboards"


def test_each_uid_that_links_hang_on_has_its_dashboard():
    assert set(BOARDS) == {value for name, value in vars(uids).items() if name.isupper()}


@every_board
def test_the_sdks_model_reads_back_every_field(board):
    """A field that Grafana's schema does not have would be lost on the way."""
    register_default_plugins()
    model = Dashboard.from_json(json.loads(json.dumps(board)))
    read_back = json.loads(json.dumps(model, cls=JSONEncoder))
    for note in board["annotations"]["list"]:  # fields of Prometheus' data source, which the model lacks
        for known in ("titleFormat", "textFormat", "tagKeys", "step"):
            assert note.pop(known)
    for panel in grafana.panels(read_back):
        if panel["type"] == "heatmap":  # the model's default
            assert panel["fieldConfig"]["defaults"].pop("custom") == {}
    assert read_back == board


@every_board
def test_panels_lie_on_the_grid_without_gaps_and_without_overlap(board):
    taken = {}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    height = max(y for _, y in taken) + 1
    assert len(taken) == 24 * height


@every_board
def test_ids_and_titles_are_unique_and_each_panel_says_what_it_shows(board):
    ids = [panel["id"] for panel in board["panels"]]
    assert ids == list(range(1, len(ids) + 1))
    titles = [(panel["type"] == "stat", panel["title"]) for panel in grafana.panels(board)]  # a number and its curve
    assert len(set(titles)) == len(titles)
    for panel in grafana.panels(board):
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs)


@every_board
def test_variables_are_defined_before_they_are_used_and_none_is_idle(board):
    defined = []
    for variable in board["templating"]["list"]:
        known = {*defined, *grafana.BUILT_IN}
        assert grafana.used(json.dumps({**variable, "current": None})) <= known, variable["name"]
        defined.append(variable["name"])
    rest = {**board, "templating": {"list": [{**v, "name": "", "current": None} for v in board["templating"]["list"]]}}
    used = grafana.used(json.dumps(rest)) - grafana.BUILT_IN
    assert used == set(defined)


@every_board
def test_data_sources_are_chosen_by_variable(board):
    sources = [board["annotations"]["list"][0]["datasource"]]
    for panel in grafana.panels(board):
        sources += [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    sources += [variable["datasource"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    assert {json.dumps(source) for source in sources} == {'{"type": "prometheus", "uid": "${datasource}"}'}
    kinds = {v["name"]: v["query"] for v in board["templating"]["list"] if v["type"] == "datasource"}
    assert kinds == {"datasource": "prometheus", "jaeger": "jaeger"}


@every_board
def test_each_filter_is_narrowed_by_those_before_it_and_takes_several_or_all(board):
    before = []
    for variable in board["templating"]["list"]:
        if variable["type"] != "query":
            continue
        assert grafana.used(variable["query"]["query"]) == set(before)
        assert variable["multi"] and variable["includeAll"] and variable["current"]["value"] == "$__all"
        before.append(variable["name"])
    assert before[:5] == ["cluster", "project", "experiment", "run", "attempt"]


def test_there_are_filters_for_role_and_rank_where_they_filter_something():
    filters = {uid: {v["name"] for v in board["templating"]["list"]} for uid, board in BOARDS.items()}
    assert {uid for uid, names in filters.items() if "rank" in names} == {uids.STAGES}
    assert {uid for uid, names in filters.items() if "role" in names} == {uids.STAGES, uids.TELEMETRY}


@every_query
def test_every_metric_in_a_query_is_in_the_registry_or_a_named_one_of_others(query):
    known = made_up_series.by_prometheus_name()
    names = grafana.names(put_in(query))
    assert names or query.panel == "Series in Prometheus"
    for name in names:
        base = next((name[: -len(part)] for part in HISTOGRAM_PARTS if name.endswith(part)), name)
        if name in known:
            assert known[name].instrument != "histogram", name
        elif base in known:
            assert known[base].instrument == "histogram", name
        else:
            assert {name, name.replace(".", "_"), base} & made_up_series.OTHERS.keys(), name


@every_query
def test_every_label_in_a_query_is_an_attribute_of_the_registry_or_a_named_one_of_others(query):
    attributes = {prometheus_label(name) for name in (*registry.load().attributes, K8S_CLUSTER_NAME)} | OTHER_LABELS
    expr = put_in(query)
    matched = {matcher.name for selector in grafana.selectors(expr) for matcher in selector.matchers.matchers}
    assert matched <= attributes
    assert grafana.grouping_labels(expr) <= attributes
    assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= attributes


@every_query
def test_a_query_of_runs_is_filtered_by_what_is_chosen(query):
    """Else a choice at the top would change some panels and not others. The Collector serves all runs; DCGM's GPUs are
    joined to those of the runs."""
    for selector in grafana.selectors(put_in(query)):
        matched = {matcher.name for matcher in selector.matchers.matchers}
        if not re.search("otelcol_|DCGM_", selector.name or str(selector.matchers)):
            assert {"verl_run_id", "verl_project_name", "verl_experiment_name"} <= matched


@every_query
def test_a_legend_or_a_column_names_every_label_that_tells_results_apart(query):
    """So none is lost on the way to the eye, and runs and attempts are not added up, but where one number is shown."""
    labels = grafana.result_labels(put_in(query))
    assert labels is not None
    if query.kind == "table":
        (panel,) = (p for p in grafana.panels(BOARDS[query.dashboard]) if p["title"] == query.panel)
        (options,) = (t["options"] for t in panel["transformations"] if t["id"] in ("organize", "groupingToMatrix")
                      if t["options"].keys() != {"excludeByName"})  # fmt: skip
        named = set(options.get("renameByName", {})) | {options.get("rowField"), options.get("columnField")}
        named = {name for name in named if name and not name.startswith("Value")}
    elif query.kind == "annotation":
        named = labels
    else:
        named = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
    assert labels - {"hw_id"} <= named <= labels | {"le"}  # a GPU is named by its host and number
    of_runs = query.dashboard != uids.HARDWARE and "otelcol_" not in query.expr and "ALERTS" not in query.expr
    one_number = query.kind == "stat" and not query.legend
    if of_runs and not one_number and query.panel not in RUNS_TOGETHER:
        assert {"verl_run_id", "verl_run_attempt"} <= labels


def test_panels_that_show_all_runs_as_one_say_so():
    said = {p["title"]: p["description"] for board in BOARDS.values() for p in grafana.panels(board)}
    assert all("together" in said[title] for title in RUNS_TOGETHER)


def test_the_top_rows_are_numbers():
    for uid, board in BOARDS.items():
        first = [panel["type"] for panel in board["panels"] if panel["gridPos"]["y"] == 0]
        assert len(first) >= 4 and set(first) == {"stat"}, uid


def test_links_lead_to_dashboards_that_exist_and_to_jaeger_and_mlflow():
    text = "".join(path.read_text() for path in grafana.DASHBOARDS.iterdir())
    assert set(re.findall(r"/d/([\w-]+)\?", text)) <= set(BOARDS)
    for board in BOARDS.values():
        urls = [link["url"] for link in board["links"]]
        assert any("/explore?" in url and "${jaeger}" in url for url in urls) and "${mlflow}" in urls
        constant = next(v for v in board["templating"]["list"] if v["name"] == "mlflow")
        assert constant["query"] == dashboards.MLFLOW
    table = next(panel for panel in grafana.panels(BOARDS[uids.FLEET]) if panel["title"] == "Runs")
    assert "${__data.fields.Run}" in json.dumps(table["fieldConfig"]["overrides"])
    assert '"Run"' in json.dumps(table["transformations"])


def test_exemplars_are_asked_for_where_a_histogram_has_them_and_open_the_trace_in_jaeger():
    with_exemplars = [query for query in QUERIES if query.exemplars]
    assert {query.dashboard for query in with_exemplars} == {uids.STAGES, uids.ROLLOUT}
    assert all("_bucket{" in query.expr for query in with_exemplars)
    sources = {
        s["uid"]: s for s in yaml.safe_load((PROVISIONING / "datasources" / "verl.yaml").read_text())["datasources"]
    }
    assert {source["type"] for source in sources.values()} == {"prometheus", "jaeger", "alertmanager"}
    (destination,) = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert (destination["name"], sources[destination["datasourceUid"]]["type"]) == ("trace_id", "jaeger")
    assert sources[sources["prometheus"]["jsonData"]["alertmanagerUid"]]["type"] == "alertmanager"
    assert sources["jaeger"]["jsonData"]["tracesToMetrics"]["datasourceUid"] in sources


def test_the_provisioning_fits_the_compose_file():
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    for source in yaml.safe_load((PROVISIONING / "datasources" / "verl.yaml").read_text())["datasources"]:
        assert urllib.parse.urlsplit(source["url"]).hostname in services
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "verl.yaml").read_text())["providers"]
    mounts = [volume.split(":")[:2] for volume in services["grafana"]["volumes"]]
    assert ["./grafana/dashboards", provider["options"]["path"]] in mounts
    assert ["./grafana/provisioning", "/etc/grafana/provisioning"] in mounts


def test_the_spans_queries_are_promql_with_names_of_the_registry():
    (source,) = [
        s
        for s in yaml.safe_load((PROVISIONING / "datasources" / "verl.yaml").read_text())["datasources"]
        if s["uid"] == "jaeger"
    ]
    known = made_up_series.by_prometheus_name()
    for query in source["jsonData"]["tracesToMetrics"]["queries"]:
        expr = query["query"].replace("$$__tags", 'verl_run_id="x"')
        for selector in grafana.selectors(expr):
            assert selector.name in known or selector.name.rpartition("_")[0] in known
    for tag in source["jsonData"]["tracesToMetrics"]["tags"]:
        assert tag["key"] in registry.load().attributes and tag["value"] == prometheus_label(tag["key"])


def test_a_name_that_the_registry_does_not_have_cannot_be_built():
    with pytest.raises(KeyError):
        queries.series("verl.reward.average")
    with pytest.raises(KeyError):
        panels.About.of("verl.reward.average")
    for metric, part in (("verl.stage.duration", ""), ("verl.reward.mean", "sum")):
        with pytest.raises(ValueError):
            queries.series(metric, part=part)


def test_every_unit_of_the_registrys_metrics_that_panels_show_is_one_of_grafana():
    shown = {entry.unit for entry in registry.load().metrics.values() if entry.unit and "{" not in entry.unit}
    assert shown <= panels.UNITS.keys()


def test_the_link_to_jaeger_has_the_run_and_leaves_grafanas_notation_alone():
    url = layout.jaeger_steps("${__data.fields.Run}")
    assert "${jaeger}" in url and "verl.run.id%3D${__data.fields.Run}" in url
    assert not re.search(r'[\s"]', url)


def test_the_command_writes_the_files(tmp_path, capsys):
    folder = tmp_path / "made" / "here"
    assert cli.main(["dashboards", "--output", str(folder), "--mlflow", "https://mlflow.example"]) == 0
    assert capsys.readouterr().out.split() == [str(folder / name) for name in dashboards.files()]
    for path in folder.iterdir():
        board = json.loads(path.read_text())
        assert (
            next(v["query"] for v in board["templating"]["list"] if v["name"] == "mlflow") == "https://mlflow.example"
        )


def test_the_dashboards_link_to_mlflow_without_its_password(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:Zq7planted@mlflow.example:5000")
    assert cli.main(["dashboards", "--output", str(tmp_path)]) == 0
    for path in tmp_path.iterdir():
        assert "https://mlflow.example:5000" in path.read_text()
        assert "Zq7planted" not in path.read_text()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://user:Zq7planted@host/mlflow")
    assert cli.main(["dashboards", "--output", str(tmp_path)]) == 2
    assert "--mlflow postgresql://host/mlflow: a browser" in capsys.readouterr().err


def test_the_command_says_what_is_wrong(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert cli.main(["dashboards", "--output", str(tmp_path), "--mlflow", "sqlite:///x"]) == 2
    assert "http://" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main(["dashboards", "--output", str(tmp_path / "file" / "below")]) == 1
    assert "cannot write" in capsys.readouterr().err
    for name in [name for name in sys.modules if name.startswith(("grafana_foundation_sdk", "verl_otel.dashboards"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("verl_otel.dashboards")
    monkeypatch.setitem(sys.modules, "grafana_foundation_sdk", None)
    assert cli.main(["dashboards", "--output", str(tmp_path)]) == 2
    assert "pip install 'verl-otel[dashboards]'" in capsys.readouterr().err


def test_the_fan_out_of_made_up_series_is_one_series_for_each_combination():
    request = made_up_series.payload("made-up", 1, ["hw_gpu_utilization_ratio", "vllm:num_requests_running"], 0, 30)
    names = [m["name"] for r in request["resourceMetrics"] for s in r["scopeMetrics"] for m in s["metrics"]]
    assert sorted(names) == ["hw.gpu.utilization", "vllm:num_requests_running"]
    for resource, scope in itertools.product(request["resourceMetrics"], range(1)):
        for metric in resource["scopeMetrics"][scope]["metrics"]:
            points = metric["gauge"]["dataPoints"]
            seen = {(json.dumps(p["attributes"]), p["timeUnixNano"]) for p in points}
            assert len(seen) == len(points)

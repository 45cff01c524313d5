"""What all dashboards have in common: variables, links, annotations, and how one becomes JSON."""

import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, unquote

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from verl_otel.dashboards import queries
from verl_otel.semconv import attributes as attr
from verl_otel.semconv.prometheus import prometheus_label

PROMETHEUS = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "verl"

_ALL = models.VariableOption(selected=True, text="All", value="$__all")
_ANY, _ANY_RANK = ".*", "[0-9]+"  # `all` is no rank

_VARIABLES = {
    **{
        variable: (attribute, queries.name_of(queries.PRESENCE), _ANY)
        for attribute, variable in queries.CHOSEN_RUN.items()
    },
    "role": (attr.PROCESS_ROLE, queries.name_of(queries.PRESENCE), _ANY),
    "rank": (attr.RANK, queries.name_of("verl.worker.duration", "count"), _ANY_RANK),
}
"""Name -> the attribute that it chooses, the series that have it, and the regular expression for All."""


class _FiringAlerts(Builder[models.AnnotationQuery], models.AnnotationQuery):
    """Firing alerts as marks on all panels, with the fields of Prometheus' data source that the SDK's model lacks."""

    def __init__(self) -> None:
        run = prometheus_label(attr.RUN_ID)
        super().__init__(
            name="Firing alerts",
            datasource=PROMETHEUS,
            icon_color="red",
            expr=f"max by (alertname, severity, {run}, stage, rank) ({queries.firing()})",
        )

    def build(self) -> models.AnnotationQuery:
        return self

    def to_json(self) -> dict[str, object]:
        shown = {"titleFormat": "{{alertname}}", "textFormat": "{{verl_run_id}} {{stage}} {{rank}}"}
        return {**super().to_json(), **shown, "tagKeys": "severity", "step": "30s"}


def board(
    uid: str, title: str, description: str, mlflow: str, filters: Sequence[str], window: bool = True
) -> builders.Dashboard:
    """A dashboard without panels.

    Args:
        mlflow: URL of MLflow, for the links to it.
        filters: names of `_VARIABLES`; each is filtered by those before it.
        window: whether a query has `$window`.
    """
    start = (
        builders.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .time("now-3h", "now")
        .timezone("browser")
        .refresh("30s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .editable()
        .with_variable(builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            builders.DatasourceVariable("jaeger").label("Jaeger").type("jaeger").hide(models.VariableHide.HIDE_VARIABLE)
        )
        .with_variable(builders.ConstantVariable("mlflow").label("MLflow").value(mlflow))
    )
    for position, name in enumerate(filters):
        start.with_variable(_filter(name, filters[:position]))
    if window:
        start.with_variable(_window())
    start.link(
        builders.DashboardLink("verl dashboards")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )
    start.link(_link("Steps in Jaeger", jaeger_steps()))
    start.link(_link("MLflow", "${mlflow}"))
    return start.annotation(_FiringAlerts())


def to_json(built: builders.Dashboard) -> str:
    """The text of the dashboard's file; panels are numbered in their order."""
    result = built.build()
    for number, panel in enumerate(result.panels or [], start=1):
        panel.id_val = number
    return json.dumps(result, cls=JSONEncoder, indent=2, ensure_ascii=False) + "\n"


def run_link(uid: str, run: str) -> str:
    """URL of another dashboard for one run, at the same time range."""
    return f"/d/{uid}?${{__url_time_range}}&${{datasource:queryparam}}&var-run={run}"


def jaeger_steps(run: str = "") -> str:
    """URL of Grafana's Explore with the traces of steps; of one run, if `run` is given."""
    query: dict[str, Any] = {"refId": "A", "queryType": "search", "service": "verl-trainer", "operation": "verl.step"}
    query["datasource"] = {"type": "jaeger", "uid": "${jaeger}"}
    if run:
        query["tags"] = f"{attr.RUN_ID}={run}"
    times = {"from": "${__from}", "to": "${__to}"}
    panes = {"steps": {"datasource": "${jaeger}", "queries": [query], "range": times}}
    encoded = quote(json.dumps(panes, separators=(",", ":")), safe="")
    # Where Grafana puts values, its own notation stays as it is.
    return "/explore?schemaVersion=1&panes=" + re.sub(
        r"%24%7B(.*?)%7D", lambda found: f"${{{unquote(found[1])}}}", encoded
    )


def _filter(name: str, before: Sequence[str]) -> Builder[models.VariableModel]:
    attribute, name_of_series, all_value = _VARIABLES[name]
    found = queries.select(name_of_series, {}, {_VARIABLES[other][0]: other for other in before})
    newest_first = attribute == attr.RUN_ID
    return (
        builders.QueryVariable(name)
        .label(name.capitalize())
        .description(f"{attribute}; any, if All")
        .datasource(PROMETHEUS)
        .query({"query": f"label_values({found}, {prometheus_label(attribute)})", "refId": "StandardVariableQuery"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_DESC if newest_first else models.VariableSort.NUMERICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(all_value)
        .current(_ALL)
    )


def _window() -> Builder[models.VariableModel]:
    return (
        builders.IntervalVariable("window")
        .label("Window")
        .description("Over which rates and means of counters are taken; automatic: a thirtieth of the time range")
        .values("1m,5m,15m,1h,6h")
        .auto(True)
        .min_interval("1m")
        .step_count(30)
        .current(models.VariableOption(selected=True, text="auto", value="$__auto_interval_window"))
    )


def _link(title: str, url: str) -> builders.DashboardLink:
    return (
        builders.DashboardLink(title).type(models.DashboardLinkType.LINK).icon("external link").url(url)
    ).target_blank(True)

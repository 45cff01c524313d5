"""Dashboards as Grafana reads them: variables put in, queries sent to Prometheus. The test bed has no Grafana."""

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"

BUILT_IN = {"__range", "__rate_interval", "__interval", "__from", "__to", "__url_time_range", "__data"}
"""Variables that Grafana has itself, of those that the dashboards use."""
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)[^}]*\}|([A-Za-z_]\w*))")


@dataclass(frozen=True)
class Query:
    """A query of a panel; `instant`, or over the time range."""

    dashboard: str
    panel: str
    kind: str
    ref: str
    expr: str
    legend: str
    instant: bool
    exemplars: bool

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.panel} {self.ref}"


def load(folder: Path = DASHBOARDS) -> dict[str, dict[str, Any]]:
    """uid -> dashboard."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {dashboard["uid"]: dashboard for dashboard in found}


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The panels that show data."""
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


def queries_of(dashboard: Mapping[str, Any]) -> list[Query]:
    """Every query of every panel, and of the annotations."""
    found = [
        Query(
            dashboard["uid"],
            panel["title"],
            panel["type"],
            target["refId"],
            target["expr"],
            target.get("legendFormat", ""),
            bool(target.get("instant")),
            bool(target.get("exemplar")),
        )
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]
    for note in dashboard["annotations"]["list"]:
        found.append(Query(dashboard["uid"], note["name"], "annotation", "A", note["expr"], "", False, False))
    return found


def used(text: str) -> set[str]:
    """Names of the variables in a text."""
    return {match[1] or match[2] for match in _VARIABLE.finditer(text)}


def all_values(dashboard: Mapping[str, Any]) -> dict[str, str]:
    """Each variable as it is when `All` is chosen."""
    return {variable["name"]: variable.get("allValue", "") for variable in dashboard["templating"]["list"]}


def put_in(text: str, values: Mapping[str, str], seconds: float = 3600, window: str = "1m") -> str:
    """A query with its variables' values, for a time range of so many seconds."""
    times = {"__range": f"{seconds:.0f}s", "__rate_interval": window, "__interval": "15s", "window": window}
    return _VARIABLE.sub(lambda match: {**values, **times}[match[1] or match[2]], text)


def selectors(expr: str) -> Iterator[Any]:
    """The vector selectors of a query (PromQL, variables put in)."""
    yield from (node for node in _nodes(promql_parser.parse(expr)) if isinstance(node, promql_parser.VectorSelector))


def names(expr: str) -> set[str]:
    """The metrics of a query, in Prometheus' names; both of a name that is matched with a dot or an underscore."""
    found = set()
    for selector in selectors(expr):
        patterns = [matcher.value for matcher in selector.matchers.matchers if matcher.name == "__name__"]
        found |= {selector.name} if selector.name else {p.replace("[._]", c) for p in patterns for c in "._"}
    return found


def grouping_labels(expr: str) -> set[str]:
    """The labels of every `by (...)` of a query."""
    nodes = [node for node in _nodes(promql_parser.parse(expr)) if isinstance(node, promql_parser.AggregateExpr)]
    return {label for node in nodes if node.modifier for label in node.modifier.labels}


def result_labels(expr: str) -> set[str] | None:
    """The labels that the result of a query has; None where the query does not say."""
    return _labels(promql_parser.parse(expr))


def _labels(node: Any) -> set[str] | None:
    if isinstance(node, promql_parser.AggregateExpr):
        return set(node.modifier.labels) if node.modifier else set()
    if isinstance(node, promql_parser.BinaryExpr):
        sides = [labels for labels in (_labels(node.lhs), _labels(node.rhs)) if labels is not None]
        return sides[0] if sides else None
    if isinstance(node, promql_parser.Call):
        found = [labels for labels in map(_labels, node.args) if labels is not None]
        return found[0] - {"le"} if found else None
    inner = getattr(node, "expr", None)
    return _labels(inner) if inner is not None else None


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("lhs", "rhs", "expr", "args", "vector_selector"):
        inner = getattr(node, name, None)
        for one in inner if isinstance(inner, list) else [inner] * (inner is not None):
            yield from _nodes(one)


class Prometheus:
    """The query API, as Grafana's data source uses it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **parameters: Any) -> Any:
        """Raises ValueError with Prometheus' words if it refuses."""
        body = urllib.parse.urlencode(parameters, doseq=True)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{body}", timeout=30) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode()}") from None

    def run(self, query: Query, values: Mapping[str, str], start: float, end: float, step: float = 5) -> list[Any]:
        """The result of a panel's query: series with `value` (instant) or `values`."""
        expr = put_in(query.expr, values, end - start)
        if query.instant:
            return self.ask("query", query=expr, time=end)["result"]
        return self.ask("query_range", query=expr, start=start, end=end, step=step)["result"]

    def options(self, variable: Mapping[str, Any], values: Mapping[str, str], start: float, end: float) -> list[str]:
        """What a variable offers: its `label_values(selector, label)`."""
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert match, variable
        found = self.ask(
            f"label/{match[2]}/values", **{"match[]": put_in(match[1], values), "start": start, "end": end}
        )
        return list(found)

"""The kinds of panels that the dashboards are made of. Unit and description of a panel are those of its metric."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from verl_otel.dashboards import queries
from verl_otel.dashboards.layout import PROMETHEUS
from verl_otel.semconv import attributes as attr
from verl_otel.semconv.prometheus import prometheus_label

OF_RUN = "{{verl_run_id}} #{{verl_run_attempt}}"
"""Legend of a line: run and attempt."""

UNITS = {"s": "s", "ms": "ms", "1": "percentunit", "By": "bytes", "MiBy": "mbytes", "GiBy": "gbytes", "W": "watt"}
UNITS |= {"Cel": "celsius", "J": "joule", "{token}/s": "suffix: tok/s"}

RUN_COLUMNS = {attr.RUN_ID: "Run", attr.RUN_ATTEMPT: "Attempt"}
"""Of a table with a row for each run and attempt."""

Steps = Sequence[tuple[float | None, str]]
"""Thresholds: from this value on, this colour; the first from minus infinity (None)."""

LOST: Steps = ((None, "green"), (1, "red"))
"""For counts of what should not happen."""


@dataclass(frozen=True)
class Query:
    """PromQL and how its lines are called. With `exemplars`, the points that lead to traces are drawn too."""

    expr: str
    legend: str = OF_RUN
    exemplars: bool = False


@dataclass(frozen=True)
class Column:
    """A column of a table: a query with one row for each row of the table."""

    title: str
    expr: str
    unit: str = ""
    thresholds: Steps = ()
    mappings: Sequence[models.ValueMapping] = ()
    decimals: int | None = None


@dataclass(frozen=True)
class About:
    """What a panel shows: the registry's description and unit of a metric, or words and a unit of Grafana."""

    text: str
    unit: str = "short"

    @classmethod
    def of(cls, metric: str, note: str = "", unit: str = "") -> "About":
        entry = queries.known(metric)
        text = f"{entry.brief}. {note}".strip() if note else f"{entry.brief}."
        return cls(f"{text}\n\n`{metric}`", unit or UNITS.get(entry.unit, "short"))


def lines(
    title: str,
    shown: Sequence[Query],
    about: About,
    width: int = 8,
    height: int = 8,
    stacked: bool = False,
    thresholds: Steps = (),
    upto: float | None = None,
) -> timeseries.Panel:
    """Curves over time.

    Args:
        stacked: as areas on top of each other.
        thresholds: drawn as lines.
        upto: the upper end of the axis; the lower is 0 then.
    """
    panel = (
        timeseries.Panel()
        .legend(
            common.VizLegendOptions()
            .display_mode(kinds.LegendDisplayMode.LIST)
            .placement(kinds.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull"])
        )
        .tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING))
        .line_width(1)
        .show_points(kinds.VisibilityMode.AUTO)
        .span_nulls(True)
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A")).fill_opacity(60)
    if upto is not None:
        panel.min(0).max(upto)
    if thresholds:
        panel.thresholds(_thresholds(thresholds)).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(kinds.GraphTresholdsStyleMode.DASHED)
        )
    return _common(panel, title, about, width, height).targets(_targets(shown))


def number(
    title: str,
    shown: Sequence[Query],
    about: About,
    width: int = 4,
    thresholds: Steps = (),
    decimals: int | None = None,
    graph: bool = False,
    none: str = "no data",
) -> stat.Panel:
    """The newest value, large; of several lines, one number for each.

    Args:
        graph: with its curve behind it; the query is one over time then.
        none: what is shown without a value.
    """
    reduce = common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False)
    panel = (
        stat.Panel()
        .reduce_options(reduce)
        .graph_mode(kinds.BigValueGraphMode.AREA if graph else kinds.BigValueGraphMode.NONE)
        .color_mode(kinds.BigValueColorMode.VALUE)
        .text_mode(kinds.BigValueTextMode.AUTO)
        .thresholds(_thresholds(thresholds or ((None, "text"),)))
        .no_value(none)
    )
    if decimals is not None:
        panel.decimals(decimals)
    return _common(panel, title, about, width, 4).targets(_targets(shown, instant=not graph))


def bars(title: str, shown: Sequence[Query], about: About, width: int = 8, height: int = 8) -> bargauge.Panel:
    """The newest values as horizontal bars."""
    panel = (
        bargauge.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
        .orientation(kinds.VizOrientation.HORIZONTAL)
        .display_mode(kinds.BarGaugeDisplayMode.BASIC)
        .min(0)
        .thresholds(_thresholds(((None, "blue"),)))
        .no_value("none")
    )
    return _common(panel, title, about, width, height).targets(_targets(shown, instant=True))


def rows(
    title: str,
    keys: Mapping[str, str],
    columns: Sequence[Column],
    about: About,
    width: int = 24,
    height: int = 8,
    links: Mapping[str, Sequence[builders.DashboardLink]] | None = None,
) -> table.Panel:
    """A table with a row for each combination of labels.

    Args:
        keys: attribute -> title of the columns that tell the rows apart; every query gives these labels only.
        columns: one query each.
        links: title of a column -> where its cells lead.
    """
    panel = table.Panel().show_header(True).no_value("none")
    targets = [
        _target(Query(column.expr, ""), chr(ord("A") + index), instant=True).format(PromQueryFormat.TABLE)
        for index, column in enumerate(columns)
    ]
    values = {"Value" if len(columns) == 1 else f"Value #{chr(ord('A') + i)}": c for i, c in enumerate(columns)}
    labels = {prometheus_label(attribute): title for attribute, title in keys.items()}
    order = [*labels, *values]
    organize = {
        "excludeByName": {"Time": True},
        "indexByName": {name: index for index, name in enumerate(order)},
        "renameByName": {**labels, **{name: column.title for name, column in values.items()}},
    }
    panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(models.DataTransformerConfig(id_val="organize", options=organize))
    for column in columns:
        panel.override_by_name(column.title, _properties(column))
    for column_title, leads in (links or {}).items():
        panel.override_by_name(column_title, [models.DynamicConfigValue("links", [link.build() for link in leads])])
    return _common(panel, title, about, width, height).targets(targets)


def matrix(title: str, row: str, column: str, expr: str, about: About, width: int = 12, height: int = 8) -> table.Panel:
    """A table of one query's values: a label's values downwards, another's across, the cells coloured."""
    panel = table.Panel().show_header(True).no_value("")
    panel.with_transformation(
        models.DataTransformerConfig(id_val="organize", options={"excludeByName": {"Time": True}})
    )
    panel.with_transformation(
        models.DataTransformerConfig(
            id_val="groupingToMatrix",
            options={"columnField": column, "rowField": row, "valueField": "Value", "emptyValue": "null"},
        )
    )
    panel.color_scheme(builders.FieldColor().mode(models.FieldColorModeId.CONTINUOUS_BL_YL_RD))
    panel.override_by_regexp(
        "^(?!.*\\\\).*$", [models.DynamicConfigValue("custom.cellOptions", {"type": "color-background"})]
    )
    target = _target(Query(expr, ""), "A", instant=True).format(PromQueryFormat.TABLE)
    return _common(panel, title, about, width, height).targets([target])


def heat(
    title: str, query: Query, about: About, width: int = 12, height: int = 8, buckets: bool = False
) -> heatmap.Panel:
    """Colour over time: a row for each line of the query, or for each bucket of a histogram."""
    panel = (
        heatmap.Panel()
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
        .cell_gap(1)
        .show_value(kinds.VisibilityMode.NEVER)
        .cell_values(heatmap.CellValues().unit(about.unit))
        .show_legend()
        .show_tooltip()
    )
    if buckets:
        panel.rows_frame(heatmap.RowsHeatmapOptions().layout(kinds.HeatmapCellLayout.LE))
    target = _target(query, "A", instant=False)
    target.format(PromQueryFormat.HEATMAP if buckets else PromQueryFormat.TIME_SERIES).interval("1m")
    return _common(panel, title, About(about.text), width, height).targets([target])


def link(title: str, url: str, new_tab: bool = False) -> builders.DashboardLink:
    """Where a cell leads."""
    return builders.DashboardLink(title).url(url).target_blank(new_tab)


def states(*ranges: tuple[float | None, float | None, str, str]) -> list[models.ValueMapping]:
    """Words for ranges of a value: (from, to, text, colour)."""
    return [
        models.RangeMap(models.DashboardRangeMapOptions(low, high, models.ValueMappingResult(text, color, index=index)))
        for index, (low, high, text, color) in enumerate(ranges)
    ]


def _common(panel: Any, title: str, about: About, width: int, height: int) -> Any:
    return panel.title(title).description(about.text).unit(about.unit).span(width).height(height).datasource(PROMETHEUS)


def _target(query: Query, ref: str, instant: bool) -> Dataquery:
    target = Dataquery().expr(query.expr).ref_id(ref).datasource(PROMETHEUS)
    if query.legend:
        target.legend_format(query.legend)
    if query.exemplars:
        target.exemplar(True)
    return target.instant() if instant else target.range()


def _targets(shown: Sequence[Query], instant: bool = False) -> list[Dataquery]:
    return [_target(query, chr(ord("A") + index), instant) for index, query in enumerate(shown)]


def _thresholds(steps: Steps) -> builders.ThresholdsConfig:
    thresholds = [models.Threshold(value, color) for value, color in steps]
    return builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(thresholds)


def _properties(column: Column) -> list[models.DynamicConfigValue]:
    found = [models.DynamicConfigValue("unit", column.unit or "short")]
    if column.decimals is not None:
        found.append(models.DynamicConfigValue("decimals", column.decimals))
    if column.thresholds:
        found.append(models.DynamicConfigValue("thresholds", _thresholds(column.thresholds).build()))
    if column.mappings:
        found.append(models.DynamicConfigValue("mappings", list(column.mappings)))
    if column.thresholds or column.mappings:
        found.append(models.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}))
    return found

"""Pictures of the Grafana dashboards, drawn from their JSON, not by Grafana: it cannot be had on the test bed.

    python tests/testbed/dashboard_pictures.py [--steps 12] [--output docs/images]

Trains on the test bed through the stack, sends what a CPU run cannot have (made_up_series.py), runs the query of every
panel against Prometheus, and draws the panels at their places with plotly; Chromium takes the pictures.
"""

import argparse
import html
import json
import math
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bed
import grafana
import made_up_series
from plotly.offline import get_plotlyjs

from verl_otel.stack.stack import Stack

RUN, PROJECT, EXPERIMENT = "20261130-081500-3fa9c1", "arithmetic", "tiny-ppo"
WIDTH, ROW, GAP, TOP = 1600, 30, 6, 92
COLORS = ["#73BF69", "#F2CC0C", "#5794F2", "#FF9830", "#F2495C", "#B877D9", "#8AB8FF", "#FFA6B0", "#CA95E5", "#96D98D"]
NAMED = {
    "green": "#73BF69",
    "orange": "#FF9830",
    "red": "#F2495C",
    "blue": "#5794F2",
    "purple": "#B877D9",
    "text": "#D8D9DA",
}
NAMED["transparent"] = "rgba(0,0,0,0)"
SHOWN: dict[str, dict[str, str]] = {"verl-hardware": {}, "verl-fleet": {}}
"""uid -> what is chosen; otherwise the real run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="steps of the training run (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=bed.ROOT / "docs" / "images")
    parser.add_argument("--prometheus", metavar="URL", help="draw what this one has, instead of training")
    parser.add_argument("--end", type=float, default=time.time(), help="with --prometheus: Unix time of the right edge")
    parser.add_argument("--seconds", type=float, default=300, help="with --prometheus: the time range")
    parser.add_argument("--run", default=RUN, help="with --prometheus: the run (default: %(default)s)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.prometheus:
        start = options.end - options.seconds
        draw_all(grafana.Prometheus(options.prometheus), options.run, start, options.end, options.output)
        return
    with tempfile.TemporaryDirectory(prefix="vd", dir="/tmp") as folder, Stack(Path(folder) / "stack") as stack:
        start = time.time()
        run = bed.run(
            Path(folder) / "run",
            [
                *bed.PPO_WITH_CRITIC_AND_REFERENCE,
                *bed.FAST_SAMPLER,
                f"trainer.project_name={PROJECT}",
                f"trainer.experiment_name={EXPERIMENT}",
            ],
            steps=options.steps,
            fork_server=bed.fork_server(bed.PYTHON),
            environment={"OTEL_EXPORTER_OTLP_ENDPOINT": stack.url("otlp_http"), "VERL_OTEL_RUN_ID": RUN},
            timeout=1500,
        )
        assert run.returncode == 0, run.output[-3000:]
        end = time.time() - 2
        names = {name for board in grafana.load().values() for name in _metrics_of(board)}
        # The stack's Collector is real; and the made-up run goes on.
        names = {name for name in names if not name.startswith(("otelcol_", "verl_run_end_time"))}
        request = made_up_series.payload("made-up", 1, names, start, end)
        made_up_series.send(stack.url("otlp_http") + "/v1/metrics", request)
        time.sleep(5)
        draw_all(grafana.Prometheus(stack.url("prometheus")), RUN, start, end, options.output)


def _metrics_of(board: Mapping[str, Any]) -> set[str]:
    known = {**made_up_series.by_prometheus_name(), **made_up_series.OTHERS}
    found = set()
    for query in grafana.queries_of(board):
        for name in grafana.names(grafana.put_in(query.expr, grafana.all_values(board))):
            found.add(name if name in known else re.sub("_(bucket|sum|count)$", "", name))
    return found & known.keys()


def draw_all(prometheus: grafana.Prometheus, run: str, start: float, end: float, output: Path) -> None:
    """One PNG for each dashboard."""
    for uid, board in grafana.load().items():
        chosen = SHOWN.get(uid, {"run": run})
        picture = Picture(prometheus, board, {**grafana.all_values(board), **chosen}, start, end)
        path = output / f"dashboard-{uid.removeprefix('verl-')}.png"
        picture.save(path)
        print(path, flush=True)


class Picture:
    """A dashboard as an HTML page of the size of its grid."""

    def __init__(
        self,
        prometheus: grafana.Prometheus,
        board: Mapping[str, Any],
        values: Mapping[str, str],
        start: float,
        end: float,
    ) -> None:
        self.prometheus, self.board, self.values, self.start, self.end = prometheus, board, values, start, end
        self.queries = grafana.queries_of(board)
        self.figures: dict[str, Any] = {}

    def save(self, path: Path) -> None:
        drawn = "".join(self._panel(panel) for panel in self.board["panels"])
        chosen = " ".join(
            f"<span class=var>{v.get('label') or v['name']}</span><span class=val>{self._chosen(v['name'])}</span>"
            for v in self.board["templating"]["list"]
            if v["type"] in ("query", "interval")
        )
        head = f"<h1>{html.escape(self.board['title'])}</h1><div id=vars>{chosen}</div>"
        figures = json.dumps(self.figures)
        body = f"<div id=head>{head}</div>{drawn}<script>const figures={figures};{_SCRIPT}</script>"
        page = f"<meta charset=utf-8><style>{_STYLE}</style><script>{get_plotlyjs()}</script>{body}"
        height = TOP + ROW * max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in self.board["panels"]) + 8
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "page.html").write_text(page)
            _screenshot(Path(folder) / "page.html", path, height)

    def _chosen(self, name: str) -> str:
        value = self.values.get(name, "")
        return "auto" if name == "window" else "All" if value in (".*", "[0-9]+", "") else value

    def _panel(self, panel: Mapping[str, Any]) -> str:
        place = panel["gridPos"]
        cell = WIDTH / 24
        size = f"left:{place['x'] * cell + GAP / 2:.0f}px;top:{TOP + place['y'] * ROW}px;"
        size += f"width:{place['w'] * cell - GAP:.0f}px;height:{place['h'] * ROW - GAP}px"
        title = html.escape(panel["title"])
        if panel["type"] == "row":
            return f"<div class=row style='{size}'>&#9662; {title}</div>"
        shown = [q for q in self.queries if q.panel == panel["title"] and q.kind == panel["type"]]
        window = f"{max(60, (self.end - self.start) / 30):.0f}s"
        found = [self._run(query, window) for query in shown]
        draw: Callable[..., str] = getattr(self, f"_{panel['type']}")
        inner = draw(panel, shown, found) if any(found) else "<div class=none>No data</div>"
        return f"<div class=panel style='{size}'><div class=title>{title}</div>{inner}</div>"

    def _run(self, query: grafana.Query, window: str) -> list[Any]:
        expr = grafana.put_in(query.expr, self.values, self.end - self.start, window)
        if query.instant:
            return self.prometheus.ask("query", query=expr, time=self.end)["result"]
        step = max(1, (self.end - self.start) / 200)
        return self.prometheus.ask("query_range", query=expr, start=self.start, end=self.end, step=step)["result"]

    def _plot(self, panel: Mapping[str, Any], data: list[Any], layout: Mapping[str, Any]) -> str:
        identity = f"p{panel['id']}"
        self.figures[identity] = {"data": data, "layout": layout}
        return f"<div class=plot id={identity}></div>"

    def _timeseries(self, panel, shown, found) -> str:
        defaults = panel["fieldConfig"]["defaults"]
        custom, unit = defaults.get("custom", {}), defaults["unit"]
        stacked = custom.get("stacking", {}).get("mode") == "normal"
        data = []
        for query, result in zip(shown, found, strict=True):
            for series in result:
                times, values = _curve(series)
                data.append(
                    {
                        "x": times,
                        "y": values,
                        "name": self._legend(query, series["metric"]),
                        "mode": "lines" if len([v for v in values if v is not None]) > 2 else "lines+markers",
                        "line": {"width": 1.3, "color": COLORS[len(data) % len(COLORS)]},
                        "connectgaps": True,
                        **({"stackgroup": "a"} if stacked else {}),
                    }
                )
            if query.exemplars:
                data += self._exemplars(query)
        shapes = [
            {
                **_LINE,
                "y0": step["value"],
                "y1": step["value"],
                "line": {"color": _color(step["color"]), "dash": "dash"},
            }
            for step in defaults.get("thresholds", {}).get("steps", [])
            if custom.get("thresholdsStyle", {}).get("mode") == "dashed" and step["value"] is not None
        ]
        span = {"range": [defaults["min"], defaults["max"]]} if "max" in defaults else {}
        return self._plot(panel, data, _layout(unit, shapes=shapes, **span))

    def _exemplars(self, query: grafana.Query) -> list[Any]:
        expr = grafana.put_in(query.expr, self.values)
        answer = self.prometheus.ask("query_exemplars", query=expr, start=self.start, end=self.end)
        points = [(e["timestamp"] * 1000, float(e["value"])) for series in answer for e in series["exemplars"]]
        marker = {"symbol": "diamond", "size": 5, "color": "#5794F2"}
        x, y = [at for at, _ in points], [value for _, value in points]
        return [{"x": x, "y": y, "mode": "markers", "marker": marker, "name": "exemplars"}]

    def _heatmap(self, panel, shown, found) -> str:
        buckets = panel["options"].get("rowsFrame", {}).get("layout") == "le"
        named = [(self._legend(shown[0], series["metric"]), *_curve(series)) for series in found[0]]
        if buckets:
            named.sort(key=lambda row: float(row[0].replace("+Inf", "inf")))
            below = [(name, times, values) for name, times, values in named]
            named = []
            for index, (name, times, values) in enumerate(below):
                previous = below[index - 1][2] if index else [0] * len(values)
                own = [None if a is None or b is None else a - b for a, b in zip(values, previous, strict=False)]
                if any(own):
                    named.append((name, times, own))
        data = {
            "type": "heatmap",
            "x": max((times for _, times, _ in named), key=len),
            "y": [name for name, _, _ in named],
            "z": [values for _, _, values in named],
            "colorscale": [[0, "#221407"], [0.5, "#d94801"], [1, "#fdd0a2"]],
            "colorbar": {"thickness": 8},
        }
        layout = _layout("short")
        layout["yaxis"] = {**layout["yaxis"], "type": "category", "automargin": True}
        return self._plot(panel, [data], layout)

    def _stat(self, panel, shown, found) -> str:
        defaults = panel["fieldConfig"]["defaults"]
        tiles = []
        for query, result in zip(shown, found, strict=True):
            for series in result:
                values = [v for v in _curve(series)[1] if v is not None]
                if values:
                    color = _by_thresholds(values[-1], defaults.get("thresholds", {}).get("steps", []))
                    text = _format(values[-1], defaults["unit"], defaults.get("decimals"))
                    several = sum(map(len, found)) > 1
                    name = f"<small>{html.escape(self._legend(query, series['metric']))}</small>" if several else ""
                    spark = _spark(values) if not query.instant and not several else ""
                    tiles.append(f"<div class=tile style='color:{color}'>{name}{text}{spark}</div>")
        return f"<div class='tiles n{min(len(tiles), 4)}'>{''.join(tiles[:4])}</div>"

    def _bargauge(self, panel, shown, found) -> str:
        bars = []
        for query, result in zip(shown, found, strict=True):
            for series in result:
                value = float(series["value"][1])
                name, unit = self._legend(query, series["metric"]), panel["fieldConfig"]["defaults"]["unit"]
                bar = f"<i style='width:{min(1, value) * 60:.0f}%'></i>{_format(value, unit)}"
                bars.append(f"<div class=bar><span>{html.escape(name)}</span>{bar}</div>")
        return "".join(bars)

    def _table(self, panel, shown, found) -> str:
        transformations = {t["id"]: t["options"] for t in panel["transformations"]}
        if "groupingToMatrix" in transformations:
            return self._matrix(panel, transformations["groupingToMatrix"], found[0])
        organize = transformations["organize"]
        order = sorted(organize["indexByName"], key=organize["indexByName"].get)
        merged: dict[str, dict[str, Any]] = {}
        for query, result in zip(shown, found, strict=True):
            name = "Value" if len(shown) == 1 else f"Value #{query.ref}"
            for series in result:
                key = json.dumps(series["metric"], sort_keys=True)
                merged.setdefault(key, dict(series["metric"]))[name] = float(series["value"][1])
        head = "".join(f"<th>{html.escape(organize['renameByName'][name])}</th>" for name in order)
        rows = []
        for row in merged.values():
            cells = "".join(self._cell(panel, organize["renameByName"][name], row.get(name)) for name in order)
            rows.append(f"<tr>{cells}</tr>")
        return f"<table><tr>{head}</tr>{''.join(rows[:12])}</table>"

    def _cell(self, panel: Mapping[str, Any], title: str, value: Any) -> str:
        found = {p["id"]: p.get("value") for p in _override(panel, title)}
        if value is None:
            return f"<td class=dim>{panel['fieldConfig']['defaults'].get('noValue', '')}</td>"
        if isinstance(value, str):
            return f"<td class={'link' if found.get('links') else 'label'}>{html.escape(value)}</td>"
        for mapping in found.get("mappings") or []:
            options = mapping["options"]
            low, high = (options.get(end) for end in ("from", "to"))
            if (low is None or value >= low) and (high is None or value <= high):
                result = options["result"]
                return f"<td style='color:{_color(result['color'])}'>{result['text']}</td>"
        color = _by_thresholds(value, (found.get("thresholds") or {}).get("steps", []))
        return f"<td style='color:{color}'>{_format(value, found.get('unit', 'short'), found.get('decimals'))}</td>"

    def _matrix(self, panel: Mapping[str, Any], options: Mapping[str, str], result: Sequence[Any]) -> str:
        row, column = options["rowField"], options["columnField"]
        values = {(s["metric"][row], s["metric"][column]): float(s["value"][1]) for s in result}
        columns, top = sorted({c for _, c in values}), max(values.values())
        head = "".join(f"<th>{c}</th>" for c in columns)
        body = ""
        for name in sorted({r for r, _ in values}):
            cells = ""
            for c in columns:
                value = values.get((name, c))
                share = 0 if value is None else value / top
                green = 90 + 60 * (1 - abs(share - 0.5) * 2)
                color = f"rgba({50 + 190 * share:.0f},{green:.0f},{200 - 160 * share:.0f},.8)"
                cells += "<td></td>" if value is None else f"<td style='background:{color}'>{_format(value, 's')}</td>"
            body += f"<tr><td>{html.escape(name)}</td>{cells}</tr>"
        return f"<table><tr><th>{row}\\{column}</th>{head}</tr>{body}</table>"

    def _legend(self, query: grafana.Query, labels: Mapping[str, str]) -> str:
        return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), query.legend) or query.panel


def _override(panel: Mapping[str, Any], title: str) -> list[Any]:
    return [
        prop
        for override in panel["fieldConfig"]["overrides"]
        if override["matcher"]["options"] == title
        for prop in override["properties"]
    ]


def _curve(series: Mapping[str, Any]) -> tuple[list[float], list[float | None]]:
    points = series.get("values") or [series["value"]]
    values = [float(value) for _, value in points]
    return [float(at) * 1000 for at, _ in points], [value if math.isfinite(value) else None for value in values]


def _color(name: str) -> str:
    return NAMED.get(name, name)


def _by_thresholds(value: float, steps: Sequence[Mapping[str, Any]]) -> str:
    passed = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return _color(passed[-1] if passed else "text")


def _format(value: float, unit: str, decimals: float | None = None) -> str:
    """As Grafana would say it, roughly."""
    if unit == "percentunit":
        return f"{value * 100:.{int(decimals or 0) if value > 0.1 else 1}f}%"
    if unit in ("bytes", "Bps"):
        for name in ("B", "KiB", "MiB", "GiB"):
            if abs(value) < 1024 or name == "GiB":
                return f"{value:.3g} {name}{'/s' if unit == 'Bps' else ''}"
            value /= 1024
    if unit == "watt" and abs(value) >= 1000:
        return f"{value / 1000:.3g} kW"
    if unit == "s":
        for limit, factor, name in ((0.001, 1e6, "µs"), (1, 1e3, "ms"), (60, 1, "s"), (3600, 1 / 60, "min")):
            if abs(value) < limit:
                return f"{value * factor:.3g} {name}"
        return f"{value / 3600:.3g} h"
    suffix = {"watt": " W", "celsius": " °C", "joule": " J", "reqps": " req/s", "ops": " ops/s"}.get(unit, "")
    suffix = " " + unit.removeprefix("suffix: ") if unit.startswith("suffix:") else suffix
    if decimals is not None:
        return f"{value:,.{int(decimals)}f}{suffix}"
    if unit == "none" or value == int(value):
        return f"{value:,.0f}{suffix}"
    return f"{value:.3g}{suffix}"


def _spark(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    points = " ".join(
        f"{index / max(1, len(values) - 1) * 100:.1f},{30 - (value - low) / ((high - low) or 1) * 26:.1f}"
        for index, value in enumerate(values)
    )
    line = (
        f"<polyline points='{points}' fill=none stroke=currentColor stroke-width=1 vector-effect=non-scaling-stroke />"
    )
    return f"<svg viewBox='0 0 100 32' preserveAspectRatio=none>{line}</svg>"


_LINE = {"type": "line", "xref": "paper", "x0": 0, "x1": 1}


def _layout(unit: str, shapes: Sequence[Any] = (), **yaxis: Any) -> dict[str, Any]:
    ticks = {"percentunit": {"tickformat": ".0%"}, "bytes": {"tickformat": ".2s", "ticksuffix": "B"}}
    axis = {"gridcolor": "#2c3235", "zeroline": False, "color": "#9fa7b3", "tickfont": {"size": 10}}
    extra = ticks.get(unit, {"ticksuffix": {"s": " s", "watt": " W", "celsius": " °C"}.get(unit, "")})
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 48, "r": 8, "t": 4, "b": 20},
        "xaxis": {**axis, "type": "date"},
        "yaxis": {**axis, **extra, **yaxis},
        "legend": {"orientation": "h", "y": -0.16, "font": {"size": 9, "color": "#c7d0d9"}},
        "showlegend": True,
        "shapes": list(shapes),
    }


def _screenshot(page: Path, path: Path, height: int) -> None:
    browser = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if b), None)
    assert browser, "install chromium to take pictures"
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        command += [f"--user-data-dir={profile}", f"--window-size={WIDTH},{height}", "--virtual-time-budget=15000"]
        command += [f"--screenshot={path}", page.as_uri()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=180)


_STYLE = """
body {margin: 0; background: #111217; color: #D8D9DA; font: 12px Inter, "DejaVu Sans", sans-serif; position: relative}
#head {padding: 10px 14px} h1 {font-size: 17px; margin: 0 0 10px}
.var {background: #22252b; padding: 5px 8px; margin-left: 6px; color: #8e8e8e}
.val {background: #0b0c0e; padding: 5px 8px}
.row {position: absolute; font-size: 14px; font-weight: 600; padding: 4px; box-sizing: border-box}
.panel {position: absolute; background: #181b1f; border: 1px solid #25272c; border-radius: 2px; box-sizing: border-box;
  overflow: hidden}
.title {font-weight: 600; padding: 5px 8px; white-space: nowrap}
.plot {position: absolute; inset: 26px 2px 2px 2px} .none {text-align: center; color: #6e7580; margin-top: 8%}
.tiles {position: absolute; inset: 26px 4px 2px 4px; display: flex; gap: 4px}
.tile {flex: 1; text-align: center; font-size: 27px; font-weight: 600; position: relative; padding-top: 10px;
  white-space: nowrap}
.n3 .tile, .n4 .tile {font-size: 15px}
.tile small {display: block; font-size: 8px; color: #9fa7b3; font-weight: 400}
.tile svg {position: absolute; left: 0; bottom: 0; width: 100%; height: 28px; opacity: .6}
table {width: 100%; border-collapse: collapse; font-size: 12px} td, th {text-align: left; padding: 4px 8px;
  border-bottom: 1px solid #25272c; white-space: nowrap} th {color: #8AB8FF} .dim {color: #5c636e}
.link {color: #6E9FFF; text-decoration: underline}
.bar {display: flex; align-items: center; gap: 8px; padding: 4px 8px} .bar span {width: 160px; text-align: right}
.bar i {background: #5794F2; height: 14px; display: block}
"""
_SCRIPT = """
for (const [id, figure] of Object.entries(figures)) {
  const place = document.getElementById(id);
  figure.layout.width = place.clientWidth; figure.layout.height = place.clientHeight;
  Plotly.newPlot(place, figure.data, figure.layout, {staticPlot: true});
}
"""

if __name__ == "__main__":
    main()

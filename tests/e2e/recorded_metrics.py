"""Metrics of a recorded run."""

import json
from pathlib import Path
from typing import Any

from verl_otel.recording import reader


def last_points(folder: Path) -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Metric -> the last point with a value of each series of each process: (attributes, point)."""
    found: dict[str, dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]]] = {}
    for path in sorted(folder.glob("*.metrics.jsonl")):
        for line in path.read_text().splitlines():
            for group in json.loads(line)["resourceMetrics"]:
                for metric in (m for scope in group["scopeMetrics"] for m in scope["metrics"]):
                    data = metric.get("gauge") or metric.get("histogram") or metric["sum"]
                    for point in (point for point in data["dataPoints"] if not point.get("flags")):
                        said = reader.attributes_of(point["attributes"])
                        found.setdefault(metric["name"], {})[path.name, str(sorted(said.items()))] = said, point
    return {name: list(series.values()) for name, series in found.items()}

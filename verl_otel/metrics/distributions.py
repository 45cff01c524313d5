"""Histograms of many values at once.

The SDK takes one value at a call, about 10 us each; a step has thousands of samples. Here an array is counted into the
buckets by numpy, and the counts are added to what the SDK has collected when it exports (`verl_otel.export.providers`).
Always cumulative since the start of the process.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.metrics.export import Metric as MetricOfSdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from verl_otel import forks
from verl_otel.semconv.registry import Metric

if TYPE_CHECKING:
    import numpy

MAX_SERIES = 1000
"""Series of all histograms of a process; more are not recorded."""

Labels = tuple[tuple[str, str], ...]


class _Series:
    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.count, self.sum = 0, 0.0
        self.min, self.max = math.inf, -math.inf


class Distributions:
    """The histograms of this process.

    Args:
        resource, scope: to which the exported points belong.
    """

    def __init__(self, resource: Resource, scope: InstrumentationScope) -> None:
        self._resource = resource
        self._scope = scope
        self._lock = forks.lock(self, "_lock")
        self._start = time.time_ns()
        self._series: dict[Metric, dict[Labels, _Series]] = {}
        self._size = 0

    def record(self, metric: Metric, labels: Labels, values: "numpy.ndarray[Any, Any]") -> bool:
        """Add finite values, an array of one dimension. False if there are too many series already."""
        import numpy

        bounds = metric.boundaries
        buckets = numpy.bincount(numpy.searchsorted(bounds, values, side="left"), minlength=len(bounds) + 1)
        total, low, high = float(values.sum(dtype=float)), float(values.min()), float(values.max())
        with self._lock:
            of_metric = self._series.setdefault(metric, {})
            series = of_metric.get(labels)
            if series is None:
                if self._size >= MAX_SERIES:
                    return False
                series = of_metric[labels] = _Series(len(bounds) + 1)
                self._size += 1
            series.counts = [a + b for a, b in zip(series.counts, buckets.tolist(), strict=True)]
            series.count += len(values)
            series.sum += total
            series.min, series.max = min(series.min, low), max(series.max, high)
        return True

    def extend(self, data: MetricsData) -> MetricsData:
        """`data`, with the points of these histograms."""
        now = time.time_ns()
        with self._lock:
            metrics = [self._metric(metric, found, now) for metric, found in self._series.items() if found]
        if not metrics:
            return data
        return with_metrics(data, self._resource, self._scope, metrics)

    def _metric(self, metric: Metric, found: dict[Labels, _Series], now: int) -> MetricOfSdk:
        points = [
            HistogramDataPoint(
                attributes=dict(labels),
                start_time_unix_nano=self._start,
                time_unix_nano=now,
                count=series.count,
                sum=series.sum,
                bucket_counts=series.counts,
                explicit_bounds=metric.boundaries,
                min=series.min,
                max=series.max,
            )
            for labels, series in found.items()
        ]
        return MetricOfSdk(metric.name, metric.brief, metric.unit, Histogram(points, AggregationTemporality.CUMULATIVE))


def with_metrics(
    data: MetricsData, resource: Resource, scope: InstrumentationScope, metrics: Sequence[MetricOfSdk]
) -> MetricsData:
    """`data`, with more metrics: where it has the resource and the scope already, in there, since OTLP's encoder keeps
    only the last group of the same."""
    groups = list(data.resource_metrics)
    place = next((i for i, group in enumerate(groups) if group.resource == resource), None)
    if place is None:
        place = len(groups)
        groups.append(ResourceMetrics(resource, [], ""))
    scopes = list(groups[place].scope_metrics)
    known = next((i for i, found in enumerate(scopes) if found.scope == scope), None)
    if known is None:
        scopes.append(ScopeMetrics(scope, metrics, ""))
    else:
        scopes[known] = replace(scopes[known], metrics=[*scopes[known].metrics, *metrics])
    groups[place] = replace(groups[place], scope_metrics=scopes)
    return MetricsData(groups)

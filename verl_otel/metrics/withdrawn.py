"""Series of gauges that have ended: OTLP has a point without a value for them, so that backends show nothing at once.

Without it Prometheus, which is pushed to, shows the last value for five minutes more. Each exporter that can encode
such points (`verl_otel.export.otlp_metrics`) gets each of them once.
"""

import itertools
import math
import time
from collections.abc import Iterable

from opentelemetry.sdk.metrics.export import Gauge, MetricsData, NumberDataPoint
from opentelemetry.sdk.metrics.export import Metric as MetricOfSdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from verl_otel import forks
from verl_otel.metrics.distributions import Labels, with_metrics
from verl_otel.semconv.registry import Metric

MAX_SERIES = 5000
"""Series that are kept; the oldest go first, which the exporters usually have had long since."""

NO_VALUE = math.nan
"""Stands for no value until it is encoded. The SDK has no such points: it refuses what is not finite."""

_MILLISECOND = 1_000_000
_numbers = itertools.count(1)


class Withdrawn:
    """The series of this process that have been collected, have ended, and have no value again.

    Args:
        resource, scope: to which the exported points belong.
    """

    def __init__(self, resource: Resource, scope: InstrumentationScope) -> None:
        self._resource = resource
        self._scope = scope
        self._lock = forks.lock(self, "_lock")
        self._collected: dict[str, set[Labels]] = {}
        self._ended: dict[tuple[str, Labels], tuple[int, int, Metric]] = {}
        self._last = self._taken = 0

    def collected(self, name: str, series: Iterable[Labels]) -> None:
        """These series of a metric are about to be exported."""
        with self._lock:
            self._collected.setdefault(name, set()).update(series)

    def add(self, metric: Metric, labels: Labels) -> bool:
        """A series ends now. False if there are too many, and the end of another one is told to nobody."""
        with self._lock:
            collected = self._collected.get(metric.name, set())
            if labels not in collected:
                return True
            collected.remove(labels)
            self._last = next(_numbers)
            self._ended[metric.name, labels] = self._last, time.time_ns(), metric
            if len(self._ended) <= MAX_SERIES:
                return True
            number, *_ = self._ended.pop(next(iter(self._ended)))
            return number <= self._taken

    def discard(self, metric: Metric, labels: Labels) -> None:
        """A series has a value, maybe again."""
        with self._lock:
            if self._ended.pop((metric.name, labels), None) is not None:
                self._collected[metric.name].add(labels)

    def extend(self, data: MetricsData, after: int) -> tuple[MetricsData, int]:
        """`data` with a point without value for each series that has ended, and the number of the last one.

        Args:
            after: the number that the same exporter was given the last time, at first 0.
        """
        with self._lock:
            self._taken = self._last
            last = max(self._last, after)
            new = [(metric, labels, at) for (_, labels), (n, at, metric) in self._ended.items() if n > after]
        if not new:
            return data, last
        shown = _times(data, {metric.name for metric, *_ in new})
        points: dict[Metric, list[NumberDataPoint]] = {}
        for metric, labels, at in new:
            # After the last value, which may be of this very export, by Prometheus' clock.
            end = _next_millisecond(max(at, shown.get((metric.name, labels), 0)))
            points.setdefault(metric, []).append(NumberDataPoint(dict(labels), 0, end, NO_VALUE))
        metrics = [MetricOfSdk(metric.name, metric.brief, metric.unit, Gauge(of)) for metric, of in points.items()]
        return with_metrics(data, self._resource, self._scope, metrics), last


def _times(data: MetricsData, wanted: set[str]) -> dict[tuple[str, Labels], int]:
    """(metric, labels) -> time of its point, of the metrics that are wanted."""
    return {
        (metric.name, tuple(sorted((point.attributes or {}).items()))): point.time_unix_nano
        for group in data.resource_metrics
        for scope in group.scope_metrics
        for metric in scope.metrics
        if metric.name in wanted
        for point in metric.data.data_points
    }


def _next_millisecond(nanoseconds: int) -> int:
    return (nanoseconds // _MILLISECOND + 1) * _MILLISECOND

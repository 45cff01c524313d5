"""The instruments of a process, made from the registry when they are first used.

The one way by which numbers become metrics. The level of a metric's module decides whether it is recorded at all.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Meter, Observation

from verl_otel import forks
from verl_otel.config import Levels
from verl_otel.metrics.distributions import Distributions, Labels
from verl_otel.metrics.withdrawn import Withdrawn
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.semconv.registry import Metric

if TYPE_CHECKING:
    import numpy

MAX_SERIES = 20_000
"""Series of all gauges of a process; more are dropped and counted."""


class Instruments:
    """Gauges, counters and histograms by the registry's metrics.

    Gauges show the last value of each series at every export, until it is withdrawn: they are asynchronous instruments,
    since a step can take longer than the five minutes for which Prometheus shows a sample.

    Args:
        distributions: takes many values at once; without it (a meter provider that is not ours) the SDK takes them one
            by one.
        withdrawn: is told which series have ended; likewise.
    """

    def __init__(
        self,
        meter: Meter,
        levels: Levels,
        distributions: Distributions | None = None,
        withdrawn: Withdrawn | None = None,
    ) -> None:
        self._meter = meter
        self._levels = levels
        self._distributions = distributions
        self._withdrawn = withdrawn
        self._lock = forks.lock(self, "_lock")
        self._values: dict[str, dict[Labels, float]] = {}
        self._size = 0
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}

    def wants(self, metric: Metric) -> bool:
        """Whether the level of the metric's module is such that it is recorded."""
        return self._levels.wants(metric.module, metric.level)

    def set(self, metric: Metric, labels: Mapping[str, str], value: float) -> None:
        """Show `value`, which is finite, for a series of a gauge."""
        if not self.wants(metric):
            return
        key = _key(labels)
        with self._lock:
            new = metric.name not in self._values
            series = self._values.setdefault(metric.name, {})
            full = key not in series and self._size >= MAX_SERIES
            if not full:
                self._size += key not in series
                series[key] = value
                if self._withdrawn is not None:
                    self._withdrawn.discard(metric, key)
        if new:
            name, unit, brief = metric.arguments
            self._meter.create_observable_gauge(name, [self._callback(name)], unit, brief)
        if full:
            self.dropped("metrics", "too_many_series")

    def withdraw(self, metric: Metric, labels: Mapping[str, str]) -> None:
        """Show nothing for a series of a gauge from now on."""
        key, told = _key(labels), True
        with self._lock:
            if self._values.get(metric.name, {}).pop(key, None) is None:
                return
            self._size -= 1
            if self._withdrawn is not None:
                told = self._withdrawn.add(metric, key)
        if not told:
            self.dropped("metrics", "too_many_withdrawn")

    def observe(self, metric: Metric, callback: Callable[[], Mapping[Any, float]], *label_names: str) -> None:
        """A metric, but no histogram, whose values `callback` gives at each export, by the values of its labels."""
        if not self.wants(metric):
            return

        def observations(_: CallbackOptions) -> Iterable[Observation]:
            for key, value in callback().items():
                values = key if isinstance(key, tuple) else (key,)
                yield Observation(value, dict(zip(label_names, values, strict=True)))

        create = {
            "counter": self._meter.create_observable_counter,
            "updowncounter": self._meter.create_observable_up_down_counter,
            "gauge": self._meter.create_observable_gauge,
        }[metric.instrument]
        name, unit, brief = metric.arguments
        create(name, [observations], unit, brief)

    def add(self, metric: Metric, labels: Mapping[str, str], amount: float = 1) -> None:
        """Add to a series of a counter."""
        if not self.wants(metric):
            return
        counter = self._counters.get(metric.name)
        if counter is None:
            counter = self._counters[metric.name] = self._meter.create_counter(*metric.arguments)
        counter.add(amount, labels)

    def dropped(self, signal: str, reason: str, amount: int = 1) -> None:
        """Count telemetry that was left out."""
        self.add(names.DROPPED, {attr.SIGNAL: signal, attr.REASON: reason}, amount)

    def record(self, metric: Metric, labels: Mapping[str, str], value: float, context: Context | None = None) -> None:
        """Add one value to a histogram, with `context` for the exemplar."""
        if self.wants(metric):
            self._histogram(metric).record(value, labels, context)

    def record_all(self, metric: Metric, labels: Mapping[str, str], values: "numpy.ndarray[Any, Any]") -> None:
        """Add the finite values of an array of one dimension to a histogram; the others are counted."""
        if not self.wants(metric) or not len(values):
            return
        import numpy

        finite = numpy.isfinite(values)
        bad = len(values) - int(finite.sum())
        if bad:
            values = values[finite]
            self.add(names.NON_FINITE, {**labels, attr.METRIC: metric.name, attr.VERL_KEY: ""}, bad)
        if not len(values):
            return
        if self._distributions is None:
            histogram = self._histogram(metric)
            taken = values[values >= 0]  # the SDK refuses the others, with a warning for each
            for value in taken.tolist():
                histogram.record(value, labels)
            if len(taken) < len(values):
                self.dropped("metrics", "negative_value", len(values) - len(taken))
        elif not self._distributions.record(metric, _key(labels), values):
            self.dropped("metrics", "too_many_series")

    def _histogram(self, metric: Metric) -> Histogram:
        histogram = self._histograms.get(metric.name)
        if histogram is None:
            histogram = self._histograms[metric.name] = self._meter.create_histogram(
                *metric.arguments, explicit_bucket_boundaries_advisory=metric.boundaries
            )
        return histogram

    def _callback(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            with self._lock:
                series = list(self._values[name].items())
                if self._withdrawn is not None:
                    self._withdrawn.collected(name, self._values[name])
            return [Observation(value, dict(labels)) for labels, value in series]

        return observe


def _key(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted(labels.items()))

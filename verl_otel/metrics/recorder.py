"""From `Tracking.log` to metrics and step events, in the background.

The training thread only hands over a shallow copy. What verl-otel has measured itself for the step (the ranks, the
groups, users' own metrics) is waited for a moment, then the `verl.step` event is emitted with all of it.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry._logs import Logger, SeverityNumber
from opentelemetry.context import Context

from verl_otel import border, events
from verl_otel.background import Background
from verl_otel.metrics import derived
from verl_otel.metrics.instruments import Instruments
from verl_otel.metrics.step_values import StepValues
from verl_otel.metrics.values import kind_of, to_number
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.semconv.metrics import Series

MAX_KEYS = 5000
"""Different keys of verl that become metrics; more are only in the step events, and counted."""

WAIT_FOR_VALUES = 1.0
"""Seconds that a step event waits for what other processes have measured for the step."""

_EVERY_RANK = {attr.RANK: attr.ALL_RANKS, attr.STAGE: "step", attr.MODEL_TYPE: "none"}


@dataclass(frozen=True)
class Logged:
    """One call of `Tracking.log`.

    `rollout_is_timed`: verl's timer `gen` is generation, not a wait. `on_non_finite(attributes)` is told of each value
    that is NaN or infinite, `on_recorded()` when all values have become metrics.
    """

    data: dict[str, Any]
    step: Any
    time_ns: int
    context: Context
    rollout_is_timed: bool = False
    on_non_finite: Callable[[dict[str, Any]], None] = lambda _: None
    on_recorded: Callable[[], None] = lambda: None


class Recorder:
    """See the module. `submit` never blocks and never raises.

    Args:
        unknown_keys: how many keys that the registry does not know become metrics.
        on_recorded: called when a step's event has been emitted.
    """

    def __init__(
        self,
        background: Background,
        instruments: Instruments,
        logger: Logger,
        step_values: StepValues,
        event_attributes: Mapping[str, Any],
        unknown_keys: int,
        on_recorded: Callable[[], Any],
    ) -> None:
        self._background = background
        self._instruments = instruments
        self._logger = logger
        self._step_values = step_values
        self._event_attributes = dict(event_attributes)
        self._unknown_left = unknown_keys
        self._on_recorded = on_recorded
        self._series: dict[str, list[Series]] = {}
        self._skipped_keys: set[str] = set()
        self._derived: list[Series] = []
        self._derived_of: int | None = None

    def submit(self, logged: Logged) -> None:
        """Hand over one call of `Tracking.log`."""
        self._background.defer(self._record, logged)

    def ended(self) -> None:
        """After all is sent: in a process that stays, no next step is late any more."""
        self._background.defer(self._instruments.withdraw, names.STEP_LAST_TIMESTAMP, _EVERY_RANK)

    def finish(self) -> None:
        """At the end of training: emit what users have logged since the last step's event."""
        self._background.defer(self._finish)

    def _finish(self) -> None:
        self._step_values.collect()
        then = self._emit_rest if self._step_values.by_number else self._finish_below
        self._background.hold(self._step_values.complete, WAIT_FOR_VALUES, then)

    def _finish_below(self) -> None:
        """fully_async's rollouter has had the time between to ask its workers."""
        self._step_values.collect()
        self._background.hold(self._step_values.complete, WAIT_FOR_VALUES, self._emit_rest)

    def _emit_rest(self) -> None:
        for step, body in self._step_values.take_rest().items():
            self._emit_late(Logged({}, step, time.time_ns(), Context()), step, body)

    def _record(self, logged: Logged) -> None:
        body: dict[str, float | int] = {}
        for key, value in logged.data.items():
            key = str(key).encode("utf-8", "replace").decode()  # a lone surrogate would cost the whole batch
            number = to_number(value)
            if number is None:
                self._skip(key, kind_of(value))
                continue
            body[key] = number
            try:
                self._set(key, number, logged)
            except Exception:
                border.caught(f"recording metrics such as {key[:80]!r}")
        logged.on_recorded()
        self._instruments.set(names.STEP_LAST_TIMESTAMP, _EVERY_RANK, logged.time_ns / 1e9)
        step = _step_number(logged)
        generated = self._step_values.peek(step, names.ROLLOUT_TOKENS.name) if logged.rollout_is_timed else None
        self._derive(body, step, generated)
        epoch = body.get("training/epoch")
        self._step_values.collect()
        if self._step_values.complete():
            self._emit(logged, step, epoch, body)
        else:
            self._background.hold(self._step_values.complete, WAIT_FOR_VALUES, self._emit, logged, step, epoch, body)
            self._on_recorded()  # metrics need not wait for the event

    def _derive(self, body: Mapping[str, float], step: int | None, generated: float | None) -> None:
        """Show what is computed from the values of a step, and nothing of what only earlier steps had.

        A step may have several calls: one without the step's time is taken for the step's only if it is the first that
        times stages.
        """
        shown: list[Series] = []
        for series, number in derived.of_step(body, generated):
            self._instruments.set(series.metric, series.attributes, number)
            shown.append(series)
        if derived.STEP_TIME in body or (derived.times_a_step(body) and (step is None or step != self._derived_of)):
            for series in self._derived:
                if series not in shown:
                    self._instruments.withdraw(series.metric, series.attributes)
            self._derived, self._derived_of = shown, step
        else:
            self._derived += [series for series in shown if series not in self._derived]

    def _emit(self, logged: Logged, step: int | None, epoch: Any, body: dict[str, float | int]) -> None:
        taken = self._step_values.take(step, epoch)
        # verl's own value wins over ours of the same name.
        self._emit_step(logged, step, {**taken.pop(step), **body})
        for earlier, late in taken.items():  # made in an earlier step, arrived after its event
            self._emit_late(logged, earlier, late)
        self._on_recorded()

    def _emit_late(self, logged: Logged, step: int | None, values: Mapping[str, float]) -> None:
        # The step's event may have verl's own value of the same name: it stays.
        body = {key: value for key, value in values.items() if key not in self._series}
        if body:
            self._emit_step(logged, step, body)

    def _emit_step(self, logged: Logged, step: int | None, body: Mapping[str, float | int]) -> None:
        attributes = dict(self._event_attributes)
        if step is not None:
            attributes[attr.STEP_NUMBER] = step
        events.emit(self._logger, attr.EVENT_STEP, body, attributes, context=logged.context, time_ns=logged.time_ns)

    def _set(self, key: str, number: float, logged: Logged) -> None:
        for series in self._series_of(key):
            if not math.isfinite(number):
                # The SDK refuses values that are not finite; showing the last good one instead would be a lie.
                self._instruments.withdraw(series.metric, series.attributes)
            elif series.metric.instrument == "counter":
                if number > 0:
                    self._instruments.add(series.metric, series.attributes, number)
            else:
                self._instruments.set(series.metric, series.attributes, number)
        if not math.isfinite(number):
            self._non_finite(key, number, logged)

    def _non_finite(self, key: str, number: float, logged: Logged) -> None:
        (first, *_) = self._series_of(key) or [Series(names.NON_FINITE, {**_EVERY_RANK, attr.VERL_KEY: key})]
        attributes = non_finite_attributes(first.metric.name, first.attributes)
        self._instruments.add(names.NON_FINITE, attributes)
        what: dict[str, Any] = {**attributes, attr.VALUE: repr(float(number))}
        logged.on_non_finite(what)
        step = _step_number(logged)
        if step is not None:
            what[attr.STEP_NUMBER] = step
        emit_non_finite(self._logger, {**self._event_attributes, **what}, logged.context)

    def _series_of(self, key: str) -> list[Series]:
        series = self._series.get(key)
        if series is not None:
            return series
        series = names.series_of(key)
        if len(self._series) >= MAX_KEYS or (not series[0].known and self._unknown_left <= 0):
            self._instruments.dropped("metrics", "too_many_keys")
            return []
        self._unknown_left -= not series[0].known
        self._series[key] = series
        return series

    def _skip(self, key: str, kind: str) -> None:
        if len(self._skipped_keys) < MAX_KEYS // 10:
            self._skipped_keys.add(key[:200])
        shown = key[:200] if key[:200] in self._skipped_keys else "(other)"
        self._instruments.add(names.SKIPPED, {**_EVERY_RANK, attr.VERL_KEY: shown, attr.VALUE_KIND: kind})


def _step_number(logged: Logged) -> int | None:
    number = to_number(logged.step)
    return int(number) if number is not None and math.isfinite(number) else None


def non_finite_attributes(metric: str, labels: Mapping[str, str]) -> dict[str, str]:
    """The attributes of `verl.metric.non_finite`, for a series of a metric."""
    return {
        attr.METRIC: metric,
        attr.RANK: labels[attr.RANK],
        attr.STAGE: labels[attr.STAGE],
        attr.MODEL_TYPE: labels[attr.MODEL_TYPE],
        attr.VERL_KEY: labels.get(attr.VERL_KEY, ""),
    }


def emit_non_finite(logger: Logger, attributes: Mapping[str, Any], context: Context) -> None:
    """Emit the `verl.non_finite` event, a warning in the trace of the step."""
    events.emit(logger, attr.EVENT_NON_FINITE, {}, attributes, context=context, severity=SeverityNumber.WARN)

"""The background recorder: takes the dictionaries of `Tracking.log` and turns them into metrics and step events.

The training thread only puts a shallow copy into a bounded queue. A daemon thread converts, records, emits the
`verl.step` event, and asks for a flush, so that a step's values leave the process when it is logged. Durations of
stages and calls are recorded by the same thread.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry._logs import Logger
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Counter, Meter, Observation

from verl_otel import border, events
from verl_otel.metrics.values import kind_of, to_number
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names

MAX_PENDING = 10_000
"""What may wait for the recorder; more is dropped and counted."""

INTERVAL = 0.05
"""Seconds between two looks of the recorder at what is pending."""

MAX_KEYS = 5000
"""Different keys of verl that become metrics; more are only in the step events, and counted."""

_Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Logged:
    """One call of `Tracking.log`."""

    data: dict[str, Any]
    step: Any
    time_ns: int
    context: Context


class Gauges:
    """Gauges that show the last value of each series at every export, until it is withdrawn.

    Asynchronous instruments, since a step can take longer than the five minutes for which Prometheus shows a sample.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._lock = threading.Lock()
        self._values: dict[str, dict[_Labels, float]] = {}

    def set(self, name: str, unit: str, description: str, labels: Mapping[str, str], value: float) -> None:
        with self._lock:
            new = name not in self._values
            self._values.setdefault(name, {})[tuple(sorted(labels.items()))] = value
        if new:
            self._meter.create_observable_gauge(name, [self._callback(name)], unit, description)

    def withdraw(self, name: str, labels: Mapping[str, str]) -> None:
        """Show nothing for a series from now on."""
        with self._lock:
            self._values.get(name, {}).pop(tuple(sorted(labels.items())), None)

    def _callback(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            with self._lock:
                return [Observation(value, dict(labels)) for labels, value in self._values.get(name, {}).items()]

        return observe


class Recorder:
    """See the module. `submit` never blocks and never raises; `drained` is for the end of the run."""

    def __init__(
        self,
        meter: Meter,
        logger: Logger,
        gauges: Gauges,
        dropped: Counter,
        event_attributes: Mapping[str, Any],
        on_recorded: Callable[[], Any],
    ) -> None:
        self._logger = logger
        self._gauges = gauges
        self._dropped = dropped
        self._event_attributes = dict(event_attributes)
        self._on_recorded = on_recorded
        self._non_finite = meter.create_counter(*names.NON_FINITE)
        self._skipped = meter.create_counter(*names.SKIPPED)
        self._metrics: dict[str, names.Metric] = {}
        self._pending: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._working = False
        self._thread = threading.Thread(target=self._run, name="verl-otel-recorder", daemon=True)
        self._thread.start()

    def submit(self, logged: Logged) -> None:
        """Hand over one call of `Tracking.log`."""
        self.defer(self._record, logged)
        self.defer(self._on_recorded)

    def defer(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Have the recorder call `work(*arguments)`, after what was handed over before. Never blocks, never raises.

        The recorder is not woken: it would want the interpreter just when the training thread needs it.
        """
        if len(self._pending) < MAX_PENDING:
            self._pending.append((work, arguments))
        else:
            self._dropped.add(1, {"signal": "metrics", "reason": "recorder_queue_full"})

    def drained(self, timeout: float) -> bool:
        """Wait until everything submitted so far is recorded, `timeout` seconds at most."""
        deadline = time.monotonic() + timeout
        while self._pending or self._working:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True

    def _run(self) -> None:
        while True:
            self._working = True
            while self._pending:
                work, arguments = self._pending.popleft()
                try:
                    work(*arguments)
                except Exception:
                    border.caught("recording in the background")
            self._working = False
            time.sleep(INTERVAL)

    def _record(self, logged: Logged) -> None:
        body: dict[str, float | int] = {}
        for key, value in logged.data.items():
            key = str(key).encode("utf-8", "replace").decode()  # a lone surrogate would cost the whole batch
            number = to_number(value)
            if number is None:
                self._skipped.add(1, {**_EVERY_RANK, attr.VERL_KEY: key[:200], "kind": kind_of(value)})
                continue
            body[key] = number
            try:
                self._set(key, number)
            except Exception:
                border.caught(f"recording metrics such as {key[:80]!r}")
        self._gauges.set(*names.STEP_LAST_TIMESTAMP, {**_EVERY_RANK}, logged.time_ns / 1e9)
        attributes = dict(self._event_attributes)
        step = to_number(logged.step)
        if step is not None and math.isfinite(step):
            attributes[attr.STEP_NUMBER] = int(step)
        events.emit(
            self._logger,
            attr.EVENT_STEP,
            body,
            attributes,
            context=logged.context,
            time_ns=logged.time_ns,
        )

    def _set(self, key: str, number: float) -> None:
        metric = self._metrics.get(key)
        if metric is None:
            if len(self._metrics) >= MAX_KEYS:
                self._dropped.add(1, {"signal": "metrics", "reason": "too_many_keys"})
                return
            metric = self._metrics[key] = names.metric_of(key)
        if math.isfinite(number):
            self._gauges.set(metric.name, metric.unit, metric.description, metric.attributes, number)
        else:
            # The SDK refuses values that are not finite; showing the last good one instead would be a lie.
            self._gauges.withdraw(metric.name, metric.attributes)
            self._non_finite.add(1, metric.attributes)


_EVERY_RANK = {attr.RANK: attr.ALL_RANKS, attr.STAGE: "step", attr.MODEL_TYPE: "none"}

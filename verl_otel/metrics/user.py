"""Metrics that users log themselves, in any process of a run: `verl_otel.log_scalar` and its like.

What is logged becomes a metric of the process that logged it (`verl.user.<module>.<name>`), with rank, stage and
model_type; and, added up over the processes of the run, values of the step's event, from which MLflow, files and
reports are fed.
"""

import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opentelemetry import baggage
from opentelemetry._logs import Logger
from opentelemetry.context import Context, get_current

from verl_otel import border, events, forks
from verl_otel.background import Background
from verl_otel.identity import AGENT_LOOP, REWARD_WORKER, ROLLOUT_SERVER, TRAINER, Identity
from verl_otel.metrics.instruments import Instruments
from verl_otel.metrics.recorder import emit_non_finite, non_finite_attributes
from verl_otel.metrics.step_values import Reported, Summary
from verl_otel.metrics.values import to_number
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.semconv.registry import Metric
from verl_otel.semconv.stages import STAGES

if TYPE_CHECKING:
    import numpy

MAX_NAMES = 200
"""Different names that one process may log; more are counted as dropped."""

MAX_TEXTS_PER_STEP = 16
MAX_TEXT = 4096
"""Characters of a text; the rest is cut off."""

KINDS = ("gauge", "counter", "histogram")
FREQUENCIES = ("step", "epoch", "episode")
SCOPES = ("rank", "global")

_NAME = re.compile(r"[a-zA-Z][\w.-]*(/[\w.-]+)+", re.ASCII)
_MAX_NAME = 120

_WHERE = {
    AGENT_LOOP: ("rollout", "rollout"),
    ROLLOUT_SERVER: ("rollout", "rollout"),
    REWARD_WORKER: ("reward", "reward"),
}


@dataclass(frozen=True)
class Declared:
    """What is known of a user's metric."""

    metric: Metric
    frequency: str = "step"
    scope: str = "rank"


class UserMetrics:
    """See the module. What it is given is checked; a wrong name or value is reported once, and never raises."""

    def __init__(
        self,
        background: Background,
        instruments: Instruments,
        logger: Logger,
        identity: Identity,
        event_attributes: dict[str, Any],
    ) -> None:
        self._background = background
        self._instruments = instruments
        self._logger = logger
        self._identity = identity
        self._event_attributes = event_attributes
        self._lock = forks.lock(self, "_lock")
        self._declared: dict[str, Declared] = {}
        self._kinds: dict[str, str] = {}
        self._summaries: dict[tuple[str, int | None, str], Summary] = {}
        self._texts: dict[int | None, int] = {}
        self._forked = False
        """Whether this is a forked child, whose metrics are not exported, and which nobody asks."""
        forks.in_child(self._in_child)
        self.step: Any = lambda: None
        """Gives the step in which this process is, where it knows it by itself (the trainer)."""

    def declare(self, name: str, kind: str, unit: str, description: str, frequency: str, scope: str) -> None:
        """Say once what a metric is, before it is logged."""
        if not _legal(name):
            return
        for what, value, legal in (
            ("kind", kind, KINDS),
            ("frequency", frequency, FREQUENCIES),
            ("scope", scope, SCOPES),
        ):
            if not isinstance(value, str) or value not in legal:
                border.warn_once(f"declare {name} {what}", "the %s of %r is one of %s, not %s", what, name,
                                 ", ".join(legal), repr(value)[:200])  # fmt: skip
                return
        self._admit(name, Declared(names.user_metric(name, kind, str(unit), str(description)), frequency, scope))

    def scalar(self, name: str, value: Any) -> None:
        """Log one number."""
        number = None if _on_device(value) else to_number(value)
        if number is None:
            border.warn_once(
                f"log {str(name)[:80]}",
                "log_scalar(%r, ...): %s is not a number on the CPU",
                str(name)[:200],
                type(value).__name__,
            )
            return
        declared = self._known(name, "gauge")
        if declared is None:
            return
        context = get_current()
        labels, step = self._labels(declared, name, context), self._step(context)
        if math.isfinite(number):
            self._summarize(declared, name, labels, step, Summary(1, number, number, number))
        self._background.defer(self._scalar, declared, labels, number, context, step)

    def histogram(self, name: str, values: Iterable[Any]) -> None:
        """Log many numbers of one distribution."""
        import numpy

        try:
            array = _array(values)
        except (TypeError, ValueError):
            what = str(name)[:80]
            border.warn_once(f"log {what}", "log_histogram(%r, ...): the values are not numbers on the CPU", what)
            return
        declared = self._known(name, "histogram")
        if declared is None or not len(array):
            return
        context = get_current()
        labels, step = self._labels(declared, name, context), self._step(context)
        finite = array[numpy.isfinite(array)]
        if len(finite):
            summary = Summary(len(finite), float(finite.sum()), float(finite.min()), float(finite.max()))
            self._summarize(declared, name, labels, step, summary)
        bad = len(array) - len(finite)
        if bad:
            self._background.defer(self._not_finite, declared, labels, context, step, bad)
        if declared.metric.instrument != "histogram":
            border.warn_once(f"log {name}", "%r was declared as a %s; only the step event has its values", name,
                             declared.metric.instrument)  # fmt: skip
            return
        self._background.defer(self._instruments.record_all, declared.metric, labels, finite)

    def text(self, name: str, text: Any) -> None:
        """Log a text as an event of the step."""
        if not _legal(name):
            return
        context, shown = get_current(), str(text)
        step = self._step(context)
        with self._lock:
            count = self._texts[step] = self._texts.get(step, 0) + 1
            while len(self._texts) > 64:
                del self._texts[next(iter(self._texts))]
        if count > MAX_TEXTS_PER_STEP:
            self._instruments.dropped("logs", "text_cap")
            return
        attributes = {**self._event_attributes, attr.TEXT_NAME: name, attr.TEXT_TRUNCATED: len(shown) > MAX_TEXT}
        if step is not None:
            attributes[attr.STEP_NUMBER] = step
        body = {"text": shown[:MAX_TEXT].encode("utf-8", "replace").decode()}
        now = time.time_ns()
        self._background.defer(_emit_text, self._logger, body, attributes, context, now)

    def take(self) -> list[Reported]:
        """What was logged since the last time, added up by key and step."""
        with self._lock:
            taken, self._summaries = self._summaries, {}
        return [
            (key, step, frequency, found.count, found.sum, found.min, found.max)
            for (key, step, frequency), found in taken.items()
        ]

    def absorb(self, reported: Iterable[Reported]) -> None:
        """Keep what users have logged in other processes, until it is taken from here."""
        for key, step, frequency, count, total, low, high in reported:
            self._keep((key, step, frequency), Summary(count, total, low, high))

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _in_child(self) -> None:
        """What was logged before the fork is its parent's."""
        self._summaries, self._texts, self._forked = {}, {}, True

    def _known(self, name: str, kind: str) -> Declared | None:
        """What is to be known of a metric that is logged; None if it is left out."""
        if self._forked:
            border.warn_once("log in a child", "numbers that are logged in a forked process, such as %r, are left out",
                             str(name)[:200])  # fmt: skip
            return None
        declared = self._declared.get(name)
        if declared is not None:
            return declared
        if not _legal(name):
            return None
        return self._admit(name, Declared(names.user_metric(name, kind)))

    def _admit(self, name: str, new: Declared) -> Declared | None:
        """Know a name from now on; None if there are too many, or if its metric is of another kind already."""
        in_prometheus = re.sub(r"\W", "_", new.metric.name)
        with self._lock:
            full = name not in self._declared and len(self._declared) >= MAX_NAMES
            kind = self._kinds.get(in_prometheus, new.metric.instrument)
            if not full and kind == new.metric.instrument:
                self._kinds[in_prometheus] = kind
                self._declared[name] = new
                return new
        if full:
            border.warn_once("user names", "more than %d different names are logged; %r and others are left out",
                             MAX_NAMES, name)  # fmt: skip
            self._instruments.dropped("metrics", "user_names")
        else:
            border.warn_once(f"kind of {name}", "%r is a %s, under this name or one that looks the same to Prometheus; "
                             "it cannot be a %s too", name, kind, new.metric.instrument)  # fmt: skip
        return None

    def _labels(self, declared: Declared, name: str, context: Context) -> dict[str, str]:
        stage, model_type = baggage.get_baggage(attr.STAGE, context), baggage.get_baggage(attr.MODEL_TYPE, context)
        if stage is None:
            module = declared.metric.module
            stage, model_type = _WHERE.get(self._identity.role, (module if module in STAGES else "other", "none"))
        one_for_all = declared.scope == "global" or self._identity.role == TRAINER
        return {
            attr.RANK: attr.ALL_RANKS if one_for_all else self._identity.worker_index,
            attr.STAGE: str(stage),
            attr.MODEL_TYPE: str(model_type or "none"),
            attr.VERL_KEY: name,
        }

    def _step(self, context: Context) -> int | None:
        carried = baggage.get_baggage(attr.STEP_NUMBER, context)
        try:
            return int(str(carried)) if carried is not None else self.step()
        except ValueError:
            return None

    def _summarize(self, declared: Declared, name: str, labels: dict[str, str], step: int | None, new: Summary) -> None:
        key = f"val/{name}" if labels[attr.STAGE] == "validation" else name
        self._keep((key, step, declared.frequency), new)

    def _keep(self, where: tuple[str, int | None, str], new: Summary) -> None:
        with self._lock:
            found = self._summaries.get(where)
            if found is not None:
                found.add(new)
                return
            if len(self._summaries) < MAX_NAMES * 10:
                self._summaries[where] = new
                return
        self._instruments.dropped("logs", "user_values")

    def _scalar(self, declared: Declared, labels: dict[str, str], number: float, context: Context, step: Any) -> None:
        metric = declared.metric
        if not math.isfinite(number):
            self._instruments.withdraw(metric, labels)
            self._not_finite(declared, labels, context, step)
        elif metric.instrument == "counter":
            self._instruments.add(metric, labels, max(0.0, number))
        elif metric.instrument == "histogram":
            import numpy

            self._instruments.record_all(metric, labels, numpy.asarray([number], dtype=float))
        else:
            self._instruments.set(metric, labels, number)

    def _not_finite(
        self, declared: Declared, labels: dict[str, str], context: Context, step: int | None, count: int = 1
    ) -> None:
        attributes: dict[str, Any] = non_finite_attributes(declared.metric.name, labels)
        self._instruments.add(names.NON_FINITE, attributes, count)
        if step is not None:
            attributes[attr.STEP_NUMBER] = step
        emit_non_finite(self._logger, {**self._event_attributes, **attributes}, context)


def _legal(name: object) -> bool:
    if isinstance(name, str) and len(name) <= _MAX_NAME and _NAME.fullmatch(name):
        return True
    border.warn_once(
        f"metric name {str(name)[:80]}",
        "%r is not the name of a metric: it must be <module>/<name>, such as reward/creative_score, of letters, digits "
        "and _ . -, up to %d characters; it is left out",
        str(name)[:200],
        _MAX_NAME,
    )
    return False


def _on_device(value: Any) -> bool:
    return getattr(getattr(value, "device", None), "type", "cpu") != "cpu"


def _array(values: Any) -> "numpy.ndarray[Any, Any]":
    """A new array of one dimension. Raises where the values are not numbers; text is not read as numbers."""
    import numpy

    array = numpy.array(_on_cpu(values)).ravel()
    if array.dtype.kind == "O":
        numbers = [to_number(value) for value in array]
        if None in numbers:
            raise TypeError("not numbers")
        array = numpy.array(numbers, dtype=float)
    elif array.dtype.kind not in "biuf":
        raise TypeError("not numbers")
    return array.astype(float, copy=False)


def _on_cpu(values: Any) -> Any:
    """A tensor on a device is not waited for: it is refused."""
    if _on_device(values):
        raise TypeError("on a device")
    if hasattr(values, "detach"):
        return values.detach().double().numpy()
    return values if hasattr(values, "__len__") else list(values)


def _emit_text(logger: Logger, body: dict[str, Any], attributes: dict[str, Any], context: Context, now: int) -> None:
    events.emit(logger, attr.EVENT_TEXT, body, attributes, context=context, time_ns=now)

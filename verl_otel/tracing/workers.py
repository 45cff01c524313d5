"""Calls on the ranks of worker groups: one span per call and rank, directly under the stage that made it.

`enter`/`leave` are called around each method that verl registered for remote calls and never raise. Of nested
registered calls only the outermost has a span. What a rank's engine computed in the call (`note`) becomes the rank's
own metrics, before verl reduces it, and waits for the trainer to ask (`reported`).
"""

import math
import operator
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry._logs import Logger
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer

from verl_otel import border, forks
from verl_otel.background import Background
from verl_otel.config import RankDetail
from verl_otel.metrics.instruments import Instruments
from verl_otel.metrics.ranks import DURATION, QUANTITIES, series_of_rank
from verl_otel.metrics.recorder import emit_non_finite, non_finite_attributes
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.tracing.errors import fail

if TYPE_CHECKING:
    from verl_otel.tracing.sft import SftLoop

_CALL = otel_context.create_key("verl-otel-worker-call")
_GROUP = otel_context.create_key("verl-otel-worker-group")

_PAGE = os.sysconf("SC_PAGE_SIZE")

MAX_UNREPORTED = 256
"""Calls of a rank that wait for the trainer to ask; the oldest are forgotten."""


def in_group(key: str) -> Any:
    """Attach the key of the worker group (`actor_rollout`, `critic`, ...) for which the call is; returns the token."""
    return otel_context.attach(otel_context.set_value(_GROUP, key))


@dataclass
class Call:
    """An open call."""

    span: Span
    context: Context
    token: Any
    method: str
    started: float
    labels: dict[str, str]
    stage: int
    """Id of the span that the call was made for, 0 if none is known."""
    step: int | None
    around: Any = None
    """What SFT has opened for the call."""
    noted: dict[str, list[float]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    bad: dict[str, int] = field(default_factory=dict)
    """quantity -> how many of its values were not finite."""


class Workers:
    """Spans, durations and the rank's own values of calls on this rank."""

    def __init__(
        self,
        tracer: Tracer,
        instruments: Instruments,
        logger: Logger,
        background: Background,
        run_context: Context,
        event_attributes: Mapping[str, Any],
        detail: RankDetail,
        on_call_ended: Callable[[], Any],
        sft: "SftLoop",
    ) -> None:
        self._tracer = tracer
        self._instruments = instruments
        self._logger = logger
        self._background = background
        self._run_context = run_context
        self._event_attributes = event_attributes
        self._detail = detail
        self._on_call_ended = on_call_ended
        self._sft = sft
        self._lock = forks.lock(self, "_lock")
        self._finished: deque[Call] = deque(maxlen=MAX_UNREPORTED)

    def enter(self, worker: Any, method: str) -> Call | None:
        """Open the span of `method` on `worker`; None for plumbing (`_query_...`) and for nested calls."""
        around = None
        try:
            if method.startswith("_") or otel_context.get_value(_CALL):
                return None
            around = self._sft.enter_call(method)
            group = otel_context.get_value(_GROUP)
            labels = {
                attr.RANK: _rank(worker),
                attr.STAGE: str(baggage.get_baggage(attr.STAGE) or "other"),
                attr.MODEL_TYPE: _model_type(worker, method, str(group or "")),
                attr.WORKER_METHOD: method,
            }
            attributes = {**labels, attr.WORKER_GROUP: str(group)} if group else labels
            # A call that brought no context belongs to the run.
            caller = trace.get_current_span().get_span_context()
            parent = None if caller.is_valid else self._run_context
            span = self._tracer.start_span(
                attr.WORKER_SPAN_PREFIX + method, context=parent, kind=SpanKind.SERVER, attributes=attributes
            )
            call = Call(span, Context(), None, method, 0.0, labels, caller.span_id, _step(), around)
            call.context = otel_context.set_value(_CALL, call, trace.set_span_in_context(span))
            call.token = otel_context.attach(call.context)
            call.started = time.perf_counter()
            return call
        except Exception:
            border.caught(f"opening the span of the worker call {method}")
            self._sft.leave_call(around, None)
            return None

    def leave(self, call: Call | None, error: BaseException | None = None) -> None:
        """Close what `enter` opened."""
        if call is None:
            return
        try:
            end, seconds = time.time_ns(), time.perf_counter() - call.started
            fail(call.span, error)
            memory = _device_memory()
            call.span.set_attributes({f"verl.memory.{name}": value for name, value in memory.items()})
            call.values = {
                DURATION: seconds,
                **_summary(call.noted),
                **{f"memory_{name}": float(value) for name, value in memory.items()},
            }
            call.bad = {name: bad for name, values in call.noted.items() if (bad := sum(map(_bad, values)))}
            if call.bad:
                self._not_finite(call)
            with self._lock:
                self._finished.append(call)
            self._background.defer(self._end, call, end, seconds)
        except Exception:
            border.caught(f"closing the span of the worker call {call.method}")
        finally:
            otel_context.detach(call.token)
            self._sft.leave_call(call.around, error)

    def note(self, quantity: str, values: Sequence[float]) -> None:
        """Keep values that the engine has computed on this rank in the current call: numbers that are there already."""
        call = otel_context.get_value(_CALL)
        if isinstance(call, Call):
            call.noted.setdefault(quantity, []).extend(values)

    def reported(self, stage: int) -> list[tuple[str, dict[str, str], dict[str, float], int]]:
        """The calls made for a stage that have ended since the last time: see `verl_otel.metrics.ranks.Report`."""
        with self._lock:
            found = [call for call in self._finished if call.stage == stage]
            for call in found:
                self._finished.remove(call)
        return [(call.labels[attr.RANK], call.labels, call.values, sum(call.bad.values())) for call in found]

    def _not_finite(self, call: Call) -> None:
        for quantity, count in call.bad.items():
            attributes = self._bad_attributes(call, quantity)
            call.span.add_event(attr.EVENT_NON_FINITE, {**attributes, attr.COUNT: count})

    def _bad_attributes(self, call: Call, quantity: str) -> dict[str, Any]:
        metric = QUANTITIES[quantity]
        attributes: dict[str, Any] = non_finite_attributes(metric.name, series_of_rank(metric, call.labels))
        if call.step is not None:
            attributes[attr.STEP_NUMBER] = call.step
        return attributes

    def _end(self, call: Call, end: int, seconds: float) -> None:
        """In the background: what need not be done on the rank's thread."""
        call.span.set_attributes(_resident_memory())
        call.span.end(end)
        # With the span's context, so that the histogram's exemplar leads to the trace.
        self._instruments.record(names.WORKER_DURATION, call.labels, seconds, call.context)
        detailed = self._detail.at(call.step)
        for quantity in call.values:
            metric, bad = QUANTITIES.get(quantity), call.bad.get(quantity, 0)
            if metric is None:
                continue
            labels = series_of_rank(metric, call.labels)
            if bad:
                self._instruments.withdraw(metric, labels)
                self._instruments.add(names.NON_FINITE, non_finite_attributes(metric.name, labels), bad)
                attributes = {**self._event_attributes, **self._bad_attributes(call, quantity)}
                emit_non_finite(self._logger, attributes, call.context)
            elif detailed:
                self._instruments.set(metric, labels, call.values[quantity])
        self._on_call_ended()


def _summary(noted: Mapping[str, list[float]]) -> dict[str, float]:
    """Mean over the mini-batches of a call, as verl takes it; of the learning rate the last."""
    return {
        quantity: values[-1] if quantity == "learning_rate" else sum(values) / len(values)
        for quantity, values in noted.items()
        if values
    }


def _bad(value: float) -> bool:
    return not math.isfinite(value)


def _step() -> int | None:
    carried = baggage.get_baggage(attr.STEP_NUMBER)
    return int(carried) if isinstance(carried, str) and carried.isdecimal() else None


def _rank(worker: Any) -> str:
    try:
        return str(operator.index(worker.rank))
    except (AttributeError, TypeError):
        return os.environ.get("RANK", "0")


def _model_type(worker: Any, method: str, group: str) -> str:
    """From the stage where it says so, else from the worker group, else from the engine's model (plain workers)."""
    stage_says = baggage.get_baggage(attr.MODEL_TYPE)
    if stage_says and stage_says != "none":
        return str(stage_says)
    if re.search(r"(?:^|_)ref(?:_|$)", method) or group == "ref":
        return "ref"
    for known in ("critic", "teacher", "actor", "rollout", "ref"):
        if known in group:
            return known
    if group in {"rm", "reward", "reward_model"}:
        return "reward"
    engine_model = getattr(getattr(worker, "config", None), "model_type", None)
    return {"language_model": "actor", "value_model": "critic"}.get(str(engine_model), "none")


def _device_memory() -> dict[str, int]:
    """Bytes on the device of this process, if it uses one already: never make a CUDA context.

    `allocated` and `reserved` are torch's; `used` and `total` are the device's, which other libraries and processes
    use too (vLLM's sleep mode works below torch).
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized():
            return {}
        free, total = cuda.mem_get_info()
        return {
            "allocated": int(cuda.memory_allocated()),
            "reserved": int(cuda.memory_reserved()),
            "used": int(total) - int(free),
            "total": int(total),
        }
    except Exception:  # a device that has failed; the call's span matters all the more
        border.caught("reading the device's memory")
        return {}


def _resident_memory() -> dict[str, int]:
    """Bytes of this process that are in memory."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return {attr.MEMORY_RSS: int(statm.read().split()[1]) * _PAGE}
    except (OSError, ValueError, IndexError):  # no procfs: nothing to say
        return {}

"""Calls on the ranks of worker groups: one span per call and rank, directly under the stage that made it.

`enter`/`leave` are called around each method that verl registered for remote calls and never raise. Of nested
registered calls only the outermost has a span.
"""

import operator
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.metrics import Meter
from opentelemetry.trace import Span, SpanKind, Tracer

from verl_otel import border
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.tracing.errors import fail

_IN_CALL = otel_context.create_key("verl-otel-worker-call")
_GROUP = otel_context.create_key("verl-otel-worker-group")

_PAGE = os.sysconf("SC_PAGE_SIZE")


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


class Workers:
    """Spans and durations of calls on this rank."""

    def __init__(
        self,
        tracer: Tracer,
        meter: Meter,
        defer: Callable[..., None],
        run_context: Context,
        on_call_ended: Callable[[], Any],
    ) -> None:
        self._tracer = tracer
        self._defer = defer
        self._run_context = run_context
        self._on_call_ended = on_call_ended
        self._duration = meter.create_histogram(
            *names.WORKER_DURATION, explicit_bucket_boundaries_advisory=names.DURATION_BUCKETS
        )

    def enter(self, worker: Any, method: str) -> Call | None:
        """Open the span of `method` on `worker`; None for plumbing (`_query_...`) and for nested calls."""
        try:
            if method.startswith("_") or otel_context.get_value(_IN_CALL):
                return None
            group = otel_context.get_value(_GROUP)
            labels = {
                attr.RANK: _rank(worker),
                attr.STAGE: str(baggage.get_baggage(attr.STAGE) or "other"),
                attr.MODEL_TYPE: _model_type(worker, method, str(group or "")),
                attr.WORKER_METHOD: method,
            }
            attributes = {**labels, attr.WORKER_GROUP: str(group)} if group else labels
            # A call that brought no context belongs to the run.
            parent = None if trace.get_current_span().get_span_context().is_valid else self._run_context
            span = self._tracer.start_span(
                attr.WORKER_SPAN_PREFIX + method, context=parent, kind=SpanKind.SERVER, attributes=attributes
            )
            context = otel_context.set_value(_IN_CALL, True, trace.set_span_in_context(span))
            return Call(span, context, otel_context.attach(context), method, time.perf_counter(), labels)
        except Exception:
            border.caught(f"opening the span of the worker call {method}")
            return None

    def leave(self, call: Call | None, error: BaseException | None = None) -> None:
        """Close what `enter` opened."""
        if call is None:
            return
        try:
            end, seconds = time.time_ns(), time.perf_counter() - call.started
            fail(call.span, error)
            call.span.set_attributes(_device_memory())
            self._defer(self._end, call, end, seconds)
        except Exception:
            border.caught(f"closing the span of the worker call {call.method}")
        finally:
            otel_context.detach(call.token)

    def _end(self, call: Call, end: int, seconds: float) -> None:
        """In the background: what need not be done on the rank's thread."""
        call.span.set_attributes(_resident_memory())
        call.span.end(end)
        # With the span's context, so that the histogram's exemplar leads to the trace.
        self._duration.record(seconds, call.labels, call.context)
        self._on_call_ended()


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
    """Bytes that torch has on the device, if this process uses one already: never make a CUDA context."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized():
            return {}
        return {
            attr.MEMORY_ALLOCATED: int(cuda.memory_allocated()),
            attr.MEMORY_RESERVED: int(cuda.memory_reserved()),
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

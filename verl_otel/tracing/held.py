"""A span that waits in memory until it is decided whether it is exported: what a trajectory is worth shows at its end.

It answers like any span, so that what happens inside, in users' code too, can say something about it. Its context is
that of the place where it would be and is not sampled: nothing is recorded below it but what is held with it, so that
nothing is left without a parent if it is not kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import Attributes, AttributeValue

from verl_otel.tracing import ids
from verl_otel.tracing.errors import in_words

MAX_SAID = 64
"""Attributes of a held span, and events of it; more are not kept."""


class HeldSpan(Span):
    """See the module.

    Args:
        parent: context with the span under which it would be; None of the current context is used.
        start: nanoseconds since 1970; by default now.
    """

    def __init__(
        self,
        parent: Context,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, Any],
        start: int | None = None,
        links: list[Link] | None = None,
        place: SpanContext | None = None,
    ) -> None:
        self._parent = parent
        self._place = place or trace.get_current_span(ids.not_recorded(parent)).get_span_context()
        self._name = name
        self._kind = kind
        self._attributes = dict(attributes)
        self._links = links
        self._start = time.time_ns() if start is None else start
        self._end: int | None = None
        self._events: list[tuple[str, Attributes, int]] = []
        self._status: tuple[Status | StatusCode, str | None] | None = None
        self._children: list[HeldSpan] = []
        self._later: Callable[[], Mapping[str, Any]] | None = None
        self._weight = 1

    def child(self, name: str, kind: SpanKind, attributes: Mapping[str, Any], start: int | None) -> HeldSpan:
        """A held span under this one."""
        made = HeldSpan(self._parent, name, kind, attributes, start, place=self._place)
        self._children.append(made)
        return made

    def set_later(self, attributes: Callable[[], Mapping[str, Any]], weight: int) -> None:
        """Attributes that are computed only if the span is kept; until then they take as much memory as `weight`
        spans."""
        self._later = attributes
        self._weight += weight

    @property
    def weight(self) -> int:
        """How many spans are held: this one and those below it."""
        return self._weight + sum(child.weight for child in self._children)

    def release(self, tracer: Tracer, attributes: Mapping[str, Any]) -> None:
        """Let `tracer` record this span, with `attributes` besides, and those below it, as they were."""
        self._attributes.update(attributes)
        self._release(tracer, self._parent, self._end or time.time_ns())

    def _release(self, tracer: Tracer, parent: Context, latest: int) -> None:
        end = min(self._end or latest, latest)
        later = self._later() if self._later is not None else {}
        attributes = {**self._attributes, **later}
        span = tracer.start_span(self._name, parent, self._kind, attributes, self._links, min(self._start, end))
        for event in self._events:
            span.add_event(*event)
        if self._status is not None:
            span.set_status(*self._status)
        context = trace.set_span_in_context(span, parent)
        for child in self._children:
            child._release(tracer, context, end)
        span.end(end)

    # ---- as any span ------------------------------------------------------------------------------------------------

    def get_span_context(self) -> SpanContext:
        return self._place

    def is_recording(self) -> bool:
        return self._end is None

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        self.set_attributes({key: value})

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        if self._end is None:
            for key, value in attributes.items():
                if key in self._attributes or len(self._attributes) < MAX_SAID:
                    self._attributes[key] = value

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        if self._end is None and len(self._events) < MAX_SAID:
            self._events.append((name, attributes, timestamp or time.time_ns()))

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        # In words: the exception itself would hold on to everything in the frames of its traceback.
        self.add_event("exception", {**in_words(exception), **(attributes or {})}, timestamp)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        if self._end is None:
            self._status = (status, description)

    def update_name(self, name: str) -> None:
        if self._end is None:
            self._name = name

    def end(self, end_time: int | None = None) -> None:
        if self._end is None:
            self._end = time.time_ns() if end_time is None else end_time

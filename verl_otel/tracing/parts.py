"""The parts of a trajectory: generation requests and tool calls. What their spans say, and what is measured of each,
whether its trajectory is recorded or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

from verl_otel import border
from verl_otel.background import Background
from verl_otel.metrics.bounded import OTHER, Bounded
from verl_otel.metrics.instruments import Instruments
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.semconv.registry import Metric
from verl_otel.tracing import content
from verl_otel.tracing.errors import fail, is_failure, type_of
from verl_otel.tracing.held import HeldSpan

if TYPE_CHECKING:
    from verl_otel.tracing.trajectories import Trajectory

MAX_NAMES = 50
"""Tools, data sources and kinds of errors that metrics tell apart."""

TEXT = "text_completion"
TOOL = "execute_tool"
AGENT = "invoke_agent"
"""Values of `gen_ai.operation.name`."""

UNKNOWN_TOOL, WRONG_ARGUMENTS = "unknown_tool", "invalid_arguments"
"""Values of `error.type` where verl has refused a call that the model has written."""

Texts = Callable[[], Mapping[str, str]]
"""Gives the attributes with texts, when a span that has any is recorded."""

_REFUSED = (("Unknown function '", UNKNOWN_TOOL), ("Invalid JSON in arguments for '", WRONG_ARGUMENTS))
"""How verl's answers to the model begin where it has not called the tool."""

_FAILED = ("Error executing tool '", "Error when executing tool: ")
"""How they begin where the tool has raised, or what verl does before and after it; the second before verl 0.8.0."""


def end(span: Span, error: BaseException | None, at: int | None = None) -> None:
    """End a span with what ended it. Being cancelled is no failure."""
    if error is not None and not is_failure(error):
        span.set_attribute(attr.CANCELLED, True)
    elif error is not None:
        span.set_attribute(attr.ERROR_TYPE, type_of(error))
        fail(span, error)
    span.end(at)


class Measures:
    """Durations and errors of calls, as metrics; done in the background."""

    def __init__(self, instruments: Instruments, background: Background) -> None:
        self.background = background
        self._instruments = instruments
        self._errors = Bounded(MAX_NAMES)

    def record(
        self,
        duration: Metric,
        errors: Metric,
        labels: Mapping[str, str],
        seconds: float,
        error: str | None,
        span: Span | None,
    ) -> None:
        """One call, and its `error.type` if it has failed.

        Args:
            span: of the call, for the exemplar that leads to the trace.
        """
        context = None if span is None else set_span_in_context(span, Context())
        self.background.defer(self._instruments.record, duration, labels, seconds, context)
        if error is not None:
            self.count(errors, labels, error)

    def count(self, errors: Metric, labels: Mapping[str, str], error: str) -> None:
        """One `error.type` more."""
        labels = {**labels, attr.ERROR_TYPE: self._errors(error)}
        self.background.defer(self._instruments.add, errors, labels)


class Part:
    """An open part. `span` is None where none is recorded; `token` is what its context was attached with."""

    def __init__(self, span: Span | None, token: Any) -> None:
        self.span = span
        self.token = token
        self.started = time.perf_counter()

    def close(self, error: BaseException | None) -> None:
        if self.span is not None:
            end(self.span, error)


class Opened(Protocol):
    """What `leave` closes."""

    token: Any

    def close(self, error: BaseException | None) -> None: ...


def leave(opened: Opened | None, error: BaseException | None) -> None:
    """Close what was opened, and detach its context. Never raises."""
    if opened is None:
        return
    try:
        opened.close(error)
    except Exception:
        border.caught("closing a part of a trajectory")
    finally:
        if opened.token is not None:
            otel_context.detach(opened.token)


class Request(Part):
    """A generation request."""

    def __init__(self, span: Span | None, token: Any, trajectory: Trajectory, background: Background) -> None:
        super().__init__(span, token)
        self.texts: Texts | None = None
        self._trajectory = trajectory
        self._background = background

    def answered(self, output: Any) -> None:
        """Say what the server has answered (verl's `TokenOutput`)."""
        if self.span is None:
            return
        said: dict[str, Any] = {}
        tokens = getattr(output, "token_ids", None)
        if tokens is not None:
            said[gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS] = len(tokens)
        reason = getattr(output, "stop_reason", None)
        if reason:
            said[gen_ai.GEN_AI_RESPONSE_FINISH_REASONS] = [str(reason)]
        cached = (getattr(output, "extra_fields", None) or {}).get("num_cached_tokens")
        if isinstance(cached, int):
            said[gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] = cached
        self.span.set_attributes(said)

    def close(self, error: BaseException | None) -> None:
        self._trajectory.generating -= 1
        if self.span is not None:
            _end_with_texts(self.span, error, self.texts, self._background)


def _end_with_texts(span: Span, error: BaseException | None, texts: Texts | None, background: Background) -> None:
    if texts is None:
        end(span, error)
    elif isinstance(span, HeldSpan):
        span.set_later(texts, content.WEIGHT)
        end(span, error)
    else:  # decoding is not for the thread of the agent loops
        background.defer(_set_and_end, span, texts, error, time.time_ns())


def _set_and_end(span: Span, texts: Texts, error: BaseException | None, at: int) -> None:
    try:
        span.set_attributes(texts())
    finally:
        end(span, error, at)


class ToolCall(Part):
    """A call of a tool, as the model has written it, or as an agent loop has made it itself."""

    def __init__(self, span: Span | None, token: Any, measures: Measures, labels: Mapping[str, str]) -> None:
        super().__init__(span, token)
        self.texts: Texts | None = None
        self.called = False
        """Whether the tool itself has been called."""
        self._measures = measures
        self._labels = labels
        self._error: str | None = None

    def failed(self, error: BaseException) -> None:
        """The tool has raised, which verl does not let out."""
        if not is_failure(error):
            return
        self._error = type_of(error)
        if self.span is not None:
            fail(self.span, error)

    def answered(self, text: Any) -> None:
        """What the model is told; where the tool has not raised, verl may have, or may not have called it."""
        if self._error is not None or not isinstance(text, str):
            return
        refused = None if self.called else next((kind for begin, kind in _REFUSED if text.startswith(begin)), None)
        self._error = OTHER if text.startswith(_FAILED) else refused
        if self._error is not None and self.span is not None:
            why = f"{refused}: verl has not called the tool" if refused else "verl has told the model of an error"
            self.span.set_status(Status(StatusCode.ERROR, why))

    def close(self, error: BaseException | None) -> None:
        if error is not None and is_failure(error):
            self._error = type_of(error)
        if self.span is not None:
            if self._error is not None:
                self.span.set_attribute(attr.ERROR_TYPE, self._error)
            _end_with_texts(self.span, error, self.texts, self._measures.background)
        seconds = time.perf_counter() - self.started
        self._measures.record(names.TOOL_DURATION, names.TOOL_ERRORS, self._labels, seconds, self._error, self.span)


class InsideTool(Part):
    """The tool itself, inside the call that has the span."""

    def __init__(self, call: ToolCall) -> None:
        super().__init__(None, None)
        self._call = call
        call.called = True

    def close(self, error: BaseException | None) -> None:
        if error is not None:
            self._call.failed(error)

"""Scores in the reward workers: how long each sample's takes, what fails, and the span under its trajectory."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from verl_otel import border
from verl_otel.background import Background
from verl_otel.identity import Identity
from verl_otel.metrics.bounded import OTHER, Bounded
from verl_otel.metrics.instruments import Instruments
from verl_otel.redaction import shown
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.semconv.stages import SCORE_TIMER, TRAJECTORY_TIMERS
from verl_otel.tracing import parts
from verl_otel.tracing.errors import is_failure, type_of
from verl_otel.tracing.parts import Measures, Part


class Score(Part):
    """The computation of a score."""

    def __init__(self, span: Span | None, token: Any, measures: Measures, labels: Mapping[str, str]) -> None:
        super().__init__(span, token)
        self._measures = measures
        self._labels = labels
        self._error: str | None = None

    def answered(self, result: Any) -> None:
        """Errors that verl's `rate_limited` reward manager turns into a score of 0, and says in what it returns."""
        extra = (result.get("reward_extra_info") if isinstance(result, Mapping) else None) or {}
        if extra.get("timeout") is True:
            self._error = TimeoutError.__name__
        elif isinstance(extra.get("error"), str):
            self._error = OTHER
        if self._error is not None and self.span is not None:
            self.span.set_attribute(attr.ERROR_TYPE, self._error)
            self.span.set_status(Status(StatusCode.ERROR, shown(str(extra.get("error", "timed out")))))

    def close(self, error: BaseException | None) -> None:
        if error is not None and is_failure(error):
            self._error = type_of(error)
        super().close(error)
        seconds = time.perf_counter() - self.started
        self._measures.record(names.SCORE_DURATION, names.SCORE_ERRORS, self._labels, seconds, self._error, self.span)


class Scores:
    """See the module."""

    def __init__(self, tracer: Tracer, instruments: Instruments, background: Background, identity: Identity) -> None:
        self._tracer = tracer
        self._instruments = instruments
        self._background = background
        self._identity = identity
        self._measures = Measures(instruments, background)
        self._data_sources = Bounded(parts.MAX_NAMES)
        self._statuses = Bounded(parts.MAX_NAMES)

    def enter(self, data_source: str | None = None) -> Score | None:
        """Begin the computation of a score; with a span if its trajectory is recorded."""
        try:
            labels = {
                attr.RANK: self._identity.worker_index,
                attr.STAGE: _stage(),
                attr.MODEL_TYPE: "reward",
                attr.DATA_SOURCE: self._data_sources(data_source) if data_source is not None else "",
            }
            caller, span = trace.get_current_span().get_span_context(), None
            if caller.is_valid and caller.trace_flags.sampled:
                stage = TRAJECTORY_TIMERS[SCORE_TIMER]
                said = {**labels, attr.STAGE: stage.stage}
                if data_source is None:
                    del said[attr.DATA_SOURCE]
                span = self._tracer.start_span(stage.span, kind=SpanKind.SERVER, attributes=said)
            token = None if span is None else otel_context.attach(trace.set_span_in_context(span))
            return Score(span, token, self._measures, labels)
        except Exception:
            border.caught("opening the span of a score")
            return None

    def answered(self, score: Score | None, result: Any) -> None:
        """The score, as verl's `RewardLoopWorker.compute_score` returns it. Never raises."""
        try:
            if score is not None:
                score.answered(result)
        except Exception:
            border.caught("reading a score")

    def leave(self, score: Score | None, error: BaseException | None = None) -> None:
        """Close what `enter` opened. Never raises."""
        parts.leave(score, error)

    def checked(self, statuses: Sequence[Any]) -> None:
        """What came of the test cases that a score has had run in a sandbox; may raise."""
        labels = {attr.RANK: self._identity.worker_index, attr.STAGE: _stage(), attr.MODEL_TYPE: "reward"}
        for status, count in Counter(map(self._statuses, statuses)).items():
            labels_of_status = {**labels, attr.SANDBOX_STATUS: status}
            self._background.defer(self._instruments.add, names.SANDBOX_CASES, labels_of_status, count)


def _stage() -> str:
    """For what a score is: `other` if the call has brought no context, as the first ones of a process."""
    stage = baggage.get_baggage(attr.STAGE)
    if stage is None:
        return "other"
    return "validation" if stage == "validation" else "reward"

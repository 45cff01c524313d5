"""Steps and their stages, from verl's timers: one trace per training step.

Used where the training loop runs. `enter`/`leave` are called around each of verl's timers and never raise.
"""

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry._logs import Logger, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, Tracer

from verl_otel import border, events
from verl_otel.background import Background
from verl_otel.identity import LAUNCHER, TRAINER, Identity
from verl_otel.metrics.instruments import Instruments
from verl_otel.metrics.ranks import Ranks, Unfinished
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.semconv.stages import (
    ROLLOUT_AHEAD_TIMER,
    ROLLOUT_TIMER,
    SETUP,
    STEP_TIMER,
    TRAJECTORY_TIMERS,
    VALIDATION_TIMER,
    WAIT_TIMERS,
    WEIGHT_SYNC,
    WEIGHT_SYNC_TIMER,
    Stage,
    stage_of,
)
from verl_otel.tracing import ids
from verl_otel.tracing.errors import fail

_IN_STEP = otel_context.create_key("verl-otel-step")
_STAGE = otel_context.create_key("verl-otel-stage")

MAX_OUTSIDE = 1000
"""Spans of a worker process that belong to nothing but the run; more are not recorded, and counted."""

WAIT_FOR_LOG = 1.0
"""Seconds that the ended span of a step waits for verl to log the step's values, which may not be finite."""

WAIT_FOR_RESULT = 10.0
"""Seconds that the ended span of a stage waits for what is measured of its result (`Scope.on_left`)."""


@dataclass(eq=False)
class Scope:
    """An open step or stage, or a part of a stage, which has the timer and labels of its stage."""

    span: Span
    context: Context
    token: Any
    timer: str
    started: float
    labels: dict[str, str]
    number: int | None = None
    part: bool = False
    calls: int = 0
    """Calls of rollout servers in a part."""
    waits: bool = False
    waited: float = 0.0
    """Seconds of a step that its stages only waited."""
    logged: bool = False
    """Whether verl has logged the step's values."""
    failed: bool = False
    on_left: "Callable[[Scope, int, float], Callable[[], Mapping[str, Any] | None]] | None" = None
    """Called in the background when the stage is over, with its end (Unix nanoseconds) and seconds; gives a function
    that gives the attributes that are still to come, None while they are not there. Does not block."""

    @property
    def id(self) -> int:
        return self.span.get_span_context().span_id


class Steps:
    """The trace of the current step."""

    def __init__(
        self,
        tracer: Tracer,
        instruments: Instruments,
        background: Background,
        ranks: Ranks,
        logger: Logger,
        sampler: Sampler | None,
        identity: Identity,
        run_context: Context,
    ) -> None:
        self._tracer = tracer
        self._instruments = instruments
        self._background = background
        self._ranks = ranks
        self._logger = logger
        self._sampler = sampler
        self._identity = identity
        self._run_context = run_context
        self._trainer: Any = lambda: None
        self._step_span: tuple[int | None, SpanContext] | None = None
        self.last: Scope | None = None
        """The step that was opened last."""
        self._first: int | None = None
        """The number of the step that was opened first."""
        self._in_trainer = identity.role in (TRAINER, LAUNCHER)
        self._outside = 0
        self._named: set[tuple[int, str]] = set()
        self._labels: dict[str, dict[str, str]] = {}
        self.policy_version: int | None = None
        """Version of the weights that rollout servers have: the argument of verl's last weight sync."""
        self.waits_for_rollout = False
        """Whether verl's `gen` timer is only a wait (V1 trainers: generation runs in the agent-loop workers)."""
        self.rollout_is_elsewhere = False
        """Whether rollouts have devices of their own, so that those of the trainer are idle while it waits."""
        self.on_idle_ratio: Callable[[int | None, float], None] = lambda number, ratio: None
        """Told, for each step of a trainer whose rollouts are elsewhere, which share of it the trainer waited."""
        self._validates_for: Context | None = None
        self.generates_ahead = False
        """Whether verl generates the next batch beside the step (`generate_async`), and `gen` waits for this one."""
        self._ahead: tuple[int | None, SpanContext] | None = None

    # ---- what hooks tell --------------------------------------------------------------------------------------------

    def follow(self, trainer: Any) -> None:
        """Take step numbers from `trainer.global_steps` from now on (a weak reference is kept). Never raises."""
        try:
            self._trainer = weakref.ref(trainer)
        except TypeError:
            border.caught("following the trainer")

    def lead(self, trainer: Any) -> None:
        """As `follow`, in a rank's process that runs the training loop, too."""
        self._in_trainer = True
        self._labels.clear()
        self.follow(trainer)

    def number(self) -> int | None:
        """The step that verl is in, None if it is not known."""
        number = getattr(self._trainer(), "global_steps", None)
        return int(number) if isinstance(number, int) else None

    def has_run(self, number: int) -> bool:
        """Whether the step with that number is one of this attempt's."""
        return self._first is not None and number >= self._first

    def current_context(self) -> Context:
        """A context with the span of the current or last step, for events; the run's if there was no step yet."""
        if self._step_span is None:
            return self._run_context
        return trace.set_span_in_context(NonRecordingSpan(self._step_span[1]), Context())

    def validates_for(self, context: Context | None) -> None:
        """The context of whoever lets this process validate next, where the call itself cannot carry it."""
        self._validates_for = context

    # ---- around verl's timers ---------------------------------------------------------------------------------------

    def enter(self, timer: str) -> Scope | None:
        """Open the span of a timer; None if there is none to open."""
        try:
            around = current_scope()
            if timer in TRAJECTORY_TIMERS or (around is not None and _is_same_stage(timer, around.timer)):
                return None
            return self._open_step() if timer == STEP_TIMER else self._open_stage(timer, stage_of(timer))
        except Exception:
            border.caught(f"opening the span of {timer}")
            return None

    def enter_setup(self) -> Scope | None:
        """Open the span of the set-up phase, in the trace of the run."""
        try:
            context = otel_context.get_current()
            if not trace.get_current_span(context).get_span_context().is_valid:
                context = self._run_context
            return self._open("setup", SETUP, context, {})
        except Exception:
            border.caught("opening the span of the set-up")
            return None

    def enter_validation(self) -> Scope | None:
        """Open a validation that verl does not time (the one before training); None inside one that it does time."""
        try:
            around = current_scope()
            if around is not None and _is_same_stage(VALIDATION_TIMER, around.timer):
                return None
            return self._open_stage(VALIDATION_TIMER, stage_of(VALIDATION_TIMER))
        except Exception:
            border.caught("opening the span of the validation")
            return None

    def enter_part(self, name: str, attributes: Mapping[str, Any]) -> Scope | None:
        """Open a span inside the current stage (of the set-up, too), for a part of its work; never a stage itself."""
        try:
            around, context = current_scope(), otel_context.get_current()
            timer, labels, number = (
                (around.timer, around.labels, around.number)
                if around is not None
                else (WEIGHT_SYNC_TIMER, self._labels_of(WEIGHT_SYNC_TIMER, WEIGHT_SYNC), self.number())
            )
            if not trace.get_current_span(context).get_span_context().is_valid:
                context = self._run_context
            shown = {**{key: value for key, value in labels.items() if key != attr.TIMER}, **attributes}
            span = self._tracer.start_span(name, context=context, attributes=shown)
            scope = Scope(span, context, None, timer, time.perf_counter(), labels, number, part=True)
            return self._attach(scope, trace.set_span_in_context(span, context))
        except Exception:
            border.caught(f"opening the span {name}")
            return None

    def leave(self, scope: Scope | None, error: BaseException | None = None) -> None:
        """Close what `enter` opened. `error`: the exception that ends it; it is recorded, not handled."""
        if scope is None:
            return
        try:
            end, seconds = time.time_ns(), time.perf_counter() - scope.started
            fail(scope.span, error)
            scope.failed = error is not None
            if scope.waits and self.last is not None and otel_context.get_value(_IN_STEP, scope.context):
                self.last.waited += seconds
            self._link_what_was_generated_ahead(scope)
            self._background.defer(self._left, scope, end, seconds)
        except Exception:
            border.caught(f"closing the span of {scope.timer}")
        finally:
            otel_context.detach(scope.token)

    def _left(self, scope: Scope, end: int, seconds: float) -> None:
        """In the background: what need not be done on the training thread."""
        if not scope.part:
            self._instruments.withdraw(names.STAGE_ACTIVE, scope.labels)
            # With the span's context, so that the histogram's exemplar leads to the trace.
            self._instruments.record(names.STAGE_DURATION, scope.labels, seconds, scope.context)

        result = None if scope.on_left is None else scope.on_left(scope, end, seconds)

        def finish(attributes: dict[str, Any], unfinished: list[Unfinished]) -> None:
            scope.span.set_attributes(attributes)
            for call in unfinished:
                if call.dead or scope.failed:
                    self._show_unfinished(scope, call, end)
            if result is None:
                scope.span.end(end)
            else:
                self._end_with(scope, result, end)

        if scope.timer == STEP_TIMER and not scope.part:
            if self.rollout_is_elsewhere and seconds > 0 and not scope.failed:
                self.on_idle_ratio(scope.number, min(1.0, scope.waited / seconds))
            self._background.hold(lambda: scope.logged, WAIT_FOR_LOG, scope.span.end, end)
        else:
            self._ranks.leave(scope.id, scope.timer, scope.labels, scope.number, finish)

    def _end_with(self, scope: Scope, result: Callable[[], Mapping[str, Any] | None], end: int) -> None:
        def finish() -> None:
            scope.span.set_attributes(result() or {})
            scope.span.end(end)

        self._background.hold(lambda: result() is not None, WAIT_FOR_RESULT, finish)

    def _link_what_was_generated_ahead(self, scope: Scope) -> None:
        """one_step_off: `gen` waits for what `generate_async` has made, in an earlier step but for the first."""
        if scope.timer == ROLLOUT_AHEAD_TIMER and not scope.part:
            self._ahead = scope.number, scope.span.get_span_context()
        elif scope.timer == ROLLOUT_TIMER and self._ahead is not None and self.last is not None:
            number, generated = self._ahead
            self._ahead = None
            if generated.trace_id != self.last.span.get_span_context().trace_id:
                self.last.span.add_link(generated, {} if number is None else {attr.STEP_NUMBER: number})

    def _show_unfinished(self, scope: Scope, unfinished: Unfinished, end: int) -> None:
        """A call that no rank will tell of: its span, from here, and an event."""
        call = unfinished.call
        why = "the process of this rank has died" if unfinished.dead else "had not ended when the stage failed"
        attributes: dict[str, Any] = {
            attr.RANK: call.rank,
            attr.STAGE: scope.labels[attr.STAGE],
            attr.MODEL_TYPE: scope.labels[attr.MODEL_TYPE],
            attr.WORKER_METHOD: call.method,
            attr.UNFINISHED: True,
        }
        if scope.number is not None:
            attributes[attr.STEP_NUMBER] = scope.number
        span = self._tracer.start_span(
            attr.WORKER_SPAN_PREFIX + call.method, scope.context, SpanKind.CLIENT, attributes, start_time=call.since
        )
        span.set_status(Status(StatusCode.ERROR, why))
        span.end(max(end, call.since))
        attributes.update({attr.RUN_ID: self._identity.run_id, attr.RUN_ATTEMPT: self._identity.attempt})
        body, context = {"message": why}, trace.set_span_in_context(span, Context())
        events.emit(
            self._logger, attr.EVENT_WORKER_ERROR, body, attributes, context=context, severity=SeverityNumber.ERROR
        )

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _open_step(self) -> Scope:
        number = self.number()
        attributes: dict[str, Any] = {
            attr.RUN_ID: self._identity.run_id,
            attr.RUN_ATTEMPT: self._identity.attempt,
        }
        if number is not None:
            attributes[attr.STEP_NUMBER] = number
        if self.policy_version is not None:
            attributes[attr.POLICY_VERSION] = self.policy_version
        scope = self._open(STEP_TIMER, stage_of(STEP_TIMER), Context(), attributes, number, root=True)
        self.last = scope
        self._first = number if self._first is None else self._first
        self._step_span = (number, scope.span.get_span_context())
        self._named = {(n, name) for n, name in self._named if number is None or n >= number - 1}
        return scope

    def _open_stage(self, timer: str, stage: Stage) -> Scope:
        attributes: dict[str, Any] = {}
        if timer in WAIT_TIMERS or (timer == ROLLOUT_TIMER and self.waits_for_rollout):
            attributes[attr.STAGE_WAIT] = True
        context = otel_context.get_current()
        # In a step or another stage; or, where no trainer runs (a timer inside a rank's call), in any span there is.
        if stage.stage == "validation" and self._validates_for is not None:
            context, self._validates_for = self._validates_for, None
        elsewhere = self._trainer() is None and trace.get_current_span(context).get_span_context().is_valid
        if elsewhere or otel_context.get_value(_IN_STEP, context) or otel_context.get_value(_STAGE, context):
            return self._open(timer, stage, context, attributes, self.number())
        # Outside verl's step: before it (profiling), after it (validation); it belongs to the step's trace all the
        # same.
        if not self._in_trainer and self._trainer() is None:
            self._outside += 1
            if self._outside > MAX_OUTSIDE:
                self._instruments.dropped("traces", "span_cap")
                return self._open(timer, stage, ids.not_recorded(self._run_context), attributes)
        number = self.number()
        before_training = self._step_span is None
        if timer == VALIDATION_TIMER and before_training:
            if number is not None:
                attributes[attr.STEP_NUMBER] = number
            return self._open(timer, stage, Context(), attributes, number, root=True)
        if stage == WEIGHT_SYNC and before_training:  # of a step that this attempt does not run
            return self._open(timer, stage, self._run_context, attributes)
        return self._open(timer, stage, self._parent_of_late(number), attributes, number)

    def _parent_of_late(self, number: int | None) -> Context:
        known = self._step_span
        if known is not None and (number is None or known[0] == number):
            parent = known[1]
        elif number is not None and self._sampler is not None:
            identity = self._identity
            parent = ids.remote_context(self._sampler, identity.run_id, identity.attempt, number, STEP_TIMER)
        else:
            return self._run_context
        return trace.set_span_in_context(NonRecordingSpan(parent), Context())

    def _open(
        self,
        timer: str,
        stage: Stage,
        parent: Context,
        attributes: dict[str, Any],
        number: int | None = None,
        root: bool = False,
    ) -> Scope:
        labels = self._labels_of(timer, stage)
        links = []
        if root and (run := trace.get_current_span(self._run_context).get_span_context()).is_valid:
            links.append(Link(run))
        trace_id, span_id = None, None
        name = self._name_for_others(timer)
        if number is not None and (number, name) not in self._named:
            self._named.add((number, name))
            span_id = ids.span_id(self._identity.run_id, self._identity.attempt, number, name)
            trace_id = ids.trace_id(self._identity.run_id, self._identity.attempt, number) if root else None
        with ids.use(trace_id, span_id):
            span = self._tracer.start_span(stage.span, context=parent, attributes={**labels, **attributes}, links=links)
        context = trace.set_span_in_context(span, parent)
        # Ranks learn from the baggage for which stage they work.
        context = baggage.set_baggage(attr.STAGE, stage.stage, context)
        context = baggage.set_baggage(attr.MODEL_TYPE, stage.model_type, context)
        if number is not None:
            context = baggage.set_baggage(attr.STEP_NUMBER, str(number), context)
        if timer == STEP_TIMER:
            context = otel_context.set_value(_IN_STEP, True, context)
        if self._in_trainer:
            self._background.defer(self._instruments.set, names.STAGE_ACTIVE, labels, time.time())
        scope = Scope(span, context, None, timer, time.perf_counter(), labels, number)
        scope.waits = attr.STAGE_WAIT in attributes
        return self._attach(scope, context)

    @staticmethod
    def _attach(scope: Scope, context: Context) -> Scope:
        scope.context = otel_context.set_value(_STAGE, scope, context)
        scope.token = otel_context.attach(scope.context)
        return scope

    def _labels_of(self, timer: str, stage: Stage) -> dict[str, str]:
        labels = self._labels.get(timer)
        if labels is None:
            whole = self._in_trainer or stage.stage == "validation"
            labels = self._labels[timer] = {
                attr.RANK: attr.ALL_RANKS if whole else self._identity.worker_index,
                attr.STAGE: stage.stage,
                attr.MODEL_TYPE: stage.model_type,
                attr.TIMER: timer,
            }
        return labels

    def _name_for_others(self, timer: str) -> str:
        """The name under which other processes know the span of a timer: trajectories are under the generation."""
        if not self.generates_ahead:
            return timer
        return {ROLLOUT_AHEAD_TIMER: ROLLOUT_TIMER, ROLLOUT_TIMER: "gen (wait)"}.get(timer, timer)


def current_scope() -> Scope | None:
    """The step, stage or part in which this code runs."""
    scope = otel_context.get_value(_STAGE)
    return scope if isinstance(scope, Scope) else None


def _is_same_stage(timer: str, around: str) -> bool:
    """Whether two of verl's timers, one inside the other, measure one thing: the inner one has no span of its own."""
    both = stage_of(timer).span
    return both in ("verl.weight_sync", "verl.validation") and both == stage_of(around).span

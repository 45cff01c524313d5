"""Trajectories of the agent loop: `verl.trajectory` > `verl.generate`, `verl.tool`, `verl.compute_score`.

They run in the agent-loop workers, ahead of or beside the trainer, and sit under the rollout (or validation) stage of
the step that scheduled them. Only the first few of each step and worker are recorded; the rest are counted, and what
happens in them knows its step and stage all the same.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanKind,
    Tracer,
)

from verl_otel import border
from verl_otel.identity import Identity
from verl_otel.metrics.instruments import Instruments
from verl_otel.semconv import attributes as attr
from verl_otel.semconv.stages import GENERATE_TIMER, ROLLOUT_TIMER, TRAJECTORY_TIMERS, VALIDATION_TIMER, Stage
from verl_otel.tracing import ids
from verl_otel.tracing.errors import fail

MAX_SPANS = 100
"""Spans inside one trajectory; more are counted as dropped."""

_TRAJECTORY = otel_context.create_key("verl-otel-trajectory")


@dataclass
class Trajectory:
    """A trajectory that is running; its span does not record if it is one too many."""

    span: Span
    token: Any
    spans: int = 0
    versions: tuple[int, int] | None = None
    """The oldest and the newest weights that it was generated with."""


@dataclass
class Part:
    """An open span inside a trajectory."""

    span: Span
    token: Any


class Trajectories:
    """See the module. `enter*`/`leave*` never raise."""

    def __init__(
        self,
        tracer: Tracer,
        sampler: Sampler | None,
        instruments: Instruments,
        identity: Identity,
        per_step: int,
        run_context: Context,
    ) -> None:
        self._tracer = tracer
        self._sampler = sampler
        self._instruments = instruments
        self._identity = identity
        self._per_step = per_step
        self._run_context = run_context
        self._started: OrderedDict[tuple[Any, bool], int] = OrderedDict()
        self._newest: int | None = None
        """The newest weights of which an answer was made here."""
        self.steps_schedule = True
        """Whether a step schedules trajectories. fully_async's rollouter does it by itself, and counts its samples."""

    def enter(self, step: Any, sample: Any, rollout: Any, validate: Any) -> Trajectory | None:
        """Open the span of a trajectory that step number `step` scheduled; one that does not record if there
        are enough already."""
        try:
            step, validate = self._scheduled_by(step), bool(validate)
            context, links = self._parent(step, validate)
            stage = "validation" if validate else "rollout"
            context = baggage.set_baggage(attr.STAGE, stage, context)
            context = baggage.set_baggage(attr.MODEL_TYPE, "rollout", context)
            if step is not None:
                context = baggage.set_baggage(attr.STEP_NUMBER, str(step), context)
            if self._admit((("of version", self._newest) if step is None else step, validate)):
                attributes: dict[str, Any] = {
                    attr.RANK: self._identity.worker_index,
                    attr.STAGE: stage,
                    attr.MODEL_TYPE: "rollout",
                    attr.VALIDATE: validate,
                    attr.STEP_NUMBER: step,
                    attr.SAMPLE_INDEX: _integer(sample),
                    attr.ROLLOUT_INDEX: _integer(rollout),
                }
                span = self._tracer.start_span(
                    attr.SPAN_TRAJECTORY,
                    context=context,
                    attributes={key: value for key, value in attributes.items() if value is not None},
                    links=links,
                )
            else:
                self._instruments.dropped("traces", "trajectory_cap")
                span = trace.get_current_span(ids.not_recorded(context))
            trajectory = Trajectory(span, None)
            context = otel_context.set_value(_TRAJECTORY, trajectory, trace.set_span_in_context(span, context))
            trajectory.token = otel_context.attach(context)
            return trajectory
        except Exception:
            border.caught("opening the span of a trajectory")
            return None

    def enter_part(self, timer: str) -> Part | None:
        """Open the span of a timer inside a recorded trajectory; None elsewhere."""
        try:
            trajectory = otel_context.get_value(_TRAJECTORY)
            stage = TRAJECTORY_TIMERS.get(timer)
            if stage is None or not isinstance(trajectory, Trajectory) or not trajectory.span.is_recording():
                return None
            trajectory.spans += 1
            if trajectory.spans > MAX_SPANS:
                self._instruments.dropped("traces", "trajectory_span_cap")
                return None
            extra = {attr.TIMER: timer}
            if timer == GENERATE_TIMER:
                extra["gen_ai.operation.name"] = "text_completion"
            return self._open_part(stage, SpanKind.INTERNAL if timer == "tool_calls" else SpanKind.CLIENT, extra)
        except Exception:
            border.caught(f"opening the span of {timer}")
            return None

    def generated_with(self, version: Any) -> None:
        """A request of the current trajectory was answered with this version of the weights. May raise."""
        trajectory = otel_context.get_value(_TRAJECTORY)
        number = _integer(version) if version is not None else None
        if number is not None and isinstance(trajectory, Trajectory):
            oldest, newest = trajectory.versions or (number, number)
            trajectory.versions = min(oldest, number), max(newest, number)
            self._newest = max(number, self._newest or number)

    def enter_score(self) -> Part | None:
        """Open the span of a reward computation in a reward worker; None outside a recorded trajectory."""
        try:
            caller = trace.get_current_span().get_span_context()
            if not caller.is_valid or not caller.trace_flags.sampled:
                return None
            return self._open_part(TRAJECTORY_TIMERS["compute_score"], SpanKind.SERVER, {})
        except Exception:
            border.caught("opening the span of a score")
            return None

    def leave(self, opened: Trajectory | Part | None, error: BaseException | None = None) -> None:
        """Close what `enter`, `enter_part` or `enter_score` opened."""
        if opened is None:
            return
        try:
            if isinstance(opened, Trajectory) and opened.versions is not None:
                oldest, newest = opened.versions
                opened.span.set_attribute(attr.POLICY_VERSION, newest)
                if oldest != newest:
                    opened.span.set_attribute(attr.POLICY_VERSION_OLDEST, oldest)
            fail(opened.span, error)
            opened.span.end()
        except Exception:
            border.caught("closing the span of a trajectory")
        finally:
            otel_context.detach(opened.token)

    def _open_part(self, stage: Stage, kind: SpanKind, extra: dict[str, str]) -> Part:
        attributes = {
            attr.RANK: self._identity.worker_index,
            attr.STAGE: stage.stage,
            attr.MODEL_TYPE: stage.model_type,
            **extra,
        }
        span = self._tracer.start_span(stage.span, kind=kind, attributes=attributes)
        return Part(span, otel_context.attach(trace.set_span_in_context(span)))

    def _admit(self, key: tuple[Any, bool]) -> bool:
        count = self._started[key] = self._started.pop(key, 0) + 1
        while len(self._started) > 64:
            self._started.popitem(last=False)
        return count <= self._per_step

    def _scheduled_by(self, step: Any) -> int | None:
        number = int(step) if step is not None and self.steps_schedule else -1
        return number if number >= 0 else None  # -1 is verl's for one that it does not know

    def _parent(self, step: int | None, validate: bool) -> tuple[Context, list[Link]]:
        if step is not None and self._sampler is not None:
            timer = VALIDATION_TIMER if validate else ROLLOUT_TIMER
            parent = ids.remote_context(self._sampler, self._identity.run_id, self._identity.attempt, step, timer)
            return trace.set_span_in_context(NonRecordingSpan(parent), Context()), []
        # With providers of the user's own the step's ids are not known here: a trace of its own, linked to the run.
        run = trace.get_current_span(self._run_context).get_span_context()
        return Context(), [Link(run)] if run.is_valid else []


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None

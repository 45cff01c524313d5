"""Trajectories of the agent loop: `verl.trajectory` > `verl.turn` > `verl.generate`, `verl.tool`; `verl.compute_score`.

They run in the agent-loop workers, ahead of or beside the trainer, and sit under the rollout (or validation) stage of
the step that scheduled them. Which are exported is decided in `verl_otel.tracing.keeping`; what happens in the others
knows its step and stage all the same.

A turn begins with a generation, and ends when the next one begins or the loop is over: so it is known of any agent
loop, whoever has written it. Generations at the same time are of one turn.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanKind, Status, StatusCode, Tracer

from verl_otel import border
from verl_otel.background import Background
from verl_otel.config import shown_path
from verl_otel.identity import Identity
from verl_otel.metrics.bounded import OTHER, Bounded
from verl_otel.metrics.instruments import Instruments
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.semconv.stages import (
    GENERATE_TIMER,
    ROLLOUT_TIMER,
    SCORE_TIMER,
    TOOL_TIMER,
    TRAJECTORY_TIMERS,
    VALIDATION_TIMER,
)
from verl_otel.tracing import content, ids, parts
from verl_otel.tracing.errors import describe, is_failure, type_of
from verl_otel.tracing.held import HeldSpan
from verl_otel.tracing.keeping import FIRST, Keeping, OfStep
from verl_otel.tracing.parts import InsideTool, Part, Request, ToolCall

MAX_SPANS = 100
"""Spans inside one trajectory; more are counted as dropped."""

_TRAJECTORY = otel_context.create_key("verl-otel-trajectory")
_ABOUT = otel_context.create_key("verl-otel-about-trajectory")
_TOOL = otel_context.create_key("verl-otel-tool")


@dataclass(frozen=True)
class About:
    """What the agent-loop worker knows of a trajectory that it is about to run; None what it does not know."""

    agent: str | None = None
    data_source: str | None = None
    session: int | None = None
    decode: content.Decode | None = None
    """Of the worker's tokenizer."""


@dataclass(eq=False)
class Trajectory:
    """A trajectory that is running; its span does not record if it is left out."""

    span: Span
    step: OfStep
    stage: str
    about: About
    decided: bool
    """Whether it is known from the beginning what becomes of it: it is one of the first, or its step is not sampled."""
    owner: Trajectories
    started: float
    token: Any = None
    turn: Span | None = None
    turns: int = 0
    spans: int = 0
    generating: int = 0
    """Generations that are running."""
    requests: int = 0
    versions: tuple[int, int] | None = None
    """The oldest and the newest weights that it was generated with."""

    def close(self, error: BaseException | None) -> None:
        self.owner.close(self, error)


class Generation(Part):
    """What an agent loop times as a generation: it has a span of its own only if no request is seen in it."""

    def __init__(self, trajectory: Trajectory, owner: Trajectories) -> None:
        super().__init__(None, None)
        self._trajectory = trajectory
        self._owner = owner
        self._requests = trajectory.requests
        self._start = time.time_ns()

    def close(self, error: BaseException | None) -> None:
        self._trajectory.generating -= 1
        if self._requests == self._trajectory.requests:
            span = self._owner.start(self._trajectory, GENERATE_TIMER, {}, SpanKind.CLIENT, self._start)
            if span is not None:
                parts.end(span, error)


class Trajectories:
    """See the module. Nothing raises."""

    def __init__(
        self,
        tracer: Tracer,
        sampler: Sampler | None,
        instruments: Instruments,
        background: Background,
        identity: Identity,
        per_step: int,
        show_content: bool,
        run_context: Context,
    ) -> None:
        self._tracer = tracer
        self._sampler = sampler
        self._instruments = instruments
        self._background = background
        self._identity = identity
        self._show_content = show_content
        self._run_context = run_context
        self._keeping = Keeping(tracer, background, instruments, per_step)
        self._measures = parts.Measures(instruments, background)
        self._tools = Bounded(parts.MAX_NAMES)
        self._open: weakref.WeakSet[Trajectory] = weakref.WeakSet()
        self._models: dict[str, str] | None = None
        self._newest: int | None = None
        """The newest weights of which an answer was made here."""
        self.steps_schedule = True
        """Whether a step schedules trajectories. fully_async's rollouter does it by itself, and counts its samples."""

    # ---- what hooks tell --------------------------------------------------------------------------------------------

    def enter_about(self, **about: Any) -> Part | None:
        """Say what is known (the fields of `About`) of the trajectory that begins next in this context."""
        return Part(None, otel_context.attach(otel_context.set_value(_ABOUT, About(**about))))

    def enter(self, step: Any, sample: Any, rollout: Any, validate: Any) -> Trajectory | None:
        """Open a trajectory that step number `step` scheduled."""
        try:
            step, validate = self._scheduled_by(step), bool(validate)
            about = otel_context.get_value(_ABOUT)
            about = about if isinstance(about, About) else About()
            context, links = self._parent(step, validate)
            stage = "validation" if validate else "rollout"
            context = baggage.set_baggage(attr.STAGE, stage, context)
            context = baggage.set_baggage(attr.MODEL_TYPE, "rollout", context)
            if step is not None:
                context = baggage.set_baggage(attr.STEP_NUMBER, str(step), context)
            of_step, first = self._keeping.begin((("of version", self._newest) if step is None else step, validate))
            index = _integer(rollout) if about.session is None else about.session
            said = {
                attr.RANK: self._identity.worker_index,
                attr.STAGE: stage,
                attr.MODEL_TYPE: "rollout",
                attr.VALIDATE: validate,
                attr.STEP_NUMBER: step,
                attr.SAMPLE_INDEX: _integer(sample),
                attr.ROLLOUT_INDEX: index,
                attr.DATA_SOURCE: about.data_source,
                gen_ai.GEN_AI_AGENT_NAME: about.agent,
                gen_ai.GEN_AI_OPERATION_NAME: parts.AGENT,
            }
            said = {name: value for name, value in said.items() if value is not None}
            sampled = self._is_sampled(context)
            if first:
                said[attr.TRAJECTORY_KEPT] = FIRST
                span = self._tracer.start_span(attr.SPAN_TRAJECTORY, context, SpanKind.INTERNAL, said, links)
            elif sampled and self._keeping.take():
                span = HeldSpan(context, attr.SPAN_TRAJECTORY, SpanKind.INTERNAL, said, links=links)
            else:
                span = trace.get_current_span(ids.not_recorded(context))
            trajectory = Trajectory(span, of_step, stage, about, first or not sampled, self, time.perf_counter())
            self._open.add(trajectory)
            context = otel_context.set_value(_TRAJECTORY, trajectory, trace.set_span_in_context(span, context))
            trajectory.token = otel_context.attach(context)
            return trajectory
        except Exception:
            border.caught("opening the span of a trajectory")
            return None

    def enter_part(self, timer: str) -> Part | None:
        """Open what a timer of verl stands for inside a trajectory; None elsewhere."""
        try:
            trajectory = otel_context.get_value(_TRAJECTORY)
            if timer not in TRAJECTORY_TIMERS or not isinstance(trajectory, Trajectory):
                return None
            if timer == GENERATE_TIMER:
                return self._generation(trajectory)
            if timer != SCORE_TIMER:
                return None  # the tool calls of a turn: each has a span of its own
            self._end_turn(trajectory)
            span = self.start(trajectory, timer, {attr.TIMER: timer}, SpanKind.CLIENT)
            return None if span is None else Part(span, _attach(span))
        except Exception:
            border.caught(f"opening the span of {timer}")
            return None

    def enter_generation(self) -> Part | None:
        """Begin a generation that may take several requests; None outside a trajectory."""
        try:
            trajectory = otel_context.get_value(_TRAJECTORY)
            return self._generation(trajectory) if isinstance(trajectory, Trajectory) else None
        except Exception:
            border.caught("beginning a generation")
            return None

    def enter_request(self, client: Any, request_id: Any, asked: Mapping[str, Any]) -> Request | None:
        """Open the span of a request to a rollout server; None outside a trajectory.

        Args:
            client: verl's client, which has the configuration.
            asked: the arguments of its `generate`: `prompt_ids`, `sampling_params`, ...
        """
        try:
            trajectory = otel_context.get_value(_TRAJECTORY)
            if not isinstance(trajectory, Trajectory):
                return None
            sampling = asked.get("sampling_params") or {}
            of_teacher = "prompt_logprobs" in sampling  # what a teacher thinks of a trajectory that is over
            if not of_teacher:
                self._begin_turn(trajectory)
            span = None
            if trajectory.span.is_recording():
                said = {gen_ai.GEN_AI_OPERATION_NAME: parts.TEXT, **_asked(sampling)}
                if request_id is not None:
                    said[gen_ai.GEN_AI_CONVERSATION_ID] = str(request_id)
                prompt = asked.get("prompt_ids")
                if prompt is not None:
                    said[gen_ai.GEN_AI_USAGE_INPUT_TOKENS] = len(prompt)
                if of_teacher:
                    said[attr.MODEL_TYPE] = "teacher"
                else:
                    said.update(self._model(client))
                span = self.start(trajectory, GENERATE_TIMER, said, SpanKind.CLIENT)
            trajectory.generating += 1
            trajectory.requests += 1
            return Request(span, None if span is None else _attach(span), trajectory, self._background)
        except Exception:
            border.caught("opening the span of a request")
            return None

    def enter_tool(self, name: str, call_id: Any = None, known: bool = True) -> Part | None:
        """Open the span of a tool call; inside a call that has one already, it is the tool itself that begins.

        Args:
            known: whether there is a tool of this name; otherwise the model has made it up, and it is not recorded.
        """
        try:
            trajectory, call = otel_context.get_value(_TRAJECTORY), otel_context.get_value(_TOOL)
            if not isinstance(trajectory, Trajectory):
                return None
            if isinstance(call, ToolCall):
                return None if call.called else InsideTool(call)
            name = name if known else OTHER
            said = {
                gen_ai.GEN_AI_OPERATION_NAME: parts.TOOL,
                gen_ai.GEN_AI_TOOL_NAME: name,
                gen_ai.GEN_AI_TOOL_TYPE: "function",
            }
            if call_id is not None:
                said[gen_ai.GEN_AI_TOOL_CALL_ID] = str(call_id)
            span = self.start(trajectory, TOOL_TIMER, said)
            labels = {attr.RANK: self._identity.worker_index, attr.STAGE: trajectory.stage, attr.MODEL_TYPE: "none"}
            call = ToolCall(span, None, self._measures, {**labels, gen_ai.GEN_AI_TOOL_NAME: self._tools(name)})
            context = otel_context.set_value(_TOOL, call)
            call.token = otel_context.attach(context if span is None else trace.set_span_in_context(span, context))
            return call
        except Exception:
            border.caught("opening the span of a tool call")
            return None

    def answered(self, opened: Part | None, asked: Any, answer: Any) -> None:
        """What came of a request (`TokenOutput`) or a tool call (its text).

        Args:
            asked: the prompt's tokens, or the tool's arguments.
        """
        try:
            if isinstance(opened, Request | ToolCall):
                opened.answered(answer)
                if self._show_content and opened.span is not None:
                    self._show(opened, asked, answer)
        except Exception:
            border.caught("reading an answer")

    def generated_with(self, version: Any) -> None:
        """A request of the current trajectory was answered with this version of the weights. May raise."""
        trajectory = otel_context.get_value(_TRAJECTORY)
        number = _integer(version) if version is not None else None
        if number is not None and isinstance(trajectory, Trajectory):
            oldest, newest = trajectory.versions or (number, number)
            trajectory.versions = min(oldest, number), max(newest, number)
            self._newest = max(number, self._newest or number)

    def leave(self, opened: Trajectory | Part | None, error: BaseException | None = None) -> None:
        """Close what one of the `enter` methods opened."""
        parts.leave(opened, error)

    def release(self) -> None:
        """Record what is held of the slowest trajectories so far, since what is pending is to be sent."""
        self._keeping.release()

    def end_open(self) -> None:
        """Training is over, and so are the trajectories that still run: their spans end here, or never."""
        try:
            for trajectory in list(self._open):
                if not trajectory.decided:
                    trajectory.decided = True
                    self._instruments.dropped("traces", "trajectory_cap")
                elif trajectory.span.is_recording():
                    trajectory.span.set_attribute(attr.UNFINISHED_TRAJECTORY, True)
                    self._end_turn(trajectory)
                    trajectory.span.end()
        except Exception:
            border.caught("ending trajectories that still run")

    # ---- inside -----------------------------------------------------------------------------------------------------

    def start(
        self,
        trajectory: Trajectory,
        timer: str,
        said: Mapping[str, Any],
        kind: SpanKind = SpanKind.INTERNAL,
        start: int | None = None,
    ) -> Span | None:
        """The span of a part of a trajectory: a score under the trajectory itself, the others under the turn. None if
        the trajectory is left out, or has too many."""
        stage = TRAJECTORY_TIMERS[timer]
        attributes = {
            attr.RANK: self._identity.worker_index,
            attr.STAGE: stage.stage if timer == SCORE_TIMER else trajectory.stage,
            attr.MODEL_TYPE: stage.model_type,
            **said,
        }
        return self._start(trajectory, trajectory.turn or trajectory.span, stage.span, attributes, kind, start)

    def _start(
        self,
        trajectory: Trajectory,
        parent: Span,
        name: str,
        attributes: Mapping[str, Any],
        kind: SpanKind,
        start: int | None = None,
    ) -> Span | None:
        if not parent.is_recording():
            return None
        held = isinstance(parent, HeldSpan)
        trajectory.spans += 1
        if trajectory.spans > MAX_SPANS or (held and not self._keeping.take()):
            self._instruments.dropped("traces", "trajectory_span_cap")
            return None
        if held:
            return parent.child(name, kind, attributes, start)
        return self._tracer.start_span(name, trace.set_span_in_context(parent), kind, attributes, start_time=start)

    def _generation(self, trajectory: Trajectory) -> Generation:
        self._begin_turn(trajectory)
        trajectory.generating += 1
        return Generation(trajectory, self)

    def _begin_turn(self, trajectory: Trajectory) -> None:
        if trajectory.generating:
            return
        self._end_turn(trajectory)
        trajectory.turns += 1
        said = {
            attr.RANK: self._identity.worker_index,
            attr.STAGE: trajectory.stage,
            attr.MODEL_TYPE: "rollout",
            attr.TURN_NUMBER: trajectory.turns,
        }
        trajectory.turn = self._start(trajectory, trajectory.span, attr.SPAN_TURN, said, SpanKind.INTERNAL)

    def _end_turn(self, trajectory: Trajectory) -> None:
        if trajectory.turn is not None:
            trajectory.turn.end()
            trajectory.turn = None

    def close(self, trajectory: Trajectory, error: BaseException | None) -> None:
        """A trajectory has ended."""
        seconds = time.perf_counter() - trajectory.started
        failed = error is not None and is_failure(error)
        if error is not None and failed:
            labels = {attr.RANK: self._identity.worker_index, attr.STAGE: trajectory.stage, attr.MODEL_TYPE: "rollout"}
            self._measures.count(names.TRAJECTORY_FAILURES, labels, type_of(error))
            if trajectory.turn is not None:
                trajectory.turn.set_status(Status(StatusCode.ERROR, describe(error)))
        span = trajectory.span
        try:
            self._end_turn(trajectory)
            if span.is_recording():
                self._say_versions(trajectory)
                parts.end(span, error)
        finally:
            self._open.discard(trajectory)
            held = span if isinstance(span, HeldSpan) else None
            self._keeping.end(trajectory.step, held, trajectory.decided, seconds, failed)

    def _say_versions(self, trajectory: Trajectory) -> None:
        if trajectory.versions is not None:
            oldest, newest = trajectory.versions
            trajectory.span.set_attribute(attr.POLICY_VERSION, newest)
            if oldest != newest:
                trajectory.span.set_attribute(attr.POLICY_VERSION_OLDEST, oldest)

    def _show(self, opened: Request | ToolCall, asked: Any, answer: Any) -> None:
        """Let the span have its texts."""
        trajectory = otel_context.get_value(_TRAJECTORY)
        decode = trajectory.about.decode if isinstance(trajectory, Trajectory) else None
        if isinstance(opened, ToolCall):
            texts = content.of_tool(asked, answer)
        elif decode is not None and isinstance(asked, Sequence):
            texts = content.of_request(asked, answer, decode)
        else:
            return
        if isinstance(opened.span, HeldSpan) and not self._keeping.take(content.WEIGHT):
            self._instruments.dropped("traces", "content_cap")
        else:
            opened.texts = texts

    def _model(self, client: Any) -> dict[str, str]:
        """Of verl's configuration, which all clients of a process share."""
        if self._models is None:
            try:
                config = client.config.actor_rollout_ref
                self._models = {
                    gen_ai.GEN_AI_PROVIDER_NAME: str(config.rollout.name),
                    gen_ai.GEN_AI_REQUEST_MODEL: shown_path(str(config.model.path)),
                }
            except Exception:  # a client of the user's own
                self._models = {}
        return self._models

    def _is_sampled(self, context: Context) -> bool:
        place = trace.get_current_span(context).get_span_context()
        return not place.is_valid or bool(place.trace_flags.sampled)

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


def _attach(span: Span) -> Any:
    return otel_context.attach(trace.set_span_in_context(span))


_ASKED = {
    "temperature": (gen_ai.GEN_AI_REQUEST_TEMPERATURE, float),
    "top_p": (gen_ai.GEN_AI_REQUEST_TOP_P, float),
    "top_k": (gen_ai.GEN_AI_REQUEST_TOP_K, float),
    "max_tokens": (gen_ai.GEN_AI_REQUEST_MAX_TOKENS, int),
    "max_new_tokens": (gen_ai.GEN_AI_REQUEST_MAX_TOKENS, int),
}


def _asked(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters by OpenTelemetry's names, as far as they are set."""
    return {name: kind(sampling[key]) for key, (name, kind) in _ASKED.items() if sampling.get(key) is not None}


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None

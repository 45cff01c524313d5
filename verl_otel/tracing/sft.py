"""Steps of SFT, which verl does not time: from a call of `train_batch` until verl logs what it gave.

Under torchrun every rank runs the loop; the one that logs opens the spans, and the others, which count as verl does,
put their calls below them. On Ray the driver runs the loop and calls the ranks. A validation is from the first call of
`infer_batch` until its loss is logged. What is between (loading data) is in no step.
"""

from dataclasses import dataclass
from typing import Any

from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import NonRecordingSpan

from verl_otel import border
from verl_otel.identity import Identity
from verl_otel.semconv import attributes as attr
from verl_otel.semconv.stages import CHECKPOINT_TIMER, SFT_TRAIN_TIMER, SFT_VALIDATION_TIMER, STEP_TIMER, stage_of
from verl_otel.tracing import ids
from verl_otel.tracing.steps import Scope, Steps


@dataclass
class Below:
    """The context of another process's stage, attached around a call."""

    token: Any


class SftLoop:
    """See the module. The methods never raise, and do nothing in a process that runs no SFT."""

    def __init__(self, steps: Steps, sampler: Sampler | None, identity: Identity) -> None:
        self._steps = steps
        self._sampler = sampler
        self._identity = identity
        self._runs = False
        self._logs = False
        self._began = False
        self._step: Scope | None = None
        self._stage: Scope | None = None
        self.global_steps = 0
        """The step in which verl is, as in verl's other trainers."""

    def begin(self) -> None:
        """This process runs the loop, or one of its ranks."""
        self._runs = True

    def resumed(self, step: Any) -> None:
        """The step of the checkpoint from which verl goes on, 0 if there is none."""
        if isinstance(step, int):
            self.global_steps = step

    def logs(self) -> None:
        """This process is the one that logs."""
        if self._runs and not self._logs:
            self._logs = True
            self._steps.lead(self)

    def enter_call(self, method: str) -> Scope | Below | None:
        """Before a call of the engine, on a rank or from the driver."""
        if not self._runs:
            return None
        try:
            if method not in (SFT_TRAIN_TIMER, SFT_VALIDATION_TIMER):
                return self._below(STEP_TIMER) if self._began and not self._logs else None
            if method == SFT_TRAIN_TIMER:
                self._end(None)
                self._began = True
                self.global_steps += 1
            if not self._logs:
                return self._below(method)
            if method == SFT_TRAIN_TIMER:
                self._step = self._steps.enter(STEP_TIMER)
            if self._stage is None:
                self._stage = self._steps.enter(method)
            return self._stage
        except Exception:
            border.caught(f"opening the step of {method}")
            return None

    def leave_call(self, opened: Scope | Below | None, error: BaseException | None) -> None:
        """After the call. A validation goes on, with other calls."""
        if isinstance(opened, Below):
            otel_context.detach(opened.token)
        elif opened is not None and opened is self._stage and (error is not None or self._step is not None):
            self._stage = None
            self._steps.leave(opened, error)

    def logged(self, step: Any) -> None:
        """verl has logged the values of the step, or of its validation."""
        self._end(None)
        if self._logs and isinstance(step, int):
            self.global_steps = step

    def enter_checkpoint(self) -> Scope | None:
        """Before verl saves."""
        if not self._logs or not self._began:
            return None
        self._end(None)
        return self._steps.enter(CHECKPOINT_TIMER)

    def close(self, error: BaseException | None) -> None:
        """The process ends, perhaps in the middle of a step."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        stage, self._stage = self._stage, None
        step, self._step = self._step, None
        self._steps.leave(stage, error)
        self._steps.leave(step, error)

    def _below(self, method: str) -> Below | None:
        if self._sampler is None:
            return None
        stage = stage_of(method)
        number, identity = self.global_steps, self._identity
        parent = ids.remote_context(self._sampler, identity.run_id, identity.attempt, number, method)
        context = trace.set_span_in_context(NonRecordingSpan(parent), Context())
        for key, value in (
            (attr.STAGE, stage.stage),
            (attr.MODEL_TYPE, stage.model_type),
            (attr.STEP_NUMBER, str(number)),
        ):
            context = baggage.set_baggage(key, value, context)
        return Below(otel_context.attach(context))

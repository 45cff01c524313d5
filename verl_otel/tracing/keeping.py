"""Which trajectories are exported: the first few of each step, those that have failed, and the slowest of each step.

All but the first are held (`verl_otel.tracing.held`) until it is known what they are. What is not kept is counted.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Tracer

from verl_otel import forks
from verl_otel.background import Background
from verl_otel.metrics.instruments import Instruments
from verl_otel.semconv import attributes as attr
from verl_otel.tracing.held import HeldSpan

FIRST, FAILED, SLOWEST = "first", "failed", "slowest"

MAX_HELD = 20_000
"""Spans of all trajectories that are held at once, about 1 KB each; what begins then is not held."""

MAX_FAILED = 50
"""Failed trajectories of a step that are recorded: where everything fails, no more of it helps anyone."""

MAX_STEPS = 64
"""Steps that are remembered."""

SETTLED = 1.0
"""Seconds without a running trajectory after which a step has seen its slowest one."""


@dataclass(eq=False)
class OfStep:
    """The trajectories of a step, or of its validation, in this process."""

    started: int = 0
    running: int = 0
    failed: int = 0
    slowest: float = 0.0
    """Seconds of the slowest so far."""
    held: HeldSpan | None = None
    """The slowest so far, unless it is recorded as one of the first."""


class Keeping:
    """See the module. Used from several threads.

    Args:
        per_step: how many are the first few; with 0 none is kept at all.
    """

    def __init__(self, tracer: Tracer, background: Background, instruments: Instruments, per_step: int) -> None:
        self._tracer = tracer
        self._background = background
        self._instruments = instruments
        self._per_step = per_step
        self._lock = forks.lock(self, "_lock")
        self._steps: OrderedDict[Any, OfStep] = OrderedDict()
        self._weight = 0

    def begin(self, key: Any) -> tuple[OfStep, bool]:
        """A trajectory of the step `key` begins: its step, and whether it is one of the first."""
        forgotten = None
        with self._lock:
            step = self._steps[key] = self._steps.pop(key, None) or OfStep()
            step.started += 1
            step.running += 1
            if len(self._steps) > MAX_STEPS:
                forgotten = self._steps.popitem(last=False)[1]
        if forgotten is not None:
            self._release(forgotten)
        return step, step.started <= self._per_step

    def take(self, weight: int = 1) -> bool:
        """Whether so many spans more may be held; if so, they count from now on."""
        with self._lock:
            if not self._per_step or self._weight + weight > MAX_HELD:
                return False
            self._weight += weight
            return True

    def end(self, step: OfStep, span: HeldSpan | None, decided: bool, seconds: float, failed: bool) -> None:
        """A trajectory has ended.

        Args:
            span: its span if it was held.
            decided: whether it needs no decision: it is recorded anyway, its step is not sampled, or it is given up.
        """
        kept, forgotten, left_out = None, span, not decided
        with self._lock:
            step.running -= 1
            step.failed += failed
            if decided and span is not None:
                pass  # given up
            elif failed and step.failed <= MAX_FAILED:
                kept, forgotten = span, None
                left_out = left_out and span is None
            elif not failed and seconds > step.slowest and (decided or span is not None):
                forgotten, step.held, step.slowest = step.held, span, seconds
                left_out = forgotten is not None
            over = step.running == 0 and step.held is not None
        if kept is not None:
            self._keep(kept, FAILED)
        if forgotten is not None:
            self._forget(forgotten)
        if left_out:
            self._instruments.dropped("traces", "failed_trajectory_cap" if failed else "trajectory_cap")
        if over:
            self._background.defer(self._wait, step)

    def release(self) -> None:
        """Let go of what is held of steps: their slowest so far is recorded."""
        with self._lock:
            steps = list(self._steps.values())
        for step in steps:
            self._release(step)

    def _wait(self, step: OfStep) -> None:
        """In the background."""
        self._background.hold(lambda: step.running > 0 or step.held is None, SETTLED, self._release_if_over, step)

    def _release_if_over(self, step: OfStep) -> None:
        if step.running == 0:
            self._release(step)

    def _release(self, step: OfStep) -> None:
        with self._lock:
            span, step.held = step.held, None
        if span is not None:
            self._keep(span, SLOWEST)

    def _keep(self, span: HeldSpan, why: str) -> None:
        self._background.defer(span.release, self._tracer, {attr.TRAJECTORY_KEPT: why})
        self._forget(span)

    def _forget(self, span: HeldSpan) -> None:
        with self._lock:
            self._weight -= span.weight

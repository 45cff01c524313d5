"""Trace and span ids that several processes can compute on their own.

The trace of a step has an id derived from (run id, attempt, step), and the step's stages have derived span ids, so that
an agent-loop worker which knows only the step's number puts its spans into the right trace, under the right stage.
Ids that are not derived come from a generator of our own: never from the module `random`'s, which training code seeds
(equal ids on all ranks) and whose sequence must not depend on whether we are there.
"""

import hashlib
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, get_current_span, set_span_in_context

_next = threading.local()
_random = random.Random()  # seeded by the operating system
os.register_at_fork(after_in_child=_random.seed)


def _derive(size: int, *parts: object) -> int:
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=size).digest()
    return int.from_bytes(digest, "big") or 1


def trace_id(run_id: str, attempt: int, step: int) -> int:
    """128-bit id of the trace of one step."""
    return _derive(16, "verl.trace", run_id, attempt, step)


def span_id(run_id: str, attempt: int, step: int, name: str) -> int:
    """64-bit id of the first span called `name` directly in a step (`step` itself, or one of verl's timers)."""
    return _derive(8, "verl.span", run_id, attempt, step, name)


@contextmanager
def use(trace: int | None, span: int | None) -> Iterator[None]:
    """Give the next span that this thread starts these ids (None: one of its own), if our generator is in use."""
    _next.ids = [trace, span]
    try:
        yield
    finally:
        _next.ids = None


class DerivedIdGenerator(IdGenerator):
    """Gives the ids asked for by `use`, and random ids otherwise."""

    def generate_trace_id(self) -> int:
        return _take(0) or _random.getrandbits(128) or 1

    def generate_span_id(self) -> int:
        return _take(1) or _random.getrandbits(64) or 1


def _take(place: int) -> int | None:
    asked = getattr(_next, "ids", None)
    if asked is None:
        return None
    found, asked[place] = asked[place], None
    return found


def sampler_of(provider: object) -> Sampler | None:
    """The sampler of a provider whose ids are derived; None for a provider of the user's, whose ids cannot be known."""
    derives = isinstance(getattr(provider, "id_generator", None), DerivedIdGenerator)
    return provider.sampler if derives else None  # type: ignore[attr-defined]


def run_context(sampler: Sampler, run_id: str, attempt: int) -> SpanContext:
    """The context of the span of a run that has no launcher to make it."""
    trace = _derive(16, "verl.trace", run_id, attempt, "run")
    return SpanContext(
        trace, _derive(8, "verl.span", run_id, attempt, "run"), is_remote=True, trace_flags=_flags(sampler, trace)
    )


def remote_context(sampler: Sampler, run_id: str, attempt: int, step: int, name: str) -> SpanContext:
    """The context of a span that another process opens, or will open, in the trace of a step.

    The sampling decision is the one that the trainer takes: samplers decide on the trace id of a root span.
    """
    trace = trace_id(run_id, attempt, step)
    span = span_id(run_id, attempt, step, name)
    return SpanContext(trace, span, is_remote=True, trace_flags=_flags(sampler, trace))


def _flags(sampler: Sampler, trace: int) -> TraceFlags:
    result = sampler.should_sample(Context(), trace, "verl.step")
    return TraceFlags(TraceFlags.SAMPLED if result.decision is Decision.RECORD_AND_SAMPLE else TraceFlags.DEFAULT)


def not_recorded(context: Context) -> Context:
    """`context`, under whose span nothing is recorded: what is one too many keeps its place, and leaves no span."""
    parent = get_current_span(context).get_span_context()
    place = SpanContext(parent.trace_id or 1, parent.span_id or 1, is_remote=True, trace_flags=TraceFlags())
    return set_span_in_context(NonRecordingSpan(place), context)

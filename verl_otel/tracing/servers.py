"""Requests of a rollout server: `verl.server.generate`, under the `verl.generate` of a recorded trajectory.

Runs in the server's process, on its event loop. Every request is counted (`verl_otel.metrics.servers`); only those of
recorded trajectories have a span. Of nested calls (prefill and decode on one server) only the outermost is a request.
"""

import functools
import time
from dataclasses import dataclass
from typing import Any

from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer

from verl_otel import border
from verl_otel.metrics.servers import Served, ServerMetrics
from verl_otel.semconv import attributes as attr
from verl_otel.tracing import propagation
from verl_otel.tracing.errors import fail

_REQUEST = otel_context.create_key("verl-otel-server-request")


@dataclass
class Request:
    """A request that is being answered."""

    span: Span | None
    token: Any
    stage: str
    prompt_tokens: int | None
    started: float


class Servers:
    """See the module. `enter` and `leave` never raise."""

    def __init__(self, tracer: Tracer, metrics: ServerMetrics) -> None:
        self._tracer = tracer
        self._metrics = metrics

    def enter(self, server: Any, carrier: object, prompt: Any) -> Request | None:
        """Begin a request of verl's server object `server`; None for one inside another.

        Args:
            carrier: of the caller's context, None if it sent none.
            prompt: ids of the prompt's tokens; TRT-LLM's server takes a text, too.
        """
        try:
            if otel_context.get_value(_REQUEST):
                return None
            self._metrics.of(server)
            sent = _sent(tuple(carrier.items())) if isinstance(carrier, dict) else None
            context = sent or otel_context.get_current()
            context = otel_context.set_value(_REQUEST, True, context)
            stage = str(baggage.get_baggage(attr.STAGE, context) or "rollout")
            tokens = len(prompt) if hasattr(prompt, "__len__") and not isinstance(prompt, str) else None
            span, caller = None, trace.get_current_span(context).get_span_context()
            if caller.is_valid and caller.trace_flags.sampled:
                attributes: dict[str, Any] = {**self._metrics.labels(stage), **self._metrics.engine}
                if tokens is not None:
                    attributes[attr.INPUT_TOKENS] = tokens
                span = self._tracer.start_span(
                    attr.SPAN_SERVER_GENERATE, context, kind=SpanKind.SERVER, attributes=attributes
                )
                context = trace.set_span_in_context(span, context)
            request = Request(span, otel_context.attach(context), stage, tokens, time.perf_counter())
            self._metrics.began()
            return request
        except Exception:
            border.caught("beginning a request of a rollout server")
            return None

    def leave(self, request: Request | None, output: Any, error: BaseException | None = None) -> None:
        """End a request: verl's `TokenOutput`, or the exception that ended it."""
        if request is None:
            return
        try:
            seconds = time.perf_counter() - request.started
            served = Served.of(output, error, seconds, request.prompt_tokens)
            self._metrics.ended(request.stage, served)
            if request.span is not None:
                request.span.set_attributes(served.on_span())
                fail(request.span, error)
                request.span.end()
        except Exception:
            border.caught("ending a request of a rollout server")
        finally:
            otel_context.detach(request.token)


@functools.lru_cache(maxsize=64)
def _sent(carrier: tuple[tuple[str, str], ...]) -> Context | None:
    """The context in a carrier. All trajectories of a step that are not recorded send the same, and reading it is what
    a request would cost most."""
    return propagation.extract(dict(carrier))

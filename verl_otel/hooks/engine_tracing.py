"""The engines' own spans (vLLM's, SGLang's) join the trajectory: they are given the trace context of the request.

`vllm.v1.engine.async_llm.AsyncLLM.generate(..., trace_headers=)` (read: vLLM 0.33.0) and
`sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request(obj, ...)` with `obj.external_trace_header`
(read: SGLang 0.5.23), both async generators that verl calls in the process of its rollout server. Only where the engine
traces: vLLM with `otlp_traces_endpoint`, SGLang with `enable_trace`. Requests of trajectories that are not recorded say
so, or the engine would begin a trace for each.
"""

import functools
from types import ModuleType
from typing import Any

from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from verl_otel import border, telemetry
from verl_otel.hooks.patches import Patches

_w3c = TraceContextTextMapPropagator()
"""Both engines read the W3C headers only, whatever `OTEL_PROPAGATORS` says."""


def install_vllm(module: ModuleType, patches: Patches) -> None:
    original = module.AsyncLLM.generate

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:  # returns vLLM's own async generator
        try:
            # By keyword, as in all versions: behind prompt, sampling_params and request_id.
            if len(args) <= 3 and kwargs.get("trace_headers") is None:
                traces = getattr(getattr(self, "observability_config", None), "otlp_traces_endpoint", None)
                headers = _headers() if traces else None
                if headers:
                    kwargs["trace_headers"] = headers
        except Exception:
            border.caught("giving vLLM the trace context of a request")
        return original(self, *args, **kwargs)

    patches.set(module.AsyncLLM, "generate", generate)


def install_sglang(module: ModuleType, patches: Patches) -> None:
    original = module.TokenizerManager.generate_request

    @functools.wraps(original)
    def generate_request(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if getattr(self, "enable_trace", False) and getattr(obj, "external_trace_header", "") is None:
                obj.external_trace_header = _headers()
        except Exception:
            border.caught("giving SGLang the trace context of a request")
        return original(self, obj, *args, **kwargs)

    patches.set(module.TokenizerManager, "generate_request", generate_request)


def _headers() -> dict[str, str] | None:
    """`traceparent` (and `tracestate`) of the request that is being answered; None outside one."""
    if telemetry.peek() is None or not get_current_span().get_span_context().is_valid:
        return None
    headers: dict[str, str] = {}
    _w3c.inject(headers)
    return headers

"""Stand-ins for engines that need a GPU: the methods that we wrap, with the signatures of the real ones.

`tests/contract/test_engine_wheels.py` compares them with the real wheels. What they do with the headers is what the
real engines do: a W3C parent for a span of their own provider.
"""

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

VLLM, SGLANG = "0.33.0", "0.5.23"
"""The versions that these were read from."""


class AsyncLLM:
    """`vllm.v1.engine.async_llm.AsyncLLM`."""

    def __init__(self, tracer, endpoint):
        self.tracer = tracer
        self.observability_config = ObservabilityConfig()
        self.observability_config.otlp_traces_endpoint = endpoint
        self.received = []

    async def generate(
        self,
        prompt,
        sampling_params,
        request_id,
        *,
        prompt_text=None,
        lora_request=None,
        tokenization_kwargs=None,
        trace_headers=None,
        priority=0,
        data_parallel_rank=None,
        session_id=None,
        kv_hints=None,
        reasoning_ended=None,
        reasoning_parser_kwargs=None,
    ):
        self.received.append((request_id, trace_headers))
        for text in ("a", "b"):
            yield text
        if self.observability_config.otlp_traces_endpoint:
            parent = TraceContextTextMapPropagator().extract(trace_headers) if trace_headers else None
            self.tracer.start_span("llm_request", context=parent).end()


class ObservabilityConfig:
    otlp_traces_endpoint = None


class GenerateReqInput:
    """`sglang.srt.managers.io_struct.GenerateReqInput`, as far as we look at it."""

    def __init__(self):
        self.external_trace_header = None


class TokenizerManager:
    """`sglang.srt.managers.tokenizer_manager.TokenizerManager`."""

    def __init__(self, enable_trace):
        self.enable_trace = enable_trace
        self.received = []

    async def generate_request(self, obj, request=None):
        self.received.append(obj.external_trace_header)
        yield {"output_ids": [1]}

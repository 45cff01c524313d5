"""The engines' own spans join the trajectory (`hooks/engine_tracing.py`). vLLM and SGLang are stand-ins."""

import asyncio
import functools
from types import ModuleType, SimpleNamespace

import fake_engines
import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace

from verl_otel import telemetry
from verl_otel.hooks import engine_tracing, rollout_server
from verl_otel.hooks.patches import Patches
from verl_otel.tracing import propagation
from verl_otel.tracing.propagation import CARRIER


@pytest.fixture(autouse=True)
def hooked(memory, monkeypatch):
    """Fresh stand-ins, hooked, in a rollout server's process."""
    vllm, sglang, patches = ModuleType("vllm.v1.engine.async_llm"), ModuleType("tokenizer_manager"), Patches()
    vllm.AsyncLLM, sglang.TokenizerManager = fake_engines.AsyncLLM, fake_engines.TokenizerManager  # type: ignore[attr-defined]
    engine_tracing.install_vllm(vllm, patches)
    engine_tracing.install_sglang(sglang, patches)
    monkeypatch.setattr(telemetry, "_current", memory.process("rollout_server"))
    yield
    patches.undo()


class VLLMServer:
    """Calls its engine as verl's `vLLMHttpServer` does."""

    def __init__(self, engine):
        self.engine = engine

    async def generate(self, prompt_ids, **more):
        generator = self.engine.generate(
            prompt=prompt_ids, sampling_params={}, request_id="r", lora_request=None, priority=0, **more
        )
        return SimpleNamespace(token_ids=[text async for text in generator])


class SGLangServer:
    """Calls its engine as verl's `SGLangHttpServer` does."""

    def __init__(self, engine, request=fake_engines.GenerateReqInput):
        self.engine, self.request = engine, request

    async def generate(self, prompt_ids):
        await self.engine.generate_request(self.request(), None).__anext__()


@pytest.fixture
def carrier(memory):
    span = memory.tracer.start_span("verl.generate")
    token = otel_context.attach(trace.set_span_in_context(span))
    carrier = propagation.inject()
    otel_context.detach(token)
    span.end()
    return carrier


def ask(server, carrier, **more):
    return asyncio.run(rollout_server.observed(type(server)).generate(server, [1], **{CARRIER: carrier}, **more))


def not_sampled(carrier):
    return {**carrier, "traceparent": carrier["traceparent"][:-2] + "00"}


def test_the_span_of_vllm_is_below_that_of_its_server(memory, new_memory, carrier):
    engines = new_memory()  # vLLM makes a provider of its own
    engine = fake_engines.AsyncLLM(engines.tracer, "http://collector:4317")
    assert ask(VLLMServer(engine), carrier).token_ids == ["a", "b"]
    ours, theirs = memory.span("verl.server.generate"), engines.span("llm_request")
    assert (theirs.parent.span_id, theirs.context.trace_id) == (ours.context.span_id, ours.context.trace_id)


def test_vllm_makes_no_span_for_a_request_that_is_not_recorded(new_memory, carrier):
    engines = new_memory()
    engine = fake_engines.AsyncLLM(engines.tracer, "http://collector:4317")
    ask(VLLMServer(engine), not_sampled(carrier))
    assert engines.spans == [] and engine.received[0][1]["traceparent"].endswith("-00")


@pytest.mark.parametrize("endpoint", [None, ""])
def test_vllm_that_does_not_trace_gets_no_headers(memory, carrier, endpoint):
    """It would warn."""
    engine = fake_engines.AsyncLLM(memory.tracer, endpoint)
    ask(VLLMServer(engine), carrier)
    assert engine.received == [("r", None)]


def test_headers_that_the_caller_gives_stay(memory, carrier):
    engine = fake_engines.AsyncLLM(memory.tracer, "http://collector:4317")
    ask(VLLMServer(engine), carrier, trace_headers={"traceparent": "theirs"})
    assert engine.received == [("r", {"traceparent": "theirs"})]


def test_only_w3c_headers_go_to_the_engine(memory, carrier):
    engine = fake_engines.AsyncLLM(memory.tracer, "http://collector:4317")
    ask(VLLMServer(engine), {**carrier, "baggage": "stage=rollout"})
    assert engine.received[0][1].keys() == {"traceparent"}


def test_a_call_outside_a_request_is_as_without_us(memory):
    engine = fake_engines.AsyncLLM(memory.tracer, "http://collector:4317")

    async def main():
        return [text async for text in engine.generate([1], {}, "warm-up")]

    assert asyncio.run(main()) == ["a", "b"]
    assert engine.received == [("warm-up", None)]


def test_sglang_gets_the_context_where_it_traces(memory, carrier):
    engine = fake_engines.TokenizerManager(enable_trace=True)
    ask(SGLangServer(engine), carrier)
    (header,) = engine.received
    assert header["traceparent"].split("-")[2] == f"{memory.span('verl.server.generate').context.span_id:016x}"


def test_sglang_that_does_not_trace_gets_none(carrier):
    engine = fake_engines.TokenizerManager(enable_trace=False)
    ask(SGLangServer(engine), carrier)
    assert engine.received == [None]


def test_an_older_sglang_that_takes_no_context_is_left_alone(carrier):
    class Old(fake_engines.TokenizerManager):
        async def generate_request(self, obj, request=None):
            self.received.append(vars(obj))
            yield {}

    patches, module = Patches(), ModuleType("tokenizer_manager")
    module.TokenizerManager = Old  # type: ignore[attr-defined]
    engine_tracing.install_sglang(module, patches)
    engine = Old(enable_trace=True)
    ask(SGLangServer(engine, SimpleNamespace), carrier)
    assert engine.received == [{}]


def test_without_telemetry_the_engines_are_called_as_without_us(memory, monkeypatch, carrier):
    monkeypatch.setattr(telemetry, "_current", None)
    engine = fake_engines.AsyncLLM(memory.tracer, "http://collector:4317")
    ask(VLLMServer(engine), carrier)
    assert engine.received == [("r", None)]


def test_what_is_wrapped_is_put_back(memory):
    patches, module = Patches(), ModuleType("vllm.v1.engine.async_llm")
    module.AsyncLLM = type("AsyncLLM", (), {"generate": lambda self: None})  # type: ignore[attr-defined]
    before = module.AsyncLLM.generate
    engine_tracing.install_vllm(module, patches)
    assert module.AsyncLLM.generate is not before and functools.reduce(
        getattr, ["generate", "__wrapped__"], module.AsyncLLM
    )
    patches.undo()
    assert module.AsyncLLM.generate is before

"""Rollout servers: how their class is wrapped, what a request shows as a span and as metrics."""

import asyncio
import inspect
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from verl_otel import telemetry
from verl_otel.hooks import rollout_server
from verl_otel.hooks.patches import Patches
from verl_otel.metrics.servers import MAX_REQUESTS, Served
from verl_otel.semconv import attributes as attr
from verl_otel.tracing import propagation
from verl_otel.tracing.propagation import BY_VALUE, CARRIER, carrier_kind


class Answer(SimpleNamespace):
    """Like verl's `TokenOutput`."""

    stop_reason = "completed"
    num_preempted = None
    extra_fields = {}


class MyHttpServer:
    """A server like verl's."""

    def __init__(self, answer=None):
        self.answer = answer if answer is not None else Answer(token_ids=[7, 8, 9])
        self.config = SimpleNamespace(name="my_engine")
        self.replica_rank = 3
        self.global_steps = None
        self.seen = []

    async def generate(self, prompt_ids, sampling_params, request_id, image_data=None):
        await asyncio.sleep(0)
        self.seen.append((prompt_ids, sampling_params, request_id, image_data, here()))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def here():
    return trace.get_current_span().get_span_context()


Observed = rollout_server.observed(MyHttpServer)


@pytest.fixture
def process(memory, monkeypatch):
    """The telemetry of a server's process."""
    made = memory.process("rollout_server", worker_group="MyHttpServer", worker_index="3")
    monkeypatch.setattr(telemetry, "_current", made)
    return made


@pytest.fixture
def carrier(memory):
    """What the agent loop sends from a recorded trajectory of a validation."""
    span = memory.tracer.start_span("verl.generate")
    context = baggage.set_baggage(attr.STAGE, "validation", trace.set_span_in_context(span))
    token = otel_context.attach(context)
    carrier = propagation.inject()
    otel_context.detach(token)
    span.end()
    return carrier


def ask(server, *args, **kwargs):
    return asyncio.run(server.generate(*args, **kwargs))


def not_sampled(carrier):
    return {**carrier, "traceparent": carrier["traceparent"][:-2] + "00"}


# ---- the class


def test_the_class_looks_to_ray_as_before_but_for_the_carrier():
    assert (Observed.__name__, Observed.__module__, Observed.__doc__) == (
        "MyHttpServer",
        __name__,
        MyHttpServer.__doc__,
    )
    assert inspect.iscoroutinefunction(Observed.generate)
    parameters = list(inspect.signature(Observed.generate).parameters.values())
    assert carrier_kind(parameters) == BY_VALUE
    assert [p for p in parameters if p.name != CARRIER] == list(
        inspect.signature(MyHttpServer.generate).parameters.values()
    )
    assert CARRIER not in inspect.signature(MyHttpServer.generate).parameters, "the user's own class is as it was"


class Worker:
    async def generate(self):
        pass


class ServerOfFiles:
    async def read(self):
        pass


class OldServer:
    def generate(self):
        pass


@pytest.mark.parametrize(
    ("cls", "expected"), [(MyHttpServer, True), (Worker, False), (ServerOfFiles, False), (OldServer, False)]
)
def test_servers_that_generate_are_told_from_other_actors(cls, expected):
    assert rollout_server.is_server(cls) == expected


def test_ray_gets_the_wrapped_class_and_other_classes_as_they_are():
    module, patches, made = ModuleType("ray.actor"), Patches(), []
    module._make_actor = original = lambda cls, options: made.append((cls, options)) or "an ActorClass"
    rollout_server.install(module, patches)
    assert module._make_actor(MyHttpServer, {"num_cpus": 1}) == "an ActorClass"
    module._make_actor(Worker, {})
    (server, options), (worker, _) = made
    assert issubclass(server, MyHttpServer) and server is not MyHttpServer and options == {"num_cpus": 1}
    assert worker is Worker
    patches.undo()
    assert module._make_actor is original


def test_a_class_that_cannot_be_subclassed_goes_to_ray_as_it_is():
    class FinalServer:
        def __init_subclass__(cls):
            raise TypeError("final")

        async def generate(self):
            pass

    module, made = ModuleType("ray.actor"), []
    module._make_actor = lambda cls, options: made.append(cls)
    rollout_server.install(module, Patches())
    module._make_actor(FinalServer, {})
    assert made == [FinalServer]


def test_it_works_where_this_package_is_not_installed(monkeypatch):
    """Ray pickles the class by value; what it needs of us it asks for in the server's process."""
    from ray import cloudpickle

    travelled = pickle.loads(cloudpickle.dumps(Observed))
    for name in [name for name in sys.modules if name.split(".")[0] == "verl_otel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "verl_otel", None)
    server = travelled()
    assert ask(server, [1], {}, "r", **{CARRIER: {"traceparent": "x"}}).token_ids == [7, 8, 9]


# ---- the span


def test_a_request_of_a_recorded_trajectory_is_a_span_below_it(process, memory, carrier):
    answer = Answer(
        token_ids=[1, 2],
        num_preempted=1,
        extra_fields={"global_steps": 5, "num_cached_tokens": 2},
        stop_reason="completed",
    )
    server = Observed(answer)
    assert ask(server, prompt_ids=[1, 2, 3], sampling_params={}, request_id="r", **{CARRIER: carrier}) is answer
    parent, span = memory.span("verl.generate"), memory.span("verl.server.generate")
    assert (span.parent.span_id, span.context.trace_id) == (parent.context.span_id, parent.context.trace_id)
    assert span.kind is trace.SpanKind.SERVER
    assert span.attributes == {
        "rank": "3",
        "stage": "validation",
        "model_type": "rollout",
        "verl.replica": "3",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "my_engine",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "verl.preemptions": 1,
        "verl.policy.version": 5,
        "verl.stop_reason": "completed",
    }
    ((_, _, _, _, inside),) = server.seen
    assert inside.span_id == span.context.span_id, "so that the engine's own spans can be below it"


def test_what_the_server_does_not_say_is_not_on_the_span(process, memory, carrier):
    ask(Observed(Answer(token_ids=[1], stop_reason=None)), [1], {}, "r", **{CARRIER: carrier})
    span = memory.span("verl.server.generate")
    assert span.attributes[attr.STOP_REASON] == "unknown"
    assert not {attr.PREEMPTIONS, attr.CACHED_TOKENS, attr.POLICY_VERSION} & span.attributes.keys()


@pytest.mark.parametrize("sent", [None, {}, "not sampled", "nonsense", {"traceparent": 7}])
def test_other_requests_have_none_and_are_counted_all_the_same(process, memory, carrier, sent):
    if sent == "not sampled":
        sent = not_sampled(carrier)
    ask(Observed(), [1], {}, "r", **{CARRIER: sent})
    assert [s.name for s in memory.spans] == ["verl.generate"]
    stage = "validation" if sent == not_sampled(carrier) else "rollout"
    assert memory.values("verl.server.requests", "stage", "verl.stop_reason") == {(stage, "completed"): 1}


def test_no_sampler_records_a_request_of_a_trajectory_that_is_not_recorded(new_memory, monkeypatch, carrier):
    memory = new_memory(sampler=ALWAYS_ON)  # which looks at no parent
    monkeypatch.setattr(telemetry, "_current", memory.process("rollout_server"))
    ask(Observed(), [1], {}, "r", **{CARRIER: not_sampled(carrier)})
    assert memory.spans == []


def test_a_request_that_is_not_recorded_tells_the_engine_so(process, carrier):
    server = Observed()
    ask(server, [1], {}, "r", **{CARRIER: not_sampled(carrier)})
    inside = server.seen[0][-1]
    assert inside.is_valid and not inside.trace_flags.sampled


def test_the_characters_of_a_text_are_no_tokens(process, memory, carrier):
    ask(Observed(), "a prompt", {}, "r", **{CARRIER: carrier})
    assert attr.INPUT_TOKENS not in memory.span("verl.server.generate").attributes
    assert memory.values("verl.server.tokens", "gen_ai.token.type") == {("output",): 3}


def test_an_error_goes_through_and_is_on_the_span(process, memory, carrier):
    with pytest.raises(ValueError, match="too long"):
        ask(Observed(ValueError("too long")), [1, 2], {}, "r", **{CARRIER: carrier})
    span = memory.span("verl.server.generate")
    assert not span.status.is_ok and "too long" in span.status.description
    assert memory.values("verl.server.requests", "verl.stop_reason") == {("failed",): 1}
    assert memory.points("verl.server.tokens") == memory.points("gen_ai.server.request.duration") == []
    assert [p.value for p in memory.points("verl.server.active_requests")] == [0]


def test_a_request_that_is_cancelled_ends(process, memory, carrier):
    class Slow(MyHttpServer):
        async def generate(self, prompt_ids):
            await asyncio.sleep(60)

    async def main():
        task = asyncio.create_task(rollout_server.observed(Slow)().generate([1], **{CARRIER: carrier}))
        await asyncio.sleep(0.01)
        assert process.servers._metrics.active == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert process.servers._metrics.active == 0
    assert memory.span("verl.server.generate").end_time


def test_of_prefill_and_decode_on_one_server_only_the_outermost_is_a_request(process, memory, carrier):
    class PrefillServer(MyHttpServer):
        async def generate(self, prompt_ids, inner=False):
            return Answer(token_ids=[1]) if inner else await self.generate(prompt_ids, inner=True)

    ask(rollout_server.observed(PrefillServer)(), [1, 2], **{CARRIER: carrier})
    memory.span("verl.server.generate")
    assert memory.values("verl.server.requests") == {(): 1}


def test_concurrent_requests_have_their_own_parents(process, memory):
    parents = [memory.tracer.start_span(f"parent {i}") for i in range(8)]
    carriers = []
    for parent in parents:
        token = otel_context.attach(trace.set_span_in_context(parent))
        carriers.append(propagation.inject())
        otel_context.detach(token)
        parent.end()
    server = Observed()

    async def main():
        await asyncio.gather(*(server.generate([1], {}, "r", **{CARRIER: c}) for c in carriers))

    asyncio.run(main())
    spans = [s for s in memory.spans if s.name == "verl.server.generate"]
    assert {s.parent.span_id for s in spans} == {p.get_span_context().span_id for p in parents}


# ---- the metrics


def test_requests_tokens_and_latency_are_those_of_the_replica(process, memory):
    server = Observed()
    for length in (1, 2, 3):
        ask(server, [0] * length, {}, "r")
    server.answer = Answer(token_ids=[], stop_reason="aborted", num_preempted=2, extra_fields={"num_cached_tokens": 4})
    ask(server, [0] * 4, {}, "r")
    always = {"rank": "3", "stage": "rollout", "model_type": "rollout", "verl.replica": "3"}
    for name in ("requests", "tokens", "cached_tokens", "preemptions", "active_requests", "token.duration"):
        assert all(always.items() <= dict(p.attributes).items() for p in memory.points(f"verl.server.{name}")), name
    assert memory.values("verl.server.requests", "verl.stop_reason") == {("completed",): 3, ("aborted",): 1}
    assert memory.values("verl.server.tokens", "gen_ai.token.type") == {("input",): 10, ("output",): 9}
    assert memory.values("verl.server.cached_tokens") == {(): 4}
    assert memory.values("verl.server.preemptions") == {(): 2}
    (duration,) = memory.points("gen_ai.server.request.duration")
    assert duration.count == 4 and 0 < duration.sum < 10
    assert dict(duration.attributes) == {
        **always,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "my_engine",
    }
    (per_token,) = memory.points("verl.server.token.duration")
    assert per_token.count == 3 and per_token.sum < duration.sum, "a request without output has no time per token"


def test_what_the_server_never_says_has_no_series(process, memory):
    ask(Observed(SimpleNamespace()), [1], {}, "r")  # of a diffusion model, say
    assert memory.values("verl.server.requests", "verl.stop_reason") == {("unknown",): 1}
    assert memory.values("verl.server.tokens", "gen_ai.token.type") == {("input",): 1}
    for name in ("cached_tokens", "preemptions", "token.duration", "policy_version"):
        assert memory.points(f"verl.server.{name}") == []


def test_the_version_of_the_weights_is_what_verl_has_told_the_server_last(process, memory):
    server = Observed()
    ask(server, [1], {}, "r")
    assert memory.points("verl.server.policy_version") == []
    for version in (0, 7):
        server.global_steps = version
        assert memory.values("verl.server.policy_version", "verl.replica") == {("3",): version}
    del server
    assert memory.points("verl.server.policy_version") == []


def test_a_running_request_is_seen(process, memory):
    active = []

    class Server(MyHttpServer):
        async def generate(self, prompt_ids):
            await asyncio.sleep(0.01)
            active.append([p.value for p in memory.points("verl.server.active_requests")])

    server = rollout_server.observed(Server)()

    async def main():
        await asyncio.gather(server.generate([1]), server.generate([1]))

    asyncio.run(main())
    assert active[0] == [2]
    assert [p.value for p in memory.points("verl.server.active_requests")] == [0]


def test_reasons_to_stop_are_a_closed_set(process, memory):
    for index in range(5):
        ask(Observed(Answer(token_ids=[1], stop_reason=f"because {index}")), [1], {}, "r")
    assert memory.values("verl.server.requests", "verl.stop_reason") == {("other",): 5}


@pytest.mark.parametrize("value", [None, -1, "3", True, 2.5])
def test_what_is_no_count_is_not_one(value):
    output = Answer(token_ids=[], num_preempted=value, extra_fields={"num_cached_tokens": value, "global_steps": value})
    served = Served.of(output, None, 1.0, None)
    assert (served.preemptions, served.cached_tokens, served.policy_version) == (None, None, None)


def test_requests_that_wait_to_be_recorded_are_bounded_and_the_loss_is_counted(process, memory):
    metrics = process.servers._metrics
    metrics._waiting["rollout"] = [Served(1.0, "completed")] * MAX_REQUESTS
    metrics.ended("rollout", Served(1.0, "completed"))
    assert memory.values("verl.otel.dropped", "verl.otel.reason") == {("queue_full",): 1}


def test_metrics_of_servers_can_be_switched_off(memory, monkeypatch):
    monkeypatch.setenv("VERL_OTEL_LEVELS", "server=off")
    monkeypatch.setattr(telemetry, "_current", memory.process("rollout_server"))
    ask(Observed(), [1], {}, "r")
    for name in ("requests", "tokens", "active_requests", "policy_version"):
        assert memory.points(f"verl.server.{name}") == []


def test_without_telemetry_a_request_is_as_without_us():
    assert ask(Observed(), [1], {}, "r").token_ids == [7, 8, 9]


@pytest.mark.parametrize(("actor", "model"), [("vllm_server_0_0", "rollout"), ("vllm_server_reward_0_0", "reward"),
                                              ("sglang_server_teacher_1_0_x", "teacher"), ("", "rollout")])  # fmt: skip
def test_whose_model_a_server_has_is_in_the_name_of_its_actor(process, memory, monkeypatch, actor, model):
    monkeypatch.setattr("verl_otel.metrics.servers.ray_actor", lambda: ("MyHttpServer", actor))
    ask(Observed(), [1], {}, "r")
    assert memory.values("verl.server.requests", "model_type") == {(model,): 1}

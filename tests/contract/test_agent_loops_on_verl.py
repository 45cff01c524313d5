"""Agent loops, tools and rewards of the real verl: turns, calls and errors that verl keeps to itself.

Fakes: the handles of Ray actors (load balancer, rollout server), since no Ray runs here, and the sandbox, an HTTP
server that answers as Sandbox Fusion does.
"""

import asyncio
import contextlib
import http.server
import json
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from opentelemetry import trace
from test_hooks_on_verl import instrumented
from verl import DataProto
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopWorker
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.utils.reward_score import sandbox_fusion
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_otel import telemetry


class Remote:
    """A method of a Ray actor."""

    def __init__(self, answer):
        self._answer = answer

    async def _call(self, *args, **kwargs):
        await asyncio.sleep(0)
        return self._answer(*args, **kwargs)

    def remote(self, *args, **kwargs):
        return asyncio.ensure_future(self._call(*args, **kwargs))


def client(cls=LLMServerClient, reasons=("completed",)):
    """verl's client, of a server that ends its answers for these reasons in turn."""
    reasons = iter(reasons * 100)
    server = SimpleNamespace(
        generate=Remote(
            lambda **_: TokenOutput(token_ids=[5, 6], stop_reason=next(reasons), extra_fields={"global_steps": 1})
        )
    )
    balancer = SimpleNamespace(
        require_acquire_fields=Remote(lambda: []),
        require_release_fields=Remote(lambda: []),
        acquire_server=Remote(lambda request_id: ("server", server)),
        release_server=Remote(lambda server_id: None),
    )
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": {"name": "vllm", "response_length": 8}, "model": {"path": "org/tiny"}}}
    )
    return cls(config, balancer)


@agent_loop.register("asks_twice")
class AsksTwice(AgentLoopBase):
    """Of a user, without timers of verl; registered before verl is instrumented."""

    def __init__(self, server_manager, **kwargs):
        self.server_manager = server_manager

    async def run(self, sampling_params, **kwargs):
        for _ in range(2):
            await self.server_manager.generate("r-1", prompt_ids=[1, 2, 3], sampling_params=sampling_params)
        if kwargs.get("fails"):
            raise LookupError("no answer")
        return await asyncio.to_thread(lambda: trace.get_current_span().get_span_context().span_id)


class Worker(AgentLoopWorker):
    """verl's worker without what it loads; what an agent loop returns is not processed further."""

    def __init__(self, llm_client):
        self.config = OmegaConf.create({"data": {}})
        self.llm_client = llm_client
        self.tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens)))
        self.processor = self.dataset_cls = self.hf_model_type = None
        self.tools = []

    async def _agent_loop_postprocess(self, output, validate, **kwargs):
        return output


def run(worker, agent="asks_twice", **fields):
    trajectory = {"step": 3, "sample_index": 0, "rollout_n": 0, "validate": False}
    return asyncio.run(worker._run_agent_loop({"temperature": 0.5}, trajectory, agent_name=agent, **fields))


def names_below(spans, parent):
    below = sorted((s for s in spans if s.parent.span_id == parent.context.span_id), key=lambda s: s.start_time)
    return [(s.name, names_below(spans, s)) for s in below]


def test_a_loop_of_the_users_own_has_its_turns_and_its_threads_know_where_they_are():
    with instrumented() as seen:
        span_id = run(Worker(client()), data_source="openai/gsm8k", session_id=4)
    (trajectory,) = [span for span in seen.spans if span.name == "verl.trajectory"]
    assert names_below(seen.spans, trajectory) == [("verl.turn", [("verl.generate", [])])] * 2
    assert span_id == trajectory.context.span_id
    said = trajectory.attributes
    assert (said["gen_ai.agent.name"], said["verl.data_source"], said["verl.rollout.index"]) == (
        *("asks_twice", "openai/gsm8k"),
        4,
    )
    generated = next(span.attributes for span in seen.spans if span.name == "verl.generate")
    assert {name: value for name, value in generated.items() if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "org/tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.conversation.id": "r-1",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ("completed",),
    }


def test_a_loop_that_is_registered_later_is_seen_as_well():
    with instrumented() as seen:

        @agent_loop.register("later")
        class Later(AsksTwice):
            pass

        globals()["Later"] = Later
        agent_loop._agent_loop_registry["later"]["_target_"] = f"{__name__}.Later"
        run(Worker(client()), "later")
    assert Counter(span.name for span in seen.spans)["verl.turn"] == 2


def test_a_response_that_a_weight_sync_has_cut_off_is_one_turn():
    with instrumented() as seen:
        run(Worker(client(FullyAsyncLLMServerClient, reasons=("aborted", "completed"))))
    (trajectory,) = [span for span in seen.spans if span.name == "verl.trajectory"]
    both = [("verl.generate", []), ("verl.generate", [])]
    assert names_below(seen.spans, trajectory) == [("verl.turn", both), ("verl.turn", both)]


def test_a_loop_that_fails_is_recorded_though_it_is_not_one_of_the_first(monkeypatch):
    monkeypatch.setenv("VERL_OTEL_TRAJECTORIES", "1")
    with instrumented() as seen:
        run(Worker(client()))
        with pytest.raises(LookupError):
            run(Worker(client()), fails=True)
        assert telemetry.current().background.drained(10)
    failed = [s for s in seen.spans if s.attributes.get("verl.trajectory.kept") == "failed"]
    assert [span.events[0].attributes["exception.message"] for span in failed] == ["no answer"]
    assert names_below(seen.spans, failed[0]) == [("verl.turn", [("verl.generate", [])])] * 2


def test_prompts_and_responses_are_on_the_spans_only_if_asked_for(monkeypatch):
    with instrumented() as seen:
        run(Worker(client()))
    assert not any("messages" in name for span in seen.spans for name in span.attributes)
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    with instrumented() as seen:
        run(Worker(client()))
        assert telemetry.current().background.drained(10)
    said = next(span.attributes for span in seen.spans if span.name == "verl.generate")
    assert json.loads(said["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "1 2 3"}]}
    ]
    assert json.loads(said["gen_ai.output.messages"])[0]["parts"][0]["content"] == "5 6"


# ---- tools


def tools():
    """A tool of each kind that verl has, which fails if it is told to. Each call of this defines the class anew."""
    from verl.tools.base_tool import BaseTool
    from verl.tools.function_tool import FunctionTool

    class Search(BaseTool):
        async def execute(self, instance_id, parameters, **kwargs):
            if parameters.get("fail"):
                raise ConnectionError("search engine is down")
            return await super().execute(instance_id, parameters, **kwargs)

    def schema(name):
        function = SimpleNamespace(name=name)
        return SimpleNamespace(function=function, model_dump=lambda **_: {"name": name})

    def divide(a, b):
        return str(a / b) if a else ()  # which verl does not take

    return [Search({}, schema("search")), FunctionTool("divide", divide, schema("divide"))]


CALLS = [
    ("search", "{}"),
    ("search", '{"fail": true}'),
    ("divide", '{"a": 1, "b": 2}'),
    ("divide", '{"a": 1, "b": 0}'),
    ("divide", '{"a": 0, "b": 1}'),
    ("guess", "{}"),
    ("divide", "{a: 1"),
]


async def call(of_loop):
    """What verl's tool agent tells the model for each of the calls."""
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

    loop = object.__new__(ToolAgentLoop)
    loop.tools = {tool.name: tool for tool in of_loop}
    loop.max_tool_response_length = 1000
    answers = []
    for number, (name, arguments) in enumerate(CALLS):
        made = FunctionCall(name=name, arguments=arguments)
        made.tool_call_id = f"call_{number}"
        answers.append(await loop._call_tool(made, {}, SimpleNamespace()))
    return [(response.text, reward, metrics) for response, reward, metrics in answers]


@pytest.mark.parametrize("defined", ["before", "after"])
def test_each_call_of_a_tool_has_its_span_and_the_error_that_verl_tells_only_the_model(defined):
    without = asyncio.run(call(tools()))
    made = tools() if defined == "before" else None
    with instrumented() as seen:
        t = telemetry.current().trajectories

        async def trajectory():
            opened = t.enter(3, 0, 0, False)
            try:
                return await call(made or tools())
            finally:
                t.leave(opened)

        assert asyncio.run(trajectory()) == without, "the model is told the same"
        assert telemetry.current().background.drained(10)
        errors = {
            (p.attributes["gen_ai.tool.name"], p.attributes["error.type"]): p.value
            for p in seen.points("verl.tool.errors")
        }
        durations = {p.attributes["gen_ai.tool.name"]: p.count for p in seen.points("verl.tool.duration")}
    spans = sorted((s for s in seen.spans if s.name == "verl.tool"), key=lambda s: s.start_time)
    found = [
        (s.attributes["gen_ai.tool.name"], s.attributes.get("error.type"), s.status.status_code.name) for s in spans
    ]
    assert found == [
        ("search", None, "UNSET"),
        ("search", "ConnectionError", "ERROR"),
        ("divide", None, "UNSET"),
        ("divide", "ZeroDivisionError", "ERROR"),
        ("divide", "_OTHER", "ERROR"),
        ("_OTHER", "unknown_tool", "ERROR"),
        ("divide", "invalid_arguments", "ERROR"),
    ]
    assert spans[1].events[0].attributes["exception.message"] == "search engine is down"
    assert [span.attributes["gen_ai.tool.call.id"] for span in spans] == [f"call_{n}" for n in range(7)]
    assert errors == {(name, error): 1 for name, error, _ in found if error}
    assert durations == {"search": 2, "divide": 4, "_OTHER": 1}


def test_tools_that_were_wrapped_are_as_before_after_uninstrument():
    made = tools()
    plain = vars(type(made[0]))["execute"]
    with instrumented():
        assert vars(type(made[0]))["execute"] is not plain
        later = tools()
    assert vars(type(made[0]))["execute"] is plain
    assert asyncio.run(call(later)) == asyncio.run(call(made))


# ---- rewards


@contextlib.contextmanager
def sandbox(answers):
    """A sandbox that answers each request in turn."""
    waiting = list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = waiting.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/run_code"
    finally:
        server.shutdown()
        server.server_close()


def ran(api, run_status, stdout="", code=0):
    return 200, {"status": api, "run_result": {"status": run_status, "stdout": stdout, "return_code": code}}


def test_time_outs_of_the_sandbox_are_counted_though_verl_only_makes_a_score_of_them():
    answers = [ran("Success", "Finished", "1"), ran("Failed", "TimeLimitExceeded"), (500, {})]
    with instrumented() as seen:
        telemetry.current()
        cases = {"inputs": ["x"] * 3, "outputs": ["1"] * 3}
        with sandbox(answers) as url:
            score, _ = sandbox_fusion.compute_score(url, threading.Semaphore(1), 64, "```python\nprint(1)\n```", cases)
        assert telemetry.current().background.drained(10)
        found = {p.attributes["verl.sandbox.status"]: p.value for p in seen.points("verl.sandbox.cases")}
    assert score == pytest.approx(1 / 3)
    assert found == {"success": 1, "timeout": 1, "api_error": 1}


def reward_worker(compute_score, manager="limited", timeout=0.05):
    import importlib

    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

    module = importlib.import_module(f"verl.experimental.reward_loop.reward_manager.{manager}")
    cls = {"limited": "RateLimitedRewardManager", "naive": "NaiveRewardManager"}[manager]
    worker = object.__new__(RewardLoopWorker)
    worker.config = OmegaConf.create(
        {"reward": {"custom_reward_function": {"path": "given"}, "timeout": timeout, "max_concurrent": 8}}
    )
    tokenizer = SimpleNamespace(decode=lambda tokens, **_: "text")
    worker.reward_manager = getattr(module, cls)(worker.config, tokenizer, compute_score)
    worker.reward_manager.loop = asyncio.get_event_loop()
    return worker


def sample(data_source="openai/gsm8k"):
    from tensordict import TensorDict

    batch = TensorDict({"responses": torch.ones(1, 2).long(), "attention_mask": torch.ones(1, 4).long()}, batch_size=1)
    fields = {"data_source": data_source, "reward_model": {"ground_truth": "1"}, "extra_info": {}}
    return DataProto(batch=batch, non_tensor_batch={k: np.array([v], dtype=object) for k, v in fields.items()})


@pytest.mark.parametrize(
    ("manager", "error"),
    [("limited", {"TimeoutError": 1, "_OTHER": 1}), ("naive", {"ValueError": 1})],
)
def test_scores_are_measured_and_their_errors_counted_also_those_that_verl_swallows(manager, error):
    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        if data_source == "slow" and manager == "limited":
            await asyncio.sleep(5)
        if data_source == "bad":
            raise ValueError("unparsable")
        return 1.0

    async def scores():
        worker = reward_worker(compute_score, manager)
        for source in ("openai/gsm8k", "slow", "bad"):
            with contextlib.suppress(ValueError):
                await worker.compute_score(sample(source))

    with instrumented() as seen:
        asyncio.run(scores())
        assert telemetry.current().background.drained(10)
        durations = {p.attributes["verl.data_source"]: p.count for p in seen.points("verl.compute_score.duration")}
        errors = Counter()
        for point in seen.points("verl.compute_score.errors"):
            errors[point.attributes["error.type"]] += point.value
    assert durations == {"openai/gsm8k": 1, "slow": 1, "bad": 1}
    assert errors == error

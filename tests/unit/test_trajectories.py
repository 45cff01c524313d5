"""Trajectories (`tracing/trajectories.py`, `tracing/keeping.py`, `tracing/parts.py`): under the stage of their step,
capped, and what is left out is counted; what their parts say and what is measured of them."""

import asyncio
import contextlib
import time
from types import SimpleNamespace

import pytest
from agent_runs import CLIENT, dropped, generate, inside, make, output, request, run_of, tool, trajectory
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from verl_otel import border, telemetry
from verl_otel.hooks import ray_actors
from verl_otel.tracing import ids, keeping, trajectories


class Trainer:
    global_steps = 5


@pytest.fixture(autouse=True)
def settled_at_once(monkeypatch):
    monkeypatch.setattr(keeping, "SETTLED", 0.0)


def test_a_trajectory_and_its_parts_are_one_branch(memory):
    t = make(memory)
    with inside(t, t.enter(5, 17, 2, False)):
        for _ in range(2):
            with inside(t, t.enter_part("generate_sequences")):
                generate(t)
            assert t.enter_part("tool_calls") is None
            for _ in range(2):
                with tool(t):
                    pass
        with inside(t, t.enter_part("compute_score")), inside(scores_of(memory), scores_of(memory).enter()):
            pass
    assert memory.tree() == {
        "verl.trajectory": {
            "verl.turn": {"verl.generate": {}, "verl.tool": {}, "verl.tool (2)": {}},
            "verl.turn (2)": {"verl.generate": {}, "verl.tool": {}, "verl.tool (2)": {}},
            "verl.compute_score": {"verl.compute_score": {}},
        }
    }
    turns = [span for span in memory.spans if span.name == "verl.turn"]
    assert [turn.attributes["verl.turn.number"] for turn in turns] == [1, 2]
    assert turns[0].end_time <= turns[1].start_time
    assert turns[1].end_time <= memory.spans[-2].start_time, "the last turn ends before the score"


def test_turns_are_known_by_the_requests_alone(memory):
    """As in an agent loop of a user's own, which has no timers of verl."""
    t = make(memory)
    with trajectory(t):
        generate(t)
        with tool(t):
            pass
        generate(t)
    assert memory.tree() == {
        "verl.trajectory": {
            "verl.turn": {"verl.generate": {}, "verl.tool": {}},
            "verl.turn (2)": {"verl.generate": {}},
        }
    }


def test_generations_at_the_same_time_are_of_one_turn(memory):
    t = make(memory)

    async def ask(seconds):
        with request(t):
            await asyncio.sleep(seconds)

    async def run():
        with trajectory(t):
            await asyncio.gather(ask(0.02), ask(0.01), ask(0))
            await ask(0)

    asyncio.run(run())
    assert memory.tree() == {
        "verl.trajectory": {
            "verl.turn": {"verl.generate": {}, "verl.generate (2)": {}, "verl.generate (3)": {}},
            "verl.turn (2)": {"verl.generate": {}},
        }
    }


def test_a_response_that_takes_several_requests_is_one_turn(memory):
    t = make(memory)
    with trajectory(t), inside(t, t.enter_generation()):
        for reason in ("aborted", "completed"):
            with request(t, output(reason=reason)):
                pass
    assert list(memory.tree()["verl.trajectory"]) == ["verl.turn"]
    reasons = [s.attributes["gen_ai.response.finish_reasons"] for s in memory.spans if s.name == "verl.generate"]
    assert reasons == [("aborted",), ("completed",)]


def test_a_generation_in_which_no_request_is_seen_has_its_span_all_the_same(memory):
    t = make(memory)
    with pytest.raises(OSError), trajectory(t), inside(t, t.enter_part("generate_sequences")):
        raise OSError("a server of the user's own")
    assert memory.tree() == {"verl.trajectory": {"verl.turn": {"verl.generate": {}}}}
    for name in ("verl.generate", "verl.turn", "verl.trajectory"):
        assert memory.span(name).status.status_code is StatusCode.ERROR


def test_what_a_teacher_is_asked_is_no_turn(memory):
    t = make(memory)
    with trajectory(t):
        generate(t)
        with inside(t, t.enter_part("compute_score")):
            pass
        with request(t, max_tokens=1, prompt_logprobs=0):
            pass
    assert memory.tree() == {
        "verl.trajectory": {"verl.turn": {"verl.generate": {}}, "verl.compute_score": {}, "verl.generate": {}}
    }
    assert [s.attributes["model_type"] for s in memory.spans if s.name == "verl.generate"] == ["rollout", "teacher"]


def test_a_trajectory_says_which_it_is(memory):
    t = make(memory)
    with inside(t, t.enter(5, 17, 2, False)):
        pass
    assert dict(memory.span("verl.trajectory").attributes) == {
        "rank": "3",
        "stage": "rollout",
        "model_type": "rollout",
        "verl.validate": False,
        "verl.step.number": 5,
        "verl.sample.index": 17,
        "verl.rollout.index": 2,
        "verl.trajectory.kept": "first",
        "gen_ai.operation.name": "invoke_agent",
    }


def test_what_the_worker_knows_of_a_trajectory_is_on_it(memory):
    t = make(memory)
    with trajectory(t, agent="tool_agent", data_source="openai/gsm8k", session=3):
        pass
    said = memory.span("verl.trajectory").attributes
    assert (said["gen_ai.agent.name"], said["verl.data_source"], said["verl.rollout.index"]) == (
        *("tool_agent", "openai/gsm8k"),
        3,
    )


def test_an_index_that_is_not_known_is_left_out(memory):
    t = make(memory)
    with inside(t, t.enter(5, "not a number", None, False)):
        pass
    attributes = memory.span("verl.trajectory").attributes
    assert "verl.sample.index" not in attributes
    assert "verl.rollout.index" not in attributes


def test_parts_say_stage_model_type_and_kind(memory):
    t = make(memory)
    with trajectory(t):
        with request(
            t, output(5, num_cached_tokens=2), temperature=1, top_p=0.9, top_k=-1, max_tokens=16, logprobs=True
        ):
            pass
        with tool(t):
            pass
        with inside(t, t.enter_part("compute_score")):
            pass
    generated, called = memory.span("verl.generate"), memory.span("verl.tool")
    always = {"rank": "3", "stage": "rollout"}
    assert dict(generated.attributes) == {
        **always,
        "model_type": "rollout",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "org/tiny",
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": -1.0,
        "gen_ai.request.max_tokens": 16,
        "gen_ai.conversation.id": "request-1",
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ("completed",),
    }
    assert dict(called.attributes) == {
        **always,
        "model_type": "none",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "search",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "call-1",
    }
    assert dict(memory.span("verl.turn").attributes) == {**always, "model_type": "rollout", "verl.turn.number": 1}
    assert dict(memory.span("verl.compute_score").attributes) == {
        "rank": "3",
        "stage": "reward",
        "model_type": "reward",
        "verl.timer": "compute_score",
    }
    assert (generated.kind, called.kind) == (SpanKind.CLIENT, SpanKind.INTERNAL)


def test_what_verl_does_not_say_of_a_request_is_not_made_up(memory):
    t = make(memory)
    with trajectory(t), inside(t, t.enter_request(CLIENT, "r", {})) as opened:
        t.answered(
            opened, None, SimpleNamespace(token_ids=None, stop_reason=None, extra_fields={"num_cached_tokens": None})
        )
    said = memory.span("verl.generate").attributes
    assert {name for name in said if name.startswith("gen_ai.")} == {
        *("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.conversation.id")
    }


def test_a_client_of_the_users_own_costs_the_names_of_the_model_and_nothing_else(memory):
    t = make(memory)
    with trajectory(t), inside(t, t.enter_request(object(), "r", {})):
        pass
    assert "gen_ai.request.model" not in memory.span("verl.generate").attributes
    assert border.failures() == {}


@pytest.mark.parametrize(("validate", "timer", "stage"), [(False, "gen", "rollout"), (True, "testing", "validation")])
def test_a_trajectory_is_under_the_stage_that_the_trainer_opens(new_memory, validate, timer, stage):
    trainer, worker = new_memory(), new_memory()  # two processes
    steps = trainer.process().steps
    loop = Trainer()
    steps.follow(loop)
    t = make(worker)
    with inside(t, t.enter(5, 1, 0, validate)):
        pass
    step = steps.enter("step")
    steps.leave(steps.enter(timer))
    steps.leave(step)
    trajectory = worker.span("verl.trajectory")
    parent = trainer.span(f"verl.{stage}")
    assert trajectory.attributes["stage"] == stage
    assert trajectory.parent.span_id == parent.context.span_id == ids.span_id("run-1", 1, 5, timer)
    assert trajectory.context.trace_id == parent.context.trace_id == ids.trace_id("run-1", 1, 5)


def test_a_validation_before_training_has_its_trajectories_below_it(new_memory):
    trainer, worker = new_memory(), new_memory()
    steps = trainer.process().steps
    loop = Trainer()
    steps.follow(loop)
    steps.leave(steps.enter_validation())
    t = make(worker)
    with inside(t, t.enter(5, 1, 0, True)):
        pass
    assert worker.span("verl.trajectory").parent.span_id == trainer.span("verl.validation").context.span_id
    assert worker.span("verl.trajectory").context.trace_id == trainer.span("verl.validation").context.trace_id


def test_a_trajectory_is_sampled_when_its_step_is(new_memory):
    sampler = ParentBased(TraceIdRatioBased(0.5))
    trainer, worker = new_memory(sampler), new_memory(sampler)
    t = make(worker)
    recorded = {}
    for step in range(40):
        with ids.use(ids.trace_id("run-1", 1, step), ids.span_id("run-1", 1, step, "step")):
            recorded[step] = trainer.tracer.start_span("verl.step", context=Context()).is_recording()
        with inside(t, t.enter(step, 1, 0, False)):
            pass
    assert {span.attributes["verl.step.number"] for span in worker.spans} == {s for s, yes in recorded.items() if yes}
    assert set(recorded.values()) == {True, False}


def kept(memory):
    """(step, sample, why it is kept) of the recorded trajectories."""
    names = ("verl.step.number", "verl.sample.index", "verl.trajectory.kept")
    return [tuple(map(s.attributes.get, names)) for s in memory.spans if s.name == "verl.trajectory"]


def test_of_each_step_the_first_trajectories_are_recorded_and_the_slowest_and_the_rest_is_counted(memory, clock):
    t = make(memory, per_step=2)
    for step in (5, 6):
        for sample, seconds in enumerate((1, 1, 3, 9, 2)):
            run_of(t, clock, step, sample, seconds)
        memory.settle()
    assert sorted(kept(memory)) == [
        *((5, 0, "first"), (5, 1, "first"), (5, 3, "slowest")),
        *((6, 0, "first"), (6, 1, "first"), (6, 3, "slowest")),
    ]
    assert len([span for span in memory.spans if span.name == "verl.generate"]) == 6
    assert dropped(memory) == {("trajectory_cap",): 4}


def test_if_the_slowest_is_one_of_the_first_no_other_is_recorded(memory, clock):
    t = make(memory, per_step=1)
    with trajectory(t, 5, 0):
        run_of(t, clock, 5, 1, 3)
        clock.now += 1
    assert kept(memory) == [(5, 0, "first")]
    assert dropped(memory) == {("trajectory_cap",): 1}


def test_all_that_fail_are_recorded_and_cancelled_ones_have_not_failed(memory, clock):
    t = make(memory, per_step=1)
    for sample, error in enumerate((None, RuntimeError("a"), None, RuntimeError("b"), asyncio.CancelledError())):
        run_of(t, clock, 5, sample, 5 - sample, error)
    t.release()
    assert sorted(kept(memory)) == [(5, 0, "first"), (5, 1, "failed"), (5, 3, "failed")]
    assert dropped(memory) == {("trajectory_cap",): 2}
    failures = memory.values("verl.trajectory.failures", "error.type", "rank", "stage", "model_type")
    assert failures == {("RuntimeError", "3", "rollout", "rollout"): 2}


def test_what_was_held_is_as_if_it_had_been_recorded_at_once(new_memory):
    """The same trajectory as one of the first, and as one that has failed."""
    seen = []
    for per_step, others in ((1, 0), (1, 1)):
        memory = new_memory()
        t = make(memory, per_step)
        for _ in range(others):
            with trajectory(t):
                pass
        with pytest.raises(OSError), trajectory(t, sample=7, agent="a"):
            with request(t, temperature=1):
                trace.get_current_span().set_attribute("of.user", 1)
                trace.get_current_span().add_event("said", {"by": "user"})
            with tool(t) as call:
                call.failed(ValueError("no"))
            with inside(t, t.enter_part("compute_score")):
                raise OSError("reward worker")
        found = {}
        for span in memory.spans:
            if span.name != "verl.trajectory" or span.attributes["verl.sample.index"] == 7:
                known = {s.context.span_id: s.name for s in memory.spans}
                said = {k: v for k, v in span.attributes.items() if k != "verl.trajectory.kept"}
                events = [(e.name, e.attributes.get("exception.message"), e.attributes.get("by")) for e in span.events]
                parent = known.get(span.parent.span_id, span.parent.span_id)
                found[span.name] = (parent, span.kind, said, events, span.status.status_code, span.context.trace_id)
                assert span.start_time <= span.end_time
        seen.append(found)
    assert seen[0] == seen[1]
    assert seen[0].keys() == {"verl.trajectory", "verl.turn", "verl.generate", "verl.tool", "verl.compute_score"}


def test_the_times_of_what_was_held_are_those_when_it_happened(memory, clock):
    t = make(memory, per_step=1)
    with trajectory(t):
        pass
    before = time.time_ns()
    run_of(t, clock, 5, 1, 1)
    after = time.time_ns()
    time.sleep(0.02)
    t.release()
    held = [span for span in memory.spans if span.name in ("verl.turn", "verl.generate")]
    held += [s for s in memory.spans if s.attributes.get("verl.trajectory.kept") == "slowest"]
    assert len(held) == 3
    assert all(before <= span.start_time <= span.end_time <= after for span in held)


def test_below_what_is_held_nothing_is_recorded_that_could_be_left_without_a_parent(memory, clock):
    t = make(memory, per_step=1)
    for sample in range(3):
        with trajectory(t, sample=sample), request(t):
            memory.tracer.start_span("of the user").end()
            clock.now += sample
    t.release()
    ids_of_spans = {span.context.span_id for span in memory.spans}
    stage = ids.span_id("run-1", 1, 5, "gen")
    assert all(span.parent.span_id in {*ids_of_spans, stage} for span in memory.spans)
    assert [span.name for span in memory.spans].count("of the user") == 1


def test_the_slowest_is_let_go_when_what_is_pending_is_sent(memory, clock, monkeypatch):
    monkeypatch.setattr(keeping, "SETTLED", 1000.0)
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("VERL_OTEL_TRAJECTORIES", "1")
        telemetry = memory.process("agent_loop")
    for sample in range(2):
        run_of(telemetry.trajectories, clock, 5, sample, 1 + sample)
    telemetry.flush(5)
    assert kept(memory) == [(5, 0, "first"), (5, 1, "slowest")]


def test_the_slowest_waits_for_those_that_still_run(memory, clock):
    t = make(memory, per_step=1)
    run_of(t, clock, 5, 0, 1)
    with trajectory(t, sample=1):
        run_of(t, clock, 5, 2, 2)
        memory.settle()
        assert kept(memory) == [(5, 0, "first")]
        clock.now += 10
    memory.settle()
    assert kept(memory) == [(5, 0, "first"), (5, 1, "slowest")]


def test_what_is_held_is_bounded_and_counted(memory, monkeypatch):
    monkeypatch.setattr(keeping, "MAX_HELD", 10)
    t = make(memory, per_step=1)
    opened = []
    for sample in range(8):
        opened.append(t.enter(5, sample, 0, False))
        generate(t)
    for one in reversed(opened):
        t.leave(one, RuntimeError())
    assert t._keeping._weight == 0
    assert len(memory.spans) == 3 + 10, "the first one and ten that were held"
    assert dropped(memory) == {("failed_trajectory_cap",): 3, ("trajectory_span_cap",): 2}


def test_where_everything_fails_not_everything_is_recorded(memory, monkeypatch, clock):
    monkeypatch.setattr(keeping, "MAX_FAILED", 3)
    t = make(memory, per_step=1)
    for step in (5, 6):
        for sample in range(8):
            run_of(t, clock, step, sample, 1, RuntimeError())
    assert [why for _, _, why in kept(memory)] == ["first", "failed", "failed"] * 2
    assert dropped(memory) == {("failed_trajectory_cap",): 10}
    assert memory.values("verl.trajectory.failures", "error.type") == {("RuntimeError",): 16}


def test_the_trajectories_of_a_validation_have_a_cap_of_their_own(memory, clock):
    t = make(memory, per_step=1)
    for validate in (False, True):
        for sample in range(2):
            with trajectory(t, sample=sample, validate=validate):
                clock.now += 2 - sample
    assert [span.attributes["verl.validate"] for span in memory.spans] == [False, True]
    assert dropped(memory) == {("trajectory_cap",): 2}


def test_with_a_cap_of_zero_none_is_recorded(memory):
    t = make(memory, per_step=0)
    with pytest.raises(RuntimeError), trajectory(t):
        generate(t)
        raise RuntimeError
    assert memory.spans == []
    assert dropped(memory) == {("failed_trajectory_cap",): 1}


def test_the_spans_of_one_trajectory_are_capped_and_counted(memory, monkeypatch, clock):
    monkeypatch.setattr(trajectories, "MAX_SPANS", 3)
    t = make(memory, per_step=1)
    for sample in range(2):
        with trajectory(t, sample=sample):
            for _ in range(5):
                with tool(t):
                    clock.now += 1 + sample
    t.release()
    assert len([span for span in memory.spans if span.name == "verl.tool"]) == 6
    assert dropped(memory) == {("trajectory_span_cap",): 4}


def test_the_bookkeeping_does_not_grow_with_the_steps_and_no_slowest_is_lost(memory, monkeypatch, clock):
    monkeypatch.setattr(keeping, "SETTLED", 1000.0)
    t = make(memory, per_step=1)
    for step in range(200):
        for sample in range(3):
            run_of(t, clock, step, sample, sample)
    assert len(t._keeping._steps) == 64
    t.release()
    assert [why for _, _, why in kept(memory)].count("slowest") == 200
    assert t._keeping._weight == 0


def test_of_a_step_that_is_not_sampled_nothing_is_held_and_nothing_has_been_left_out(new_memory):
    memory = new_memory(ParentBased(TraceIdRatioBased(0.0)))
    t = make(memory, per_step=1)
    for _ in range(3):
        with contextlib.suppress(RuntimeError), trajectory(t):
            generate(t)
            raise RuntimeError
    assert (memory.spans, dropped(memory), t._keeping._weight) == ([], {}, 0)


def test_trajectories_that_still_run_when_training_ends_leave_nothing_without_a_parent(memory):
    t = make(memory, per_step=1)
    with trajectory(t) as first:
        generate(t)
        with trajectory(t, sample=1):
            generate(t)
            t.end_open()
            known = {span.context.span_id for span in memory.spans}
            assert [span.name for span in memory.spans] == ["verl.trajectory", "verl.turn", "verl.generate"]
            assert all(span.parent.span_id in {*known, ids.span_id("run-1", 1, 5, "gen")} for span in memory.spans)
            assert first.span.attributes["verl.trajectory.unfinished"] is True
            assert dropped(memory) == {("trajectory_cap",): 1}
    assert dropped(memory) == {("trajectory_cap",): 1}
    assert t._keeping._weight == 0


def test_the_last_flush_of_training_ends_them(memory, monkeypatch):
    process = memory.process("agent_loop")
    monkeypatch.setattr(telemetry, "_current", process)
    with trajectory(process.trajectories):
        ray_actors._flush(None, 1)
        assert memory.span("verl.trajectory").attributes["verl.trajectory.unfinished"] is True


def test_a_tracer_that_fails_costs_the_spans_and_nothing_else(memory, monkeypatch):
    t, scores = make(memory), scores_of(memory)

    def broken(*args, **kwargs):
        raise ValueError("ours")

    with trajectory(t):
        monkeypatch.setattr(t._tracer, "start_span", broken)
        with request(t), tool(t), inside(t, t.enter_part("compute_score")), inside(scores, scores.enter()):
            with inside(t, t.enter_part("generate_sequences")), inside(t, t.enter_generation()):
                pass
            with trajectory(t, sample=1):
                pass
        t.answered(object(), None, None)
    assert set(border.failures()) == {
        "opening the span of a request",
        "opening the span of a tool call",
        "opening the span of compute_score",
        "opening the span of a score",
        "opening the span of generate_sequences",
        "beginning a generation",
        "opening the span of a trajectory",
    }


# ---- tools


def test_an_error_of_a_tool_that_verl_does_not_let_out_is_visible(memory):
    t = make(memory)
    answer = "Error executing tool 'search': down"
    with (
        trajectory(t),
        tool(t, answer=answer),
        contextlib.suppress(ConnectionError),
        inside(t, t.enter_tool("search")),
    ):
        raise ConnectionError("down")
    span = memory.span("verl.tool")
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "ConnectionError")
    assert span.events[0].attributes["exception.message"] == "down"
    assert memory.span("verl.trajectory").status.status_code is StatusCode.UNSET
    labels = ("gen_ai.tool.name", "error.type", "rank", "stage", "model_type")
    assert memory.values("verl.tool.errors", *labels) == {("search", "ConnectionError", "3", "rollout", "none"): 1}
    (point,) = memory.points("verl.tool.duration")
    assert (point.count, dict(point.attributes)) == (
        1,
        {"rank": "3", "stage": "rollout", "model_type": "none", "gen_ai.tool.name": "search"},
    )


@pytest.mark.parametrize(
    ("answer", "known", "error", "name"),
    [
        ("Unknown function 'my secret'. Available tools: ['search']", False, "unknown_tool", "_OTHER"),
        ("Invalid JSON in arguments for 'search': Expecting value", True, "invalid_arguments", "search"),
        ("Error executing tool 'search': no instance", True, "_OTHER", "search"),
        ("Error when executing tool: 'search'", True, "_OTHER", "search"),
    ],
)
def test_a_call_that_verl_refuses_is_an_error_and_what_the_model_has_made_up_is_not_recorded(
    memory, answer, known, error, name
):
    t = make(memory)
    with trajectory(t), tool(t, "search" if known else "my secret", answer, known):
        pass
    span = memory.span("verl.tool")
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, error)
    assert span.attributes["gen_ai.tool.name"] == name
    assert "my secret" not in repr(span.to_json())
    assert memory.values("verl.tool.errors", "gen_ai.tool.name", "error.type") == {(name, error): 1}


def test_a_tool_that_answers_with_words_like_verls_has_not_failed(memory):
    t = make(memory)
    with trajectory(t), tool(t, answer="Unknown function 'f' in line 3"), inside(t, t.enter_tool("search")):
        pass
    assert memory.span("verl.tool").status.status_code is StatusCode.UNSET
    assert memory.points("verl.tool.errors") == []


def test_a_tool_that_an_agent_loop_calls_itself_has_its_span_once(memory):
    """Without verl's `_call_tool`; and a tool that calls what it inherits, or another tool."""
    t = make(memory)
    with trajectory(t), inside(t, t.enter_tool("search")):
        assert t.enter_tool("search") is not None
        assert t.enter_tool("search") is None
    assert list(memory.tree()["verl.trajectory"]) == ["verl.tool"]
    assert [point.count for point in memory.points("verl.tool.duration")] == [1]


def test_tools_are_measured_in_trajectories_that_are_not_recorded(memory):
    t = make(memory, per_step=0)
    with trajectory(t, validate=True), tool(t):
        pass
    (point,) = memory.points("verl.tool.duration")
    assert (point.count, point.attributes["stage"]) == (1, "validation")


def test_names_of_tools_on_metrics_are_bounded(memory):
    t = make(memory, per_step=0)
    with trajectory(t):
        for number in range(60):
            with tool(t, f"tool-{number}"):
                pass
    points = {p.attributes["gen_ai.tool.name"]: p.count for p in memory.points("verl.tool.duration")}
    assert (len(points), points["_OTHER"], points["tool-49"]) == (51, 10, 1)


def test_parallel_calls_each_have_their_own_error(memory):
    t = make(memory)

    async def call(name, fails):
        answer = "Error executing tool" if fails else "fine"
        with tool(t, name, answer), contextlib.suppress(ValueError), inside(t, t.enter_tool(name)):
            await asyncio.sleep(0.01)
            if fails:
                raise ValueError(name)

    async def run():
        with trajectory(t):
            generate(t)
            await asyncio.gather(call("a", True), call("b", False), call("c", True))

    asyncio.run(run())
    spans = {s.attributes["gen_ai.tool.name"]: s for s in memory.spans if s.name == "verl.tool"}
    assert {name: span.attributes.get("error.type") for name, span in spans.items()} == {
        "a": "ValueError",
        "b": None,
        "c": "ValueError",
    }
    turn = memory.span("verl.turn").context.span_id
    assert {span.parent.span_id for span in spans.values()} == {turn}


# ---- scores


def scores_of(memory):
    return memory.process("reward_worker", worker_index="3").scores


@contextlib.contextmanager
def called_from(stage):
    """In a call that has brought the context of a trajectory which is not recorded."""
    token = None if stage is None else otel_context.attach(baggage.set_baggage("stage", stage))
    yield
    if token is not None:
        otel_context.detach(token)


def scored(scores, result, data_source=None, stage="rollout"):
    with called_from(stage), inside(scores, scores.enter(data_source)) as opened:
        scores.answered(opened, result)


def test_each_score_is_measured_by_data_source(memory):
    scores = scores_of(memory)
    for _ in range(3):
        scored(scores, {"reward_score": 1.0, "reward_extra_info": {"acc": 1.0}}, "openai/gsm8k")
    scored(scores, {"reward_score": 1.0}, stage="validation")
    scored(scores, {"reward_score": 1.0}, stage=None)
    assert memory.spans == []
    points = memory.points("verl.compute_score.duration")
    counts = {(p.attributes["stage"], p.attributes["verl.data_source"]): p.count for p in points}
    assert counts == {("reward", "openai/gsm8k"): 3, ("validation", ""): 1, ("other", ""): 1}
    assert {(p.attributes["rank"], p.attributes["model_type"]) for p in points} == {("3", "reward")}


def test_scores_that_fail_or_time_out_are_counted_also_where_verl_makes_a_reward_of_it(memory):
    scores = scores_of(memory)
    with contextlib.suppress(KeyError), inside(scores, scores.enter("a")):
        raise KeyError("ground_truth")
    with contextlib.suppress(asyncio.CancelledError), inside(scores, scores.enter("a")):
        raise asyncio.CancelledError
    scored(scores, {"reward_score": 0.0, "reward_extra_info": {"timeout": True, "acc": 0.0}}, "a")
    scored(scores, {"reward_score": 0.0, "reward_extra_info": {"error": "HTTP 500", "acc": 0.0}}, "a")
    scored(scores, {"reward_score": 0.0, "reward_extra_info": {"error": 0.25, "timeout": 1}}, "a")
    scored(scores, "not what verl returns", "a")
    assert memory.values("verl.compute_score.errors", "error.type", "verl.data_source") == {
        ("KeyError", "a"): 1,
        ("TimeoutError", "a"): 1,
        ("_OTHER", "a"): 1,
    }


def test_test_cases_in_a_sandbox_are_counted_by_what_came_of_them(memory):
    scores_of(memory).checked(["success", "timeout", "success", None])
    found = memory.values("verl.sandbox.cases", "verl.sandbox.status")
    assert found == {("success",): 2, ("timeout",): 1, ("None",): 1}


@pytest.mark.parametrize("recorded", [1, 0])
def test_the_duration_of_a_tool_call_leads_to_its_trace_if_there_is_one(memory, recorded):
    t = make(memory, per_step=recorded)
    with trajectory(t), tool(t):
        pass
    memory.settle()
    (point,) = memory.points("verl.tool.duration")
    assert [e.trace_id for e in point.exemplars] == [ids.trace_id("run-1", 1, 5)] * recorded


def test_the_error_of_another_process_is_named_by_its_cause(memory):
    class RayTaskError(Exception):
        cause = ZeroDivisionError("in the reward function")

    t = make(memory)
    with contextlib.suppress(RayTaskError), trajectory(t):
        raise RayTaskError
    assert memory.values("verl.trajectory.failures", "error.type") == {("ZeroDivisionError",): 1}


@pytest.mark.parametrize("per_step", [0, 1])
def test_what_happens_in_a_trajectory_knows_its_step_and_stage_whether_it_is_recorded_or_not(memory, per_step):
    t = make(memory, per_step)
    for validate, stage in ((False, "rollout"), (True, "validation")):
        with inside(t, t.enter(5, 0, 0, validate)):
            assert baggage.get_baggage("stage") == stage
            assert baggage.get_baggage("verl.step.number") == "5"


def test_below_a_trajectory_that_is_not_recorded_no_score_is(new_memory):
    agent, reward = new_memory(), new_memory()
    asking, answering = make(agent, per_step=0), scores_of(reward)
    with inside(asking, asking.enter(5, 0, 0, False)), inside(answering, answering.enter()):
        pass
    assert reward.spans == []


def test_outside_a_trajectory_there_are_no_parts(memory):
    t = make(memory)
    assert t.enter_part("generate_sequences") is None
    assert t.enter_generation() is None
    assert t.enter_request(CLIENT, "r", {}) is None
    assert t.enter_tool("search") is None
    t.answered(None, None, None)
    t.leave(None)
    assert memory.spans == []


def test_a_timer_that_is_no_part_of_a_trajectory_has_no_span(memory):
    t = make(memory)
    with inside(t, t.enter(5, 0, 0, False)):
        assert t.enter_part("gen") is None
        assert t.enter_part("something new") is None


def test_a_score_is_a_server_span_below_the_trajectory_that_asked_for_it(new_memory):
    agent, reward = new_memory(), new_memory()
    asking, answering = make(agent), scores_of(reward)
    with (
        inside(asking, asking.enter(5, 0, 0, False)),
        inside(asking, asking.enter_part("compute_score")),
        inside(answering, answering.enter()),
    ):
        pass
    score = reward.span("verl.compute_score")
    assert score.parent.span_id == agent.span("verl.compute_score").context.span_id
    assert score.kind is SpanKind.SERVER
    assert dict(score.attributes) == {"rank": "3", "stage": "reward", "model_type": "reward"}
    assert len(reward.points("verl.compute_score.duration")) == 1


def test_a_trajectory_that_fails_between_its_parts_shows_in_which_turn(memory):
    t = make(memory)
    with pytest.raises(TimeoutError), trajectory(t):
        generate(t)
        generate(t)
        raise TimeoutError("search engine")
    failed = [s.attributes.get("verl.turn.number") for s in memory.spans if s.status.status_code is StatusCode.ERROR]
    assert failed == [None, 2]
    assert memory.span("verl.trajectory").events[0].attributes["exception.message"] == "search engine"


def test_with_an_id_generator_of_the_users_own_a_trajectory_links_to_the_run(new_memory):
    memory = new_memory(id_generator=RandomIdGenerator())
    run = memory.tracer.start_span("verl.run", context=Context())
    t = make(memory, run=run)
    with inside(t, t.enter(5, 0, 0, False)):
        pass
    trajectory = memory.span("verl.trajectory")
    assert trajectory.parent is None
    assert [link.context.span_id for link in trajectory.links] == [run.get_span_context().span_id]
    assert trajectory.attributes["verl.step.number"] == 5


def test_without_a_step_number_a_trajectory_has_a_trace_of_its_own(memory):
    t = make(memory)
    with inside(t, t.enter(None, 0, 0, False)):
        pass
    assert memory.span("verl.trajectory").parent is None
    assert "verl.step.number" not in memory.span("verl.trajectory").attributes


def test_a_step_that_cannot_be_read_costs_the_span_and_nothing_else(memory):
    t = make(memory)
    assert t.enter("not a step", 0, 0, False) is None
    assert border.failures() == {"opening the span of a trajectory": 1}

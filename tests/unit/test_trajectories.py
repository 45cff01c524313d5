"""Trajectories (`tracing/trajectories.py`): under the stage of their step, capped, and what is left out is counted."""

import contextlib

import pytest
from opentelemetry import baggage
from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from verl_otel import border
from verl_otel.tracing import ids, trajectories


class Trainer:
    global_steps = 5


def make(memory, per_step=4, run=None):
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("VERL_OTEL_TRAJECTORIES", str(per_step))
        return memory.process("agent_loop", run, worker_index="3").trajectories


@contextlib.contextmanager
def inside(t, opened):
    """What the hooks do around what verl does."""
    error = None
    try:
        yield opened
    except BaseException as e:
        error = e
        raise
    finally:
        t.leave(opened, error)


def dropped(memory):
    return memory.values("verl.otel.dropped", "verl.otel.reason")


def test_a_trajectory_and_its_parts_are_one_branch(memory):
    t = make(memory)
    with inside(t, t.enter(5, 17, 2, False)):
        with inside(t, t.enter_part("generate_sequences")):
            pass
        with inside(t, t.enter_part("tool_calls")):
            pass
        with inside(t, t.enter_part("compute_score")), inside(t, t.enter_score()):
            pass
    assert memory.tree() == {
        "verl.trajectory": {
            "verl.generate": {},
            "verl.tool": {},
            "verl.compute_score": {"verl.compute_score": {}},
        }
    }


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
    }


def test_an_index_that_is_not_known_is_left_out(memory):
    t = make(memory)
    with inside(t, t.enter(5, "not a number", None, False)):
        pass
    attributes = memory.span("verl.trajectory").attributes
    assert "verl.sample.index" not in attributes
    assert "verl.rollout.index" not in attributes


def test_parts_say_stage_model_type_timer_and_kind(memory):
    t = make(memory)
    with inside(t, t.enter(5, 1, 0, False)):
        for timer in ("generate_sequences", "tool_calls", "compute_score"):
            with inside(t, t.enter_part(timer)):
                pass
    generate, tool = memory.span("verl.generate"), memory.span("verl.tool")
    assert dict(generate.attributes) == {
        "rank": "3",
        "stage": "rollout",
        "model_type": "rollout",
        "verl.timer": "generate_sequences",
        "gen_ai.operation.name": "text_completion",
    }
    assert (tool.attributes["stage"], tool.attributes["model_type"]) == ("rollout", "none")
    assert memory.span("verl.compute_score").attributes["model_type"] == "reward"
    assert (generate.kind, tool.kind) == (SpanKind.CLIENT, SpanKind.INTERNAL)


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


def test_only_the_first_trajectories_of_a_step_are_recorded_and_the_rest_is_counted(memory):
    t = make(memory, per_step=2)
    for step in (5, 6):
        for sample in range(5):
            with inside(t, t.enter(step, sample, 0, False)), inside(t, t.enter_part("generate_sequences")):
                pass
    trajectories = [span for span in memory.spans if span.name == "verl.trajectory"]
    assert [(s.attributes["verl.step.number"], s.attributes["verl.sample.index"]) for s in trajectories] == [
        *((5, 0), (5, 1)),
        *((6, 0), (6, 1)),
    ]
    assert len([span for span in memory.spans if span.name == "verl.generate"]) == 4
    assert dropped(memory) == {("trajectory_cap",): 6}


def test_the_trajectories_of_a_validation_have_a_cap_of_their_own(memory):
    t = make(memory, per_step=1)
    for validate in (False, True, False, True):
        with inside(t, t.enter(5, 0, 0, validate)):
            pass
    assert [span.attributes["verl.validate"] for span in memory.spans] == [False, True]
    assert dropped(memory) == {("trajectory_cap",): 2}


def test_with_a_cap_of_zero_none_is_recorded(memory):
    t = make(memory, per_step=0)
    with inside(t, t.enter(5, 0, 0, False)):
        assert t.enter_part("generate_sequences") is None
    assert memory.spans == []
    assert dropped(memory) == {("trajectory_cap",): 1}


def test_the_spans_of_one_trajectory_are_capped_and_counted(memory, monkeypatch):
    monkeypatch.setattr(trajectories, "MAX_SPANS", 3)
    t = make(memory)
    for _ in range(2):
        with inside(t, t.enter(5, 0, 0, False)):
            for _ in range(5):
                with inside(t, t.enter_part("generate_sequences")):
                    pass
    assert len([span for span in memory.spans if span.name == "verl.generate"]) == 6
    assert dropped(memory) == {("trajectory_span_cap",): 4}


def test_the_bookkeeping_of_the_cap_does_not_grow_with_the_steps(memory):
    t = make(memory, per_step=0)
    for step in range(500):
        with inside(t, t.enter(step, 0, 0, False)):
            pass
    assert len(t._started) <= 64


@pytest.mark.parametrize("per_step", [0, 1])
def test_what_happens_in_a_trajectory_knows_its_step_and_stage_whether_it_is_recorded_or_not(memory, per_step):
    t = make(memory, per_step)
    for validate, stage in ((False, "rollout"), (True, "validation")):
        with inside(t, t.enter(5, 0, 0, validate)):
            assert baggage.get_baggage("stage") == stage
            assert baggage.get_baggage("verl.step.number") == "5"


def test_below_a_trajectory_that_is_not_recorded_no_score_is(new_memory):
    agent, reward = new_memory(), new_memory()
    asking, answering = make(agent, per_step=0), make(reward)
    with inside(asking, asking.enter(5, 0, 0, False)), inside(answering, answering.enter_score()):
        pass
    assert reward.spans == []


def test_outside_a_trajectory_there_are_no_parts(memory):
    t = make(memory)
    assert t.enter_part("generate_sequences") is None
    assert t.enter_score() is None
    t.leave(None)
    assert memory.spans == []


def test_a_timer_that_is_no_part_of_a_trajectory_has_no_span(memory):
    t = make(memory)
    with inside(t, t.enter(5, 0, 0, False)):
        assert t.enter_part("gen") is None
        assert t.enter_part("something new") is None


def test_a_score_is_a_server_span_below_the_trajectory_that_asked_for_it(new_memory):
    agent, reward = new_memory(), new_memory()
    asking, answering = make(agent), make(reward)
    with (
        inside(asking, asking.enter(5, 0, 0, False)),
        inside(asking, asking.enter_part("compute_score")),
        inside(answering, answering.enter_score()),
    ):
        pass
    score = reward.span("verl.compute_score")
    assert score.parent.span_id == agent.span("verl.compute_score").context.span_id
    assert score.kind is SpanKind.SERVER
    assert dict(score.attributes) == {"rank": "3", "stage": "reward", "model_type": "reward"}


def test_a_failing_tool_has_error_status_and_its_exception(memory):
    t = make(memory)
    with pytest.raises(TimeoutError), inside(t, t.enter(5, 0, 0, False)), inside(t, t.enter_part("tool_calls")):
        raise TimeoutError("search engine")
    for name in ("verl.tool", "verl.trajectory"):
        assert memory.span(name).status.status_code is StatusCode.ERROR
        assert memory.span(name).events[0].attributes["exception.message"] == "search engine"


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

"""Steps and stages (`tracing/steps.py`): whole traces, as Jaeger shows them."""

import contextlib
import threading
import time
import types

import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from verl_otel import border
from verl_otel.semconv.metrics import STAGE_DURATION
from verl_otel.tracing import ids

# What verl's legacy PPO trainer times in one step, in its order.
PPO_TIMERS = (
    *("gen", "reward", "old_log_prob", "ref", "values", "adv"),
    *("update_critic", "update_actor", "update_weights", "save_checkpoint"),
)


class Trainer:
    """Has what is read of verl's trainer."""

    def __init__(self, global_steps=0):
        self.global_steps = global_steps


class Loop:
    """A training loop that verl-otel follows."""

    def __init__(self, memory, run=None, follow=True):
        self.steps = memory.process("trainer", run, attempt=2).steps
        self.trainer = Trainer()
        if follow:
            self.steps.follow(self.trainer)

    @contextlib.contextmanager
    def time(self, timer):
        """What the hook on verl's timer does."""
        with self.scope(self.steps.enter(timer)):
            yield

    @contextlib.contextmanager
    def scope(self, scope):
        error = None
        try:
            yield
        except BaseException as e:
            error = e
            raise
        finally:
            self.steps.leave(scope, error)

    def validate(self):
        with self.scope(self.steps.enter_validation()):
            pass

    def step(self, *timers):
        self.trainer.global_steps += 1
        with self.time("step"):
            for timer in timers:
                with self.time(timer):
                    pass


@pytest.fixture
def loop(memory):
    return Loop(memory)


@pytest.fixture
def run(memory):
    """The span of the run, as the launcher opens it."""
    return memory.tracer.start_span("verl.run", context=Context())


def no_children(*names):
    return {name: {} for name in names}


def test_a_ppo_step_is_one_trace_with_one_span_per_stage(loop, memory):
    loop.step(*PPO_TIMERS)
    assert memory.tree() == {
        "verl.step": no_children(
            "verl.rollout",
            "verl.reward",
            "verl.log_prob",
            "verl.ref_log_prob",
            "verl.values",
            "verl.advantage",
            "verl.update_critic",
            "verl.update_actor",
            "verl.weight_sync",
            "verl.checkpoint",
        )
    }
    assert len({span.context.trace_id for span in memory.spans}) == 1


def test_each_step_is_a_trace_of_its_own_with_ids_that_others_can_derive(loop, memory):
    loop.step("gen")
    loop.step("gen")
    assert memory.tree() == {
        "verl.step": no_children("verl.rollout"),
        "verl.step (2)": no_children("verl.rollout"),
    }
    names = {"verl.step": "step", "verl.rollout": "gen"}
    assert [(span.context.trace_id, span.context.span_id) for span in memory.spans] == [
        (ids.trace_id("run-1", 2, step), ids.span_id("run-1", 2, step, names[name]))
        for step in (1, 2)
        for name in ("verl.step", "verl.rollout")
    ]


def test_a_step_says_its_number_run_attempt_and_policy_version(loop, memory):
    loop.steps.policy_version = 6
    loop.step()
    assert dict(memory.span("verl.step").attributes) == {
        "rank": "all",
        "stage": "step",
        "model_type": "none",
        "verl.timer": "step",
        "verl.run.id": "run-1",
        "verl.run.attempt": 2,
        "verl.step.number": 1,
        "verl.policy.version": 6,
    }


def test_a_policy_version_that_is_not_known_is_not_guessed(loop, memory):
    loop.step()
    assert "verl.policy.version" not in memory.span("verl.step").attributes


def test_a_stage_says_rank_stage_model_type_and_timer(loop, memory):
    loop.step("update_critic")
    assert dict(memory.span("verl.update_critic").attributes) == {
        "rank": "all",
        "stage": "update",
        "model_type": "critic",
        "verl.timer": "update_critic",
    }


def test_a_timer_that_is_not_known_is_a_stage_of_its_own_name(loop, memory):
    loop.step("My/new-timer")
    assert memory.tree() == {"verl.step": no_children("verl.my.new_timer")}
    assert memory.span("verl.my.new_timer").attributes["stage"] == "other"
    assert memory.span("verl.my.new_timer").attributes["verl.timer"] == "My/new-timer"


def test_a_timer_inside_another_is_its_child(loop, memory):
    loop.trainer.global_steps = 1
    with loop.time("step"), loop.time("gen"):
        with loop.time("reward"):
            pass
        with loop.time("gen_max"):
            pass
    assert memory.tree() == {"verl.step": {"verl.rollout": no_children("verl.reward", "verl.rollout")}}


def test_a_timer_that_runs_twice_in_a_step_has_two_spans(loop, memory):
    loop.step("gen", "gen")
    assert memory.tree() == {"verl.step": no_children("verl.rollout", "verl.rollout (2)")}
    first, second = (span for span in memory.spans if span.name == "verl.rollout")
    assert first.context.span_id == ids.span_id("run-1", 2, 1, "gen")
    assert second.context.span_id != first.context.span_id


def test_the_timers_of_the_agent_loop_are_not_stages(loop, memory):
    loop.step("generate_sequences", "tool_calls", "compute_score")
    assert memory.tree() == no_children("verl.step")


def test_a_step_is_a_root_even_below_another_span_and_links_to_the_run(memory, run):
    context, loop = run.get_span_context(), Loop(memory, run)
    token = otel_context.attach(trace.set_span_in_context(run, Context()))
    loop.step("gen")
    otel_context.detach(token)
    step = memory.span("verl.step")
    assert step.parent is None
    assert [(link.context.trace_id, link.context.span_id) for link in step.links] == [
        (context.trace_id, context.span_id)
    ]
    assert memory.span("verl.rollout").links == ()


def test_without_a_run_a_step_has_no_link(loop, memory):
    loop.step()
    assert memory.span("verl.step").links == ()


def test_a_validation_in_a_step_is_one_span(loop, memory):
    loop.trainer.global_steps = 1
    with loop.time("step"), loop.time("testing"):
        loop.validate()  # verl's own `_validate`, inside its timer
    assert memory.tree() == {"verl.step": no_children("verl.validation")}


def test_a_validation_after_the_step_is_in_the_steps_trace(loop, memory):
    loop.step("gen")
    with loop.time("testing"):
        loop.validate()
    loop.step("gen")
    assert memory.tree() == {
        "verl.step": no_children("verl.rollout", "verl.validation"),
        "verl.step (2)": no_children("verl.rollout"),
    }
    assert memory.span("verl.validation").context.span_id == ids.span_id("run-1", 2, 1, "testing")


def test_a_validation_before_training_is_a_trace_of_its_own(memory, run):
    context, loop = run.get_span_context(), Loop(memory, run)
    loop.validate()
    loop.step("gen")
    assert memory.tree() == {"verl.validation": {}, "verl.step": no_children("verl.rollout")}
    validation = memory.span("verl.validation")
    assert validation.parent is None
    assert validation.context.trace_id == ids.trace_id("run-1", 2, 0)
    assert validation.attributes["verl.step.number"] == 0
    assert validation.attributes["stage"] == "validation"
    assert [link.context.trace_id for link in validation.links] == [context.trace_id]


def test_what_is_timed_before_the_first_step_is_in_that_steps_trace(loop, memory):
    loop.trainer.global_steps = 1
    with loop.time("start_profile"):
        pass
    with loop.time("step"):
        pass
    assert memory.tree() == {"verl.step": no_children("verl.start_profile")}


def test_without_a_step_number_stages_outside_a_step_are_in_the_runs_trace(memory, run):
    context, loop = run.get_span_context(), Loop(memory, run, follow=False)
    with loop.time("adv"):
        pass
    assert memory.span("verl.advantage").parent.span_id == context.span_id


def test_without_a_step_number_a_step_has_ids_of_its_own(memory):
    loop = Loop(memory, follow=False)
    loop.step("gen")
    loop.step("gen")
    assert memory.tree() == {"verl.step": no_children("verl.rollout"), "verl.step (2)": no_children("verl.rollout")}
    assert "verl.step.number" not in memory.spans[0].attributes
    assert len({span.context.span_id for span in memory.spans}) == 4


def test_a_trainer_that_is_gone_is_not_kept_alive(loop):
    assert loop.steps.number() == 0
    del loop.trainer
    assert loop.steps.number() is None


def test_the_set_up_is_in_the_trace_of_the_run(memory, run):
    context, loop = run.get_span_context(), Loop(memory, run)
    with loop.scope(loop.steps.enter_setup()):
        pass
    setup = memory.span("verl.setup")
    assert (setup.context.trace_id, setup.parent.span_id) == (context.trace_id, context.span_id)
    assert setup.attributes["stage"] == "other"


def test_a_failing_stage_has_error_status_and_its_exception(loop, memory):
    loop.trainer.global_steps = 1
    failure = RuntimeError("CUDA out of memory")
    with pytest.raises(RuntimeError) as caught, loop.time("step"), loop.time("update_actor"):
        raise failure
    assert caught.value is failure
    for name in ("verl.update_actor", "verl.step"):
        span = memory.span(name)
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "RuntimeError: CUDA out of memory"
        (event,) = span.events
        assert event.name == "exception"
        assert event.attributes["exception.type"] == "RuntimeError"
        assert event.attributes["exception.message"] == "CUDA out of memory"
        assert "test_steps.py" in event.attributes["exception.stacktrace"]


def test_leaving_with_an_exception_raises_nothing(loop):
    assert loop.steps.leave(loop.steps.enter("gen"), KeyboardInterrupt()) is None
    assert loop.steps.leave(None, RuntimeError()) is None


def test_a_generator_that_is_closed_is_not_an_error(loop, memory):
    loop.steps.leave(loop.steps.enter("gen"), GeneratorExit())
    assert memory.span("verl.rollout").status.status_code is StatusCode.UNSET


def test_a_step_after_a_failed_one_is_a_whole_trace(loop, memory):
    with pytest.raises(RuntimeError), loop.time("step"), loop.time("gen"):
        raise RuntimeError
    loop.step("gen")
    assert memory.tree() == {"verl.step": no_children("verl.rollout"), "verl.step (2)": no_children("verl.rollout")}


def test_each_stage_is_recorded_in_the_histogram_of_durations(loop, memory):
    loop.step("gen", "update_actor")
    loop.step("gen")
    points = {point.attributes["verl.timer"]: point for point in memory.points("verl.stage.duration")}
    assert {timer: point.count for timer, point in points.items()} == {"step": 2, "gen": 2, "update_actor": 1}
    assert dict(points["update_actor"].attributes) == {
        "rank": "all",
        "stage": "update",
        "model_type": "actor",
        "verl.timer": "update_actor",
    }
    assert tuple(points["gen"].explicit_bounds) == STAGE_DURATION.boundaries


def test_the_duration_is_that_of_the_span_in_seconds(loop, memory):
    started = time.perf_counter()
    with loop.time("gen"):
        time.sleep(0.05)
    elapsed = time.perf_counter() - started
    (point,) = memory.points("verl.stage.duration")
    span = memory.span("verl.rollout")
    assert 0.05 <= point.sum <= elapsed
    assert 0.04 <= (span.end_time - span.start_time) / 1e9 <= elapsed + 0.01  # of another clock


def test_a_span_ends_when_its_stage_ends_even_while_the_recorder_is_busy(memory):
    process, gate = memory.process(), threading.Event()
    process.background.defer(gate.wait, 60)
    started = time.perf_counter()
    process.steps.leave(process.steps.enter("gen"))
    call = process.workers.enter(None, "update_actor")
    process.workers.leave(call)
    left, elapsed = time.time_ns(), time.perf_counter() - started
    time.sleep(0.1)
    gate.set()
    assert [span.name for span in memory.spans] == ["verl.rollout", "verl.worker.update_actor"]
    assert all(span.end_time <= left for span in memory.spans)
    for name in ("verl.stage.duration", "verl.worker.duration"):
        assert all(point.sum <= elapsed for point in memory.points(name))


def test_the_exemplar_of_a_duration_leads_to_the_span(loop, memory):
    loop.step("gen")
    for point in memory.points("verl.stage.duration"):
        (exemplar,) = point.exemplars
        span = memory.span({"step": "verl.step", "gen": "verl.rollout"}[point.attributes["verl.timer"]])
        assert (exemplar.trace_id, exemplar.span_id) == (span.context.trace_id, span.context.span_id)


def test_a_running_stage_shows_since_when_and_disappears_when_it_ends(loop, memory):
    loop.trainer.global_steps = 1
    before = time.time()
    with loop.time("step"):
        with loop.time("gen"):
            active = memory.values("verl.stage.active", "verl.timer")
            assert set(active) == {("step",), ("gen",)}
            assert all(before <= since <= time.time() for since in active.values())
        assert set(memory.values("verl.stage.active", "verl.timer")) == {("step",)}
    assert memory.points("verl.stage.active") == []


def test_a_failing_stage_does_not_stay_active(loop, memory):
    with pytest.raises(RuntimeError), loop.time("gen"):
        raise RuntimeError
    assert memory.points("verl.stage.active") == []


def test_ranks_learn_the_stage_from_the_baggage(loop):
    with loop.time("step"):
        with loop.time("update_critic"):
            assert baggage.get_baggage("stage") == "update"
            assert baggage.get_baggage("model_type") == "critic"
        assert baggage.get_baggage("stage") == "step"
    assert baggage.get_all() == {}


def test_the_wait_of_a_v1_trainer_is_not_taken_for_generation(loop, memory):
    loop.step("gen")
    loop.steps.waits_for_rollout = True
    loop.step("gen", "wait_for_enough_samples", "adv")
    waits = [(span.name, span.attributes.get("verl.stage.wait")) for span in memory.spans if span.parent is not None]
    assert waits == [("verl.rollout", None), ("verl.rollout", True), ("verl.rollout", True), ("verl.advantage", None)]


def test_events_belong_to_the_current_or_last_step(memory, run):
    context, loop = run.get_span_context(), Loop(memory, run)

    def current():
        return trace.get_current_span(loop.steps.current_context()).get_span_context().span_id

    assert current() == context.span_id
    loop.step()
    assert current() == ids.span_id("run-1", 2, 1, "step")
    loop.step()
    assert current() == ids.span_id("run-1", 2, 2, "step")


def test_with_an_id_generator_of_the_users_own_the_trace_has_the_same_shape(new_memory):
    memory = new_memory(id_generator=RandomIdGenerator())
    loop = Loop(memory)
    loop.validate()
    loop.step("gen")
    with loop.time("testing"):
        pass
    assert memory.tree() == {
        "verl.validation": {},
        "verl.step": no_children("verl.rollout", "verl.validation"),
    }


def test_a_step_that_is_not_sampled_still_has_its_durations(new_memory):
    memory = new_memory(ALWAYS_OFF)
    Loop(memory).step("gen")
    assert memory.spans == []
    assert {point.attributes["verl.timer"] for point in memory.points("verl.stage.duration")} == {"step", "gen"}


def test_a_failure_of_ours_is_stopped_and_counted(memory, caplog):
    class Broken:
        @property
        def global_steps(self):
            raise RuntimeError("no")

    loop, trainer = Loop(memory, follow=False), Broken()
    loop.steps.follow(trainer)
    for _ in range(3):
        loop.step("gen")
    assert border.failures()["opening the span of step"] == 3
    assert caplog.text.count("opening the span of step failed") == 1


def test_memory_does_not_grow_with_the_steps(loop):
    for _ in range(50):
        loop.step("gen", "adv")
    assert len(loop.steps._named) <= 9


def test_a_timer_inside_a_ranks_call_is_under_that_call(memory):
    process = memory.process("worker")
    call = process.workers.enter(types.SimpleNamespace(rank=1), "update_actor")
    process.steps.leave(process.steps.enter("some_phase"))
    process.workers.leave(call)
    assert memory.tree() == {"verl.worker.update_actor": {"verl.some_phase": {}}}

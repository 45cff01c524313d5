"""Calls on ranks (`tracing/workers.py`): one span per call and rank, directly under the stage."""

import contextlib
from types import SimpleNamespace

import pytest
from opentelemetry import baggage
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode

from verl_otel.semconv.metrics import STAGE_DURATION
from verl_otel.tracing import workers


class Rank:
    """A worker of verl, as far as it is read."""

    def __init__(self, rank=3, **more):
        self.rank = rank
        vars(self).update(more)


@pytest.fixture
def made(memory):
    return memory.process("worker").workers


@contextlib.contextmanager
def calling(made, worker, method):
    opened, error = made.enter(worker, method), None
    try:
        yield opened
    except BaseException as e:
        error = e
        raise
    finally:
        made.leave(opened, error)


@contextlib.contextmanager
def attached(context):
    token = otel_context.attach(context)
    try:
        yield
    finally:
        otel_context.detach(token)


@contextlib.contextmanager
def group(key):
    token = workers.in_group(key)
    try:
        yield
    finally:
        otel_context.detach(token)


def test_the_calls_of_all_ranks_are_directly_under_the_stage(memory, made):
    steps = memory.process("trainer").steps
    step = steps.enter("step")
    stage = steps.enter("update_actor")
    for rank in range(2):
        with calling(made, Rank(rank), "update_actor"):
            pass
    steps.leave(stage)
    steps.leave(step)
    assert memory.tree() == {
        "verl.step": {"verl.update_actor": {"verl.worker.update_actor": {}, "verl.worker.update_actor (2)": {}}}
    }
    calls = [span for span in memory.spans if span.name == "verl.worker.update_actor"]
    assert [span.attributes["rank"] for span in calls] == ["0", "1"]
    assert {(s.attributes["stage"], s.attributes["model_type"]) for s in calls} == {("update", "actor")}


def test_a_call_says_rank_stage_model_type_method_and_group(memory, made):
    context = baggage.set_baggage("stage", "log_prob", baggage.set_baggage("model_type", "ref"))
    with attached(context), group("actor_rollout"), calling(made, Rank(), "compute_ref_log_prob"):
        pass
    (span,) = memory.spans
    assert span.name == "verl.worker.compute_ref_log_prob"
    assert span.kind is SpanKind.SERVER
    attributes = dict(span.attributes)
    assert attributes.pop("verl.memory.rss") > 1_000_000
    assert {name for name in attributes if not name.startswith("verl.memory.")} == {
        *("rank", "stage", "model_type"),
        *("verl.worker.method", "verl.worker.group"),
    }
    assert attributes["rank"] == "3"
    assert attributes["stage"] == "log_prob"
    assert attributes["model_type"] == "ref"
    assert attributes["verl.worker.method"] == "compute_ref_log_prob"
    assert attributes["verl.worker.group"] == "actor_rollout"


def test_of_nested_calls_only_the_outermost_has_a_span(memory, made):
    with calling(made, Rank(), "update_actor"), calling(made, Rank(), "load_model") as inner:
        assert inner is None
    assert memory.tree() == {"verl.worker.update_actor": {}}


def test_the_next_call_has_a_span_again(memory, made):
    for method in ("a", "b"):
        with calling(made, Rank(), method), calling(made, Rank(), "nested"):
            pass
    assert memory.tree() == {"verl.worker.a": {}, "verl.worker.b": {}}


@pytest.mark.parametrize("method", ["_query_dispatch_info", "_query_collect_info", "_private"])
def test_plumbing_has_no_span(memory, made, method):
    with calling(made, Rank(), method) as opened:
        assert opened is None
    assert memory.spans == []


def test_what_plumbing_calls_has_a_span(memory, made):
    with calling(made, Rank(), "_run"), calling(made, Rank(), "update_actor"):
        pass
    assert memory.tree() == {"verl.worker.update_actor": {}}


@pytest.mark.parametrize(
    ("worker", "variable", "rank"),
    [
        (Rank(7), "1", "7"),
        (Rank(0), "1", "0"),
        (object(), "5", "5"),
        (None, "5", "5"),
        (Rank("not a number"), "5", "5"),
        (object(), None, "0"),
    ],
)
def test_the_rank_is_the_workers_own_or_that_of_its_process(memory, made, monkeypatch, worker, variable, rank):
    if variable is not None:
        monkeypatch.setenv("RANK", variable)
    with calling(made, worker, "update_actor"):
        pass
    assert memory.spans[0].attributes["rank"] == rank


ENGINE = SimpleNamespace(model_type="value_model")


@pytest.mark.parametrize(
    ("stage_says", "key", "method", "worker", "model_type"),
    [
        ("critic", "actor_rollout", "update", Rank(), "critic"),  # the stage knows best
        ("none", "critic", "update", Rank(), "critic"),
        (None, "critic", "compute_values", Rank(), "critic"),
        (None, "actor_rollout", "update_actor", Rank(), "actor"),
        (None, "actor_rollout_ref", "compute_ref_log_prob", Rank(), "ref"),
        (None, "ref", "infer_batch", Rank(), "ref"),
        (None, "rollout", "wake_up", Rank(), "rollout"),
        (None, "teacher", "infer_batch", Rank(), "teacher"),
        (None, "rm", "compute_rm_score", Rank(), "reward"),
        (None, "reward_model", "compute_rm_score", Rank(), "reward"),
        (None, None, "train_batch", Rank(config=ENGINE), "critic"),
        (None, None, "train_batch", Rank(config=SimpleNamespace(model_type="language_model")), "actor"),
        (None, None, "train_batch", Rank(config=SimpleNamespace(model_type="something else")), "none"),
        (None, None, "train_batch", Rank(), "none"),
    ],
)
def test_the_model_is_that_of_the_stage_the_group_or_the_engine(
    memory, made, stage_says, key, method, worker, model_type
):
    context = otel_context.get_current() if stage_says is None else baggage.set_baggage("model_type", stage_says)
    with attached(context), group(key) if key else contextlib.nullcontext(), calling(made, worker, method):
        pass
    assert memory.spans[0].attributes["model_type"] == model_type


def test_a_call_outside_any_stage_is_of_stage_other(memory, made):
    with calling(made, Rank(), "init_model"):
        pass
    assert memory.spans[0].attributes["stage"] == "other"
    assert "verl.worker.group" not in memory.spans[0].attributes


def test_a_call_that_brought_no_context_is_in_the_trace_of_the_run(memory):
    run = memory.tracer.start_span("verl.run", context=Context())
    made = memory.process("worker", run).workers
    with calling(made, Rank(), "init_model"):
        pass
    with memory.tracer.start_as_current_span("stage") as stage, calling(made, Rank(), "update_actor"):
        pass
    assert memory.span("verl.worker.init_model").parent.span_id == run.get_span_context().span_id
    assert memory.span("verl.worker.update_actor").parent.span_id == stage.get_span_context().span_id


def test_a_failing_call_has_error_status_and_its_exception(memory, made):
    failure = RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(RuntimeError) as caught, calling(made, Rank(), "update_actor"):
        raise failure
    assert caught.value is failure
    (span,) = memory.spans
    assert span.status.status_code is StatusCode.ERROR
    assert span.events[0].attributes["exception.message"] == str(failure)


def test_the_duration_of_a_call_is_recorded_by_rank_and_method(memory, made):
    for rank in (0, 0, 1):
        with calling(made, Rank(rank), "update_actor"):
            pass
    points = memory.points("verl.worker.duration")
    assert {p.attributes["rank"]: p.count for p in points} == {"0": 2, "1": 1}
    assert dict(points[0].attributes) == {
        "rank": "0",
        "stage": "other",
        "model_type": "none",
        "verl.worker.method": "update_actor",
    }
    assert tuple(points[0].explicit_bounds) == STAGE_DURATION.boundaries


def test_a_worker_that_cannot_be_read_is_called_all_the_same(memory, made):
    class Broken:
        @property
        def rank(self):
            raise RuntimeError("no")

    with calling(made, Broken(), "update_actor") as opened:
        assert opened is None
    assert memory.spans == []

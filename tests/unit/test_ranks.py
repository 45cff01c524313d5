"""The ranks' own values (`metrics/ranks.py`, `tracing/workers.py`): statistics over ranks, and what each reports."""

import contextlib
import math
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.trace import StatusCode
from waiting import until

from verl_otel import border
from verl_otel.config import RankDetail
from verl_otel.metrics import ranks as ranks_module
from verl_otel.metrics.ranks import Called, Report, Statistics, outliers, over_ranks, straggler
from verl_otel.metrics.recorder import Logged
from verl_otel.tracing import workers as workers_module

# ---- figures over ranks ---------------------------------------------------------------------------------------------


def test_statistics_are_those_computed_by_hand():
    found = Statistics.of({0: 2.0, 1: 4.0, 2: 4.0, 3: 4.0, 4: 5.0, 5: 5.0, 6: 7.0, 7: 9.0})
    assert found == Statistics(mean=5.0, std=2.0, min=2.0, max=9.0, min_rank=0, max_rank=7)


def test_the_extremes_are_told_by_rank_and_not_by_place():
    found = Statistics.of({5: 1.0, 2: 3.0, 9: -1.0})
    assert (found.min_rank, found.max_rank) == (9, 2)


def test_ranks_without_a_finite_value_are_left_out_of_statistics():
    found = Statistics.of({0: math.nan, 1: 1.0, 2: math.inf, 3: 3.0, 4: -math.inf})
    assert found == Statistics(mean=2.0, std=1.0, min=1.0, max=3.0, min_rank=1, max_rank=3)


@pytest.mark.parametrize("by_rank", [{}, {0: math.nan}, {0: math.inf, 1: -math.inf}])
def test_without_a_finite_value_there_are_no_statistics(by_rank):
    assert Statistics.of(by_rank) is None


def test_one_rank_has_no_deviation():
    assert Statistics.of({3: 0.1}) == Statistics(0.1, 0.0, 0.1, 0.1, 3, 3)


@given(st.dictionaries(st.integers(0, 100), st.floats(-1e6, 1e6), min_size=1))
def test_statistics_are_those_of_numpy(by_rank):
    import numpy

    found, values = Statistics.of(by_rank), list(by_rank.values())
    assert found.mean == pytest.approx(numpy.mean(values), abs=1e-6)
    assert found.std == pytest.approx(numpy.std(values), abs=1e-6)
    assert by_rank[found.min_rank] == found.min == min(values)
    assert by_rank[found.max_rank] == found.max == max(values)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({}, None),
        ({0: 5.0}, None),
        ({0: 1.0, 1: 1.0, 2: 1.0, 3: 9.0}, 9.0),
        ({0: 2.0, 1: 4.0}, 4 / 3),
        ({0: 0.0, 1: 0.0}, None),
    ],
)
def test_a_straggler_is_told_by_slowest_over_median(seconds, expected):
    assert straggler(seconds) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 1.1, 0.9, 1.05, 9.0], {4}),
        ([1.0, 1.1, 0.9, 1.05, -9.0], {4}),
        ([1.0, 1.1, 0.9, 1.05, 1.2], set()),
        ([100.0, 1.1, 0.9, 1.05, 100.0, 1.0, 1.0], {0, 4}),  # two of them do not hide each other
        ([1.0, 1.0, 1.0, 1.0, 1.0], set()),
        ([1.0, 1.0, 1.0, 1.0, 9.0], {4}),  # the others are equal to the last bit, such as memory
        ([1.0, 9.0], set()),  # which of the two?
        ([1.0, math.nan], {1}),
        ([1.0, 1.1, 0.9, math.inf], {3}),
        ([], set()),
    ],
)
def test_outliers_are_far_from_the_other_ranks_or_not_finite(values, expected):
    assert outliers(dict(enumerate(values))) == expected


def report(rank, **values):
    return Report(str(rank), {}, values)


def test_durations_of_several_calls_are_added_up_and_of_other_values_the_last_counts():
    reports = [report(1, duration=1.0, loss=0.5), report(0, duration=4.0), report(1, duration=2.0, loss=0.25)]
    assert over_ranks(reports) == {"duration": {1: 3.0, 0: 4.0}, "loss": {1: 0.25}}


# ---- asking the ranks of a stage ------------------------------------------------------------------------------------


class Rank:
    """A rank worker as the trainer sees it: an actor that is called for stages and asked for its values.

    Args:
        answered: whether it answers as soon as it is asked.
    """

    def __init__(self, rank, answered=True, dead=False):
        self.rank, self.answered, self.died = rank, answered, dead
        self.calls, self.logged = [], []
        self.asked = 0

    def ask(self):
        self.asked += 1
        return self

    def ready(self):
        return self.answered or self.died

    def get(self):
        if self.died:
            return []
        (calls, self.calls), (logged, self.logged) = (self.calls, []), (self.logged, [])
        return [(calls, logged)]

    def dead(self):
        return self.died

    def ended(self, non_finite=0, stage="update", model_type="actor", method="update_actor", **values):
        """Its call has ended."""
        labels = {"rank": str(self.rank), "stage": stage, "model_type": model_type, "verl.worker.method": method}
        self.calls.append((str(self.rank), labels, values, non_finite))


class Followed:
    """verl's trainer."""

    global_steps = 3


class Trainer:
    """A trainer process, in a step."""

    def __init__(self, memory):
        self.memory = memory
        self.process = memory.process("trainer")
        self._followed = Followed()
        self.process.steps.follow(self._followed)

    @contextlib.contextmanager
    def stage(self, timer, *called):
        """Ranks are called in a stage."""
        scope = self.process.steps.enter(timer)
        for rank in called:
            self.process.ranks.called(scope.id, rank.rank, Called(str(rank.rank), "update_actor", 1), rank.ask)
        yield scope
        self.process.steps.leave(scope)

    def step_event(self):
        self.process.log({"a": 1.0}, 3)
        (event,) = [event for event in self.memory.events if event.event_name == "verl.step"]
        return dict(event.body)


@pytest.fixture
def trainer(memory):
    return Trainer(memory)


def ended(rank, **values):
    rank = Rank(rank)
    rank.ended(**values)
    return rank


def of_ranks(attributes):
    return {name: value for name, value in attributes.items() if name.startswith("verl.ranks")}


EXPECTED = {
    "count": 3,
    "loss.mean": 2.0,
    "loss.std": math.sqrt(2 / 3),
    "loss.min": 1.0,
    "loss.max": 3.0,
    "loss.min_rank": 2,
    "loss.max_rank": 0,
    "duration.mean": 4.0,
    "duration.std": math.sqrt(26 / 3),
    "duration.min": 1.0,
    "duration.max": 8.0,
    "duration.min_rank": 0,
    "duration.max_rank": 2,
    "straggler": 8 / 3,
}


def three_ranks():
    return [ended(0, loss=3.0, duration=1.0), ended(1, loss=2.0, duration=3.0), ended(2, loss=1.0, duration=8.0)]


def test_the_statistics_are_on_the_span_of_the_stage(trainer, memory):
    with trainer.stage("update_actor", *three_ranks()):
        pass
    found = of_ranks(memory.span("verl.update_actor").attributes)
    assert found == pytest.approx({f"verl.ranks.{name}": value for name, value in EXPECTED.items()})


def test_the_statistics_are_in_the_event_of_the_step_by_timer(trainer):
    with trainer.stage("update_actor", *three_ranks()):
        pass
    body = trainer.step_event()
    names = {f"verl.ranks/update_actor/{name.replace('.', '/')}": value for name, value in EXPECTED.items()}
    assert of_ranks(body) == pytest.approx(names)
    assert body["a"] == 1.0


def test_the_straggler_figure_is_a_metric_of_the_stage(trainer, memory):
    with trainer.stage("update_actor", *three_ranks()):
        pass
    (point,) = memory.points("verl.worker.straggler")
    assert point.value == 8 / 3
    assert dict(point.attributes) == {
        **{"rank": "all", "stage": "update", "model_type": "actor"},
        "verl.timer": "update_actor",
    }


def test_values_that_are_not_finite_are_counted_on_the_span_and_left_out_of_the_statistics(trainer, memory):
    with trainer.stage("update_actor", ended(0, loss=1.0), ended(1, loss=math.nan, non_finite=2)):
        pass
    attributes = memory.span("verl.update_actor").attributes
    assert attributes["verl.ranks.non_finite"] == 2
    assert attributes["verl.ranks.count"] == 2
    assert attributes["verl.ranks.loss.mean"] == attributes["verl.ranks.loss.max"] == 1.0
    assert trainer.step_event()["verl.ranks/update_actor/non_finite"] == 2


def test_a_stage_without_ranks_ends_at_once_and_has_no_statistics(trainer, memory):
    with trainer.stage("adv"):
        pass
    assert of_ranks(memory.span("verl.advantage").attributes) == {}


def test_the_span_and_the_event_wait_for_an_answer_that_is_late(trainer, memory):
    late = Rank(1, answered=False)
    with trainer.stage("update_actor", ended(0, loss=1.0), late):
        pass
    trainer.process.log({"a": 1.0}, 3)
    time.sleep(0.1)
    assert memory._spans.get_finished_spans() == () and memory._logs.get_finished_logs() == ()
    late.ended(loss=3.0)
    late.answered = True
    assert memory.span("verl.update_actor").attributes["verl.ranks.loss.mean"] == 2.0
    (event,) = memory.events
    assert event.body["verl.ranks/update_actor/loss/mean"] == 2.0


def test_a_rank_that_answered_before_its_call_ended_is_asked_again(trainer, memory):
    early = Rank(0)
    with trainer.stage("update_actor", early):
        until(lambda: early.asked)
    time.sleep(0.05)
    assert memory._spans.get_finished_spans() == ()
    early.ended(loss=1.5)
    attributes = memory.span("verl.update_actor").attributes
    assert attributes["verl.ranks.loss.mean"] == 1.5
    assert early.asked > 1


def test_a_rank_that_was_called_twice_is_waited_for_until_it_has_told_of_both_calls(trainer, memory):
    rank = ended(0, duration=1.0)
    with trainer.stage("update_actor", rank, rank):
        pass
    time.sleep(0.05)
    assert memory._spans.get_finished_spans() == ()
    rank.ended(duration=2.0)
    attributes = memory.span("verl.update_actor").attributes
    assert (attributes["verl.ranks.duration.mean"], attributes["verl.ranks.count"]) == (3.0, 1)


@pytest.mark.parametrize("dead", [True, False])
def test_a_rank_that_does_not_answer_is_counted_as_missing_and_the_span_has_its_true_end(
    trainer, memory, monkeypatch, dead
):
    monkeypatch.setattr(ranks_module, "WAIT_FOR_RANKS", 0.3)
    with trainer.stage("update_actor", ended(0, loss=1.0), Rank(1, answered=False, dead=dead)) as scope:
        pass
    now = time.time_ns()
    span = memory.span("verl.update_actor")
    waited = (time.time_ns() - now) / 1e9
    assert (waited < 0.2) if dead else (0.2 < waited < 10)  # the dead are not waited for
    assert span.end_time <= now
    assert span.attributes["verl.ranks.missing"] == 1
    assert span.attributes["verl.ranks.count"] == 1
    assert scope.number == 3
    body = trainer.step_event()
    assert body["verl.ranks/update_actor/missing"] == 1
    assert body.get("verl.ranks/update_actor/dead_rank") == (1 if dead else None)


def test_the_call_of_a_dead_rank_has_a_span_in_error_and_an_event(trainer, memory):
    started = time.time_ns() - 5_000_000_000
    stage = trainer.process.steps.enter("update_actor")
    call = Called("1", "update_actor", started)
    trainer.process.ranks.called(stage.id, 1, call, Rank(1, dead=True).ask)
    trainer.process.steps.leave(stage, RuntimeError("ActorDiedError"))
    span = memory.span("verl.worker.update_actor")
    assert span.parent.span_id == memory.span("verl.update_actor").context.span_id
    assert (span.start_time, span.end_time) == (started, memory.span("verl.update_actor").end_time)
    assert (span.status.status_code, span.status.description) == (
        StatusCode.ERROR,
        "the process of this rank has died",
    )
    assert span.attributes["rank"] == "1" and span.attributes["verl.worker.unfinished"] is True
    (event,) = [event for event in memory.events if event.event_name == "verl.worker.error"]
    assert (event.attributes["rank"], event.attributes["verl.step.number"]) == ("1", 3)
    assert event.span_id == span.context.span_id


@pytest.mark.parametrize("failed", [True, False])
def test_a_call_that_has_not_ended_has_a_span_if_the_stage_failed(trainer, memory, monkeypatch, failed):
    monkeypatch.setattr(ranks_module, "WAIT_FOR_RANKS", 0.05)
    stage = trainer.process.steps.enter("update_actor")
    trainer.process.ranks.called(stage.id, 0, Called("0", "update_actor", 1), Rank(0, answered=False).ask)
    trainer.process.steps.leave(stage, RuntimeError("no") if failed else None)
    names = [span.name for span in memory.spans]
    assert names.count("verl.worker.update_actor") == int(failed)


@pytest.mark.parametrize("dead", [True, False])
def test_ranks_that_all_do_not_answer_are_counted_as_missing(trainer, memory, monkeypatch, dead):
    monkeypatch.setattr(ranks_module, "WAIT_FOR_RANKS", 0.05)
    with trainer.stage("update_actor", *(Rank(rank, answered=False, dead=dead) for rank in range(2))):
        pass
    dead_or_not = {"verl.ranks.dead": 2, "verl.ranks.dead_rank": 0} if dead else {}
    assert of_ranks(memory.span("verl.update_actor").attributes) == {"verl.ranks.missing": 2, **dead_or_not}


def test_a_rank_that_died_in_its_second_call_is_missing(trainer, memory, monkeypatch):
    monkeypatch.setattr(ranks_module, "WAIT_FOR_RANKS", 0.05)
    rank = ended(0, loss=1.0)
    with trainer.stage("update_actor", rank, rank):
        pass
    attributes = memory.span("verl.update_actor").attributes
    assert (attributes["verl.ranks.missing"], attributes["verl.ranks.loss.mean"]) == (1, 1.0)


def test_a_call_for_no_stage_that_is_known_holds_nothing_up(trainer, memory):
    never = Rank(0, answered=False)
    trainer.process.ranks.called(0, 0, Called("0", "update_actor", 1), never.ask)
    with trainer.stage("update_actor", ended(1, loss=1.0)):
        pass
    assert memory.span("verl.update_actor").attributes["verl.ranks.count"] == 1
    assert trainer.step_event()["verl.ranks/update_actor/count"] == 1


def test_stages_that_never_end_are_forgotten(trainer, memory):
    for stage in range(1, 200):
        trainer.process.ranks.called(stage, 0, Called("0", "update_actor", 1), Rank(0).ask)
    memory.settle()
    assert len(trainer.process.ranks._stages) == ranks_module.MAX_STAGES


def test_ranks_that_cannot_be_asked_cost_only_their_statistics(trainer, memory, caplog):
    class Broken(Rank):
        def ask(self):
            raise RuntimeError("no")

    with trainer.stage("update_actor", Broken(0)):
        pass
    assert of_ranks(memory.span("verl.update_actor").attributes) == {}
    assert sum(border.failures().values()) == 1


def test_an_answer_that_makes_no_sense_does_not_keep_the_span_open(trainer, memory):
    with trainer.stage("update_actor", ended("no rank", loss=1.0)):
        pass
    assert of_ranks(memory.span("verl.update_actor").attributes) == {}


def test_what_users_have_logged_on_ranks_is_in_the_step_event(trainer):
    rank = ended(0, loss=1.0)
    rank.logged = [("reward/mine", 3, "step", 2, 3.0, 1.0, 2.0)]
    with trainer.stage("update_actor", rank):
        pass
    body = trainer.step_event()
    assert {key: value for key, value in body.items() if key.startswith("reward/")} == {
        "reward/mine": 1.5,
        "reward/mine/min": 1.0,
        "reward/mine/max": 2.0,
        "reward/mine/count": 2,
    }


# ---- only outliers --------------------------------------------------------------------------------------------------


def losses(*values):
    return [ended(rank, loss=value, grad_norm=1.0) for rank, value in enumerate(values)]


def test_of_outliers_only_their_own_values_are_shown_and_withdrawn_when_they_are_outliers_no_more(memory, monkeypatch):
    monkeypatch.setenv("VERL_OTEL_RANK_DETAIL", "outliers")
    trainer = Trainer(memory)
    with trainer.stage("update_actor", *losses(1.0, 1.1, 0.9, 9.0)):
        pass
    (point,) = memory.points("verl.loss")
    assert (point.value, point.attributes["rank"], point.attributes["model_type"]) == (9.0, "3", "actor")
    assert memory.points("verl.grad_norm") == []
    with trainer.stage("update_critic", *losses(1.0, 1.1, 0.9, 1.0)):
        pass
    assert memory.values("verl.loss", "rank") == {("3",): 9.0}  # of another stage
    with trainer.stage("update_actor", *losses(-7.0, 1.1, 0.9, 1.0)):
        pass
    assert memory.values("verl.loss", "rank") == {("0",): -7.0}
    with trainer.stage("update_actor", *losses(1.0, 1.1, 0.9, math.nan)):
        pass
    assert memory.points("verl.loss") == []


def test_outliers_are_not_shown_unless_they_are_asked_for(trainer, memory):
    with trainer.stage("update_actor", *losses(1.0, 1.1, 0.9, 9.0)):
        pass
    assert memory.points("verl.loss") == []  # the ranks export their own


# ---- on a rank ------------------------------------------------------------------------------------------------------


class Worker:
    """A worker process with one rank."""

    def __init__(self, memory, rank=1):
        self.process = memory.process("worker")
        self.workers = self.process.workers
        self.rank = rank

    def call(self, step=7, stage="update", model_type="actor", **noted):
        """A call of a stage in which the engine computes values; returns the id of the stage."""
        context = baggage.set_baggage("stage", stage, baggage.set_baggage("model_type", model_type))
        if step is not None:
            context = baggage.set_baggage("verl.step.number", str(step), context)
        self.stage = (self.stage + 1) if hasattr(self, "stage") else 0xAB
        parent = trace.NonRecordingSpan(trace.SpanContext(0xCD, self.stage, True, trace.TraceFlags(1)))
        token = otel_context.attach(trace.set_span_in_context(parent, context))
        try:
            call = self.workers.enter(self, "update_actor")
            for quantity, values in noted.items():
                self.workers.note(quantity, values)
            self.workers.leave(call)
        finally:
            otel_context.detach(token)
        return self.stage


@pytest.fixture
def worker(memory):
    return Worker(memory)


def test_a_rank_shows_its_own_values_before_verl_reduces_them(worker, memory):
    worker.call(loss=[1.0, 2.0, 6.0], grad_norm=[1.0, 2.0], learning_rate=[0.5, 0.25])
    (loss,) = memory.points("verl.loss")
    assert loss.value == 3.0  # the mean over the mini-batches
    assert dict(loss.attributes) == {
        **{"rank": "1", "stage": "update", "model_type": "actor"},
        "verl.key": "actor/loss",
    }
    assert memory.values("verl.grad_norm", "rank", "verl.key") == {("1", "actor/grad_norm"): 1.5}
    assert memory.values("verl.learning_rate", "rank", "verl.key") == {("1", "actor/lr"): 0.25}  # the last


def test_values_of_actor_and_critic_are_kept_apart(worker, memory):
    worker.call(loss=[1.0])
    worker.call(model_type="critic", loss=[2.0])
    assert memory.values("verl.loss", "model_type", "verl.key") == {
        ("actor", "actor/loss"): 1.0,
        ("critic", "critic/loss"): 2.0,
    }


def test_the_trainer_is_told_once_of_the_calls_of_a_stage(worker):
    first, second = worker.call(loss=[1.0]), worker.call(loss=[3.0, math.nan])
    ((rank, labels, values, non_finite),) = worker.workers.reported(first)
    assert (rank, labels["verl.worker.method"], values["loss"], non_finite) == ("1", "update_actor", 1.0, 0)
    assert 0 < values["duration"] < 10
    assert worker.workers.reported(first) == []
    ((_, _, values, non_finite),) = worker.workers.reported(second)
    assert math.isnan(values["loss"]) and non_finite == 1


def test_calls_that_nobody_asks_for_are_forgotten(worker, memory):
    stages = [worker.call(loss=[1.0]) for _ in range(workers_module.MAX_UNREPORTED + 1)]
    memory.settle()
    assert worker.workers.reported(stages[0]) == []
    assert len(worker.workers.reported(stages[1])) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_hides_the_gauge_of_its_rank_and_is_counted(worker, memory, bad):
    worker.call(loss=[1.0], grad_norm=[1.0])
    worker.call(loss=[1.0, bad, bad], grad_norm=[2.0])
    assert memory.points("verl.loss") == []
    assert memory.values("verl.grad_norm") == {(): 2.0}
    (counted,) = memory.points("verl.metric.non_finite")
    assert counted.value == 2
    assert dict(counted.attributes) == {
        **{"metric": "verl.loss", "rank": "1", "stage": "update", "model_type": "actor"},
        "verl.key": "actor/loss",
    }
    worker.call(loss=[4.0])
    assert memory.values("verl.loss", "rank") == {("1",): 4.0}


def test_a_value_that_is_not_finite_is_an_event_of_the_call_and_of_the_step(worker, memory):
    worker.call(step=12, loss=[math.nan])
    (span,) = memory.spans
    (on_span,) = span.events
    what = {
        **{"metric": "verl.loss", "rank": "1", "stage": "update", "model_type": "actor"},
        "verl.key": "actor/loss",
        "verl.step.number": 12,
    }
    assert on_span.name == "verl.non_finite"
    assert dict(on_span.attributes) == {**what, "verl.count": 1}
    (event,) = memory.events
    assert event.event_name == "verl.non_finite"
    assert dict(event.attributes) == {**what, "verl.run.id": "run-1", "verl.run.attempt": 1}
    assert (event.trace_id, event.span_id) == (span.context.trace_id, span.context.span_id)


def test_a_step_that_is_not_known_is_not_guessed(worker, memory):
    worker.call(step=None, loss=[math.nan])
    (event,) = memory.events
    assert "verl.step.number" not in event.attributes


def test_what_is_noted_outside_a_call_is_nobodys(worker, memory):
    worker.workers.note("loss", [1.0])
    worker.call(grad_norm=[1.0])
    assert memory.points("verl.loss") == []


@pytest.mark.parametrize(
    ("detail", "shown"),
    [("all", [1, 2, 3, 4, 5]), ("2", [2, 2, 4, 4]), ("off", []), ("0", []), ("outliers", []), ("x", [1, 2, 3, 4, 5])],
)
def test_values_are_shown_at_every_nth_step_only(memory, monkeypatch, detail, shown):
    monkeypatch.setenv("VERL_OTEL_RANK_DETAIL", detail)
    worker, seen = Worker(memory), []
    for step in range(1, 6):
        stage = worker.call(step=step, loss=[float(step)])
        seen += memory.values("verl.loss").values()
        assert worker.workers.reported(stage)[0][2]["loss"] == step  # the trainer gets all
    assert seen == shown


def test_a_value_that_is_not_finite_is_counted_at_every_step(memory, monkeypatch):
    monkeypatch.setenv("VERL_OTEL_RANK_DETAIL", "2")
    worker = Worker(memory)
    worker.call(step=2, loss=[1.0])
    worker.call(step=3, loss=[math.nan])
    assert memory.points("verl.loss") == []
    assert memory.values("verl.metric.non_finite", "rank") == {("1",): 1}


@pytest.mark.parametrize(
    ("text", "shown"), [("all", "all"), ("3", "3"), ("1", "all"), ("OFF", "off"), (" outliers ", "outliers")]
)
def test_the_rank_detail_in_effect_can_be_told(text, shown):
    assert str(RankDetail.parse(text)) == shown


class Cuda:
    """`torch.cuda` of a process that uses its device, or does not."""

    def __init__(self, used=True):
        self.used, self.asked = used, []

    def is_initialized(self):
        return self.used

    def _read(self, name, value):
        self.asked.append(name)  # of a device that is not used this would make a CUDA context
        return value

    def mem_get_info(self):
        return self._read("mem_get_info", (20 * 2**30, 80 * 2**30))

    def memory_allocated(self):
        return self._read("allocated", 2 * 2**30)

    def memory_reserved(self):
        return self._read("reserved", 3 * 2**30)

    def synchronize(self):
        raise AssertionError("nothing waits for the device")


def test_memory_of_torch_and_of_the_device_are_both_shown_and_named_differently(worker, memory, monkeypatch):
    """G8 of the public cases: torch has allocated 2 GiB, 60 GiB of the device are used."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Cuda()))
    stage = worker.call()
    gib = 2.0**30
    found = {
        name: memory.values(f"verl.worker.memory.{name}", "rank", "stage", "model_type", "verl.worker.method")
        for name in ("allocated", "reserved", "used", "total")
    }
    where = ("1", "update", "actor", "update_actor")
    expected = {"allocated": 2 * gib, "reserved": 3 * gib, "used": 60 * gib, "total": 80 * gib}
    assert found == {name: {where: value} for name, value in expected.items()}
    attributes = memory.spans[0].attributes
    assert {name: attributes[f"verl.memory.{name}"] for name in expected} == expected
    ((_, _, values, _),) = worker.workers.reported(stage)
    assert {name: values[f"memory_{name}"] for name in expected} == expected


def test_no_cuda_context_is_made(worker, memory, monkeypatch):
    cuda = Cuda(used=False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    worker.call(loss=[1.0])
    assert memory.points("verl.worker.memory.used") == []
    assert memory.values("verl.loss") == {(): 1.0}
    assert cuda.asked == []


def test_a_device_that_has_failed_costs_only_its_memory(worker, memory, monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(cuda, "mem_get_info", lambda: 1 / 0)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    worker.call(loss=[1.0])
    assert memory.values("verl.loss") == {(): 1.0}
    assert len(memory.spans) == 1


def test_the_statistics_in_the_step_event_are_those_of_the_per_rank_series(memory, new_memory):
    """Two ranks and a trainer, each in a pipeline of its own."""
    trainer, workers, pipelines = Trainer(memory), [], []
    for rank in range(2):
        pipelines.append(new_memory())
        workers.append(Worker(pipelines[-1], rank))
    with trainer.stage("update_actor") as scope:
        for worker in workers:
            asked = SimpleNamespace(ready=lambda: True, dead=lambda: False)
            call = worker.workers.enter(worker, "update_actor")
            worker.workers.note("loss", [0.1 * (worker.rank + 1), 0.7])
            asked.get = lambda worker=worker: [worker.process.report(scope.id)]
            called = Called(str(worker.rank), "update_actor", 1)
            trainer.process.ranks.called(scope.id, worker.rank, called, lambda asked=asked: asked)
            worker.workers.leave(call)
    body = trainer.step_event()
    series = [value for pipeline in pipelines for value in pipeline.values("verl.loss").values()]
    assert len(series) == 2
    assert body["verl.ranks/update_actor/loss/mean"] == pytest.approx(sum(series) / 2, rel=1e-15)
    assert body["verl.ranks/update_actor/loss/std"] == pytest.approx(abs(series[0] - series[1]) / 2, rel=1e-12)
    assert (body["verl.ranks/update_actor/loss/min"], body["verl.ranks/update_actor/loss/max"]) == tuple(sorted(series))
    assert [body[f"verl.ranks/update_actor/loss/{which}_rank"] for which in ("min", "max")] == [0, 1]


def test_a_logged_value_waits_for_no_rank_of_a_stage_that_is_open(trainer, memory):
    """verl logs inside no stage, but a validation may be open: the event does not wait for its ranks."""
    with trainer.stage("testing", Rank(0, answered=False)) as scope:
        trainer.process.recorder.submit(Logged({"a": 1.0}, 3, time.time_ns(), scope.context))
        until(lambda: memory._logs.get_finished_logs())
        trainer.process.ranks._stages.clear()

"""Values for the events of steps (`metrics/step_values.py`, `metrics/recorder.py`): each in the step that made it."""

import threading
import time

import pytest
from opentelemetry.context import Context

from verl_otel.metrics import recorder as recorder_module
from verl_otel.metrics import step_values as step_values_module
from verl_otel.metrics.recorder import Logged
from verl_otel.metrics.step_values import StepValues, Summary


class Own:
    """What users have logged in this process."""

    def __init__(self):
        self.logged = []

    def __call__(self):
        taken, self.logged = self.logged, []
        return taken


@pytest.fixture
def own():
    return Own()


@pytest.fixture
def values(own):
    return StepValues(own)


def one(key, step, value, frequency="step"):
    return key, step, frequency, 1, value, value, value


class Answers:
    """Two processes that were asked; each answers when it is told to."""

    def __init__(self, *answers):
        self.coming, self.there = list(answers), []

    def answer(self, count=1):
        for _ in range(count):
            self.there.append(self.coming.pop(0))

    def ready(self):
        return not self.coming

    def get(self):
        taken, self.there = self.there, []
        return taken


# ---- one value or many ----------------------------------------------------------------------------------------------


def test_one_value_stands_for_itself_and_several_are_summed_up():
    summary = Summary(1, 3.0, 3.0, 3.0)
    assert summary.values("a/b") == {"a/b": 3.0}
    summary.add(Summary(3, 9.0, -1.0, 8.0))
    assert summary.values("a/b") == {"a/b": 3.0, "a/b/min": -1.0, "a/b/max": 8.0, "a/b/count": 4}


def test_values_of_several_processes_are_added_up(values, own):
    values.absorb([("a/b", 1, "step", 2, 10.0, 4.0, 6.0)])
    values.absorb([one("a/b", 1, 2.0), one("a/c", 1, 7.0)])
    own.logged = [one("a/b", 1, 0.0)]
    assert values.take(1, None) == {1: {"a/b": 3.0, "a/b/min": 0.0, "a/b/max": 6.0, "a/b/count": 4, "a/c": 7.0}}
    assert values.take(2, None) == {2: {}}


# ---- whose step -----------------------------------------------------------------------------------------------------


def test_a_value_belongs_to_the_step_in_which_it_was_made(values):
    values.absorb([one("a/b", 1, 1.0), one("a/b", 2, 2.0), one("a/b", 3, 3.0)])
    values.add(1, {"verl.x": 10})
    values.add(2, {"verl.x": 20})
    values.add(3, {"verl.x": 30})
    assert values.take(2, None) == {2: {"a/b": 2.0, "verl.x": 20}, 1: {"a/b": 1.0, "verl.x": 10}}
    assert values.take(3, None) == {3: {"a/b": 3.0, "verl.x": 30}}


def test_a_value_of_no_step_goes_with_the_next_event(values):
    values.absorb([one("a/b", None, 1.0)])
    values.add(None, {"verl.x": 2})
    assert values.take(5, None) == {5: {"a/b": 1.0, "verl.x": 2}}


def test_the_event_of_no_step_takes_all_and_says_of_which_steps_they_are(values):
    values.absorb([one("a/b", 1, 1.0), one("a/b", None, 3.0)])
    values.add(2, {"verl.x": 2})
    assert values.take(None, None) == {None: {"a/b": 3.0}, 2: {"verl.x": 2}, 1: {"a/b": 1.0}}


def test_a_value_can_be_looked_at_and_stays(values):
    values.add(1, {"verl.x": 2})
    assert (values.peek(1, "verl.x"), values.peek(2, "verl.x"), values.peek(1, "verl.y")) == (2, None, None)
    assert values.take(1, None) == {1: {"verl.x": 2}}


def test_what_is_never_taken_is_bounded(values, monkeypatch):
    monkeypatch.setattr(step_values_module, "MAX_SUMMARIES", 100)
    for step in range(500):
        values.add(step, {"verl.x": step})
        values.absorb([one("a/b", step, 1.0), one("a/c", step, 1.0, "epoch")])
        values.wait_for(lambda: True)
    assert len(values._values) == step_values_module.MAX_STEPS
    assert len(values._summaries) == len(values._new_of_epoch) == 100
    assert len(values._waiting) == 1
    assert next(iter(values.take(499, None))) == 499


# ---- epochs ---------------------------------------------------------------------------------------------------------


def epochs_of(values, *logged):
    """Steps: (step, epoch, value or None) -> what comes with each step's event."""
    found = []
    for step, epoch, value in logged:
        if value is not None:
            values.absorb([one("a/e", step, value, "epoch")])
        found.append(values.take(step, epoch)[step])
    return found


def test_values_of_an_epoch_come_once_when_the_epoch_is_over(values):
    found = epochs_of(values, (1, 0, 1.0), (2, 0, 3.0), (3, 1, None), (4, 1, 8.0), (5, 2, None))
    of_first = {"a/e": 2.0, "a/e/min": 1.0, "a/e/max": 3.0, "a/e/count": 2}
    assert found == [{}, {}, of_first, {}, {"a/e": 8.0}]
    assert values.take_rest() == {5: {}}


def test_a_value_made_in_the_first_step_of_an_epoch_is_of_that_epoch(values):
    assert epochs_of(values, (1, 0, 1.0), (2, 1, 5.0), (3, 2, 7.0)) == [{}, {"a/e": 1.0}, {"a/e": 5.0}]
    assert values.take_rest() == {3: {"a/e": 7.0}}


def test_a_value_that_comes_late_is_of_the_epoch_of_its_step(values):
    assert epochs_of(values, (1, 0, 1.0), (2, 0, None)) == [{}, {}]
    values.absorb([one("a/e", 2, 3.0, "epoch"), one("a/e", None, 5.0, "epoch"), one("a/e", 3, 9.0, "epoch")])
    of_first = {"a/e": 3.0, "a/e/min": 1.0, "a/e/max": 5.0, "a/e/count": 3}
    assert values.take(3, 1) == {3: of_first}
    assert values.take_rest() == {3: {"a/e": 9.0}}


def test_values_of_an_epoch_come_with_the_last_step_at_the_end(values):
    assert epochs_of(values, (1, 0, 1.0), (2, 0, None)) == [{}, {}]
    assert values.take_rest() == {2: {"a/e": 1.0}}
    assert values.take_rest() == {2: {}}


def test_values_of_an_epoch_are_not_lost_where_verl_tells_no_epoch(values):
    assert epochs_of(values, (1, None, 1.0), (2, None, 3.0)) == [{}, {}]
    assert values.take_rest() == {2: {"a/e": 2.0, "a/e/min": 1.0, "a/e/max": 3.0, "a/e/count": 2}}


def test_at_the_end_all_that_is_left_comes_by_step(values, own):
    values.take(3, 0)
    values.add(5, {"verl.x": 1})
    own.logged = [one("a/b", 4, 2.0), one("a/e", 4, 9.0, "epoch"), one("a/n", None, 3.0)]
    assert values.take_rest() == {5: {"verl.x": 1, "a/e": 9.0, "a/n": 3.0}, 4: {"a/b": 2.0}}


def test_at_the_end_of_nothing_there_is_nothing(values):
    assert values.take_rest() == {None: {}}


# ---- answers of other processes -------------------------------------------------------------------------------------


def test_answers_are_waited_for_and_taken_once(values):
    answers = Answers([one("a/b", 1, 1.0)], [one("a/b", 1, 3.0)])
    values.ask = lambda: answers
    assert values.complete()
    values.collect()
    assert not values.complete()
    answers.answer(2)
    assert values.complete()
    assert values.take(1, None) == {1: {"a/b": 2.0, "a/b/min": 1.0, "a/b/max": 3.0, "a/b/count": 2}}
    assert values.take(2, None) == {2: {}}


def test_an_answer_that_is_too_late_for_its_event_is_not_lost(values):
    slow, fast = Answers([one("a/b", 1, 1.0)], [one("a/b", 1, 3.0)]), Answers([one("a/b", 2, 5.0)])
    asked = iter((slow, fast))
    values.ask = lambda: next(asked)
    values.collect()
    slow.answer()
    assert values.take(1, None) == {1: {"a/b": 1.0}}
    values.collect()
    fast.answer()
    assert values.complete()  # an event waits only for what was asked for it
    slow.answer()
    assert values.take(2, None) == {2: {"a/b": 5.0}, 1: {"a/b": 3.0}}


def test_where_nobody_can_be_asked_nothing_is_waited_for(values):
    values.collect()
    assert values.complete()


# ---- the recorder's events ------------------------------------------------------------------------------------------


@pytest.fixture
def process(memory):
    return memory.process()


def log(process, step, **data):
    process.recorder.submit(Logged({key.replace("__", "/"): value for key, value in data.items()}, step, 1, Context()))


def steps_of(memory):
    return [(e.attributes.get("verl.step.number"), dict(e.body)) for e in memory.events if e.event_name == "verl.step"]


def test_a_value_that_comes_late_has_an_event_of_its_own_step(process, memory):
    log(process, 1, x=1.0)
    memory.settle()
    process.step_values.absorb([one("a/b", 1, 5.0), one("a/b", 3, 7.0)])
    log(process, 2, x=2.0)
    assert steps_of(memory) == [(1, {"x": 1.0}), (2, {"x": 2.0}), (1, {"a/b": 5.0})]
    log(process, 3, x=3.0)
    assert steps_of(memory)[3:] == [(3, {"x": 3.0, "a/b": 7.0})]


def test_a_users_value_never_replaces_verls_own(process, memory):
    process.step_values.absorb([one("actor/pg_loss", 1, 99.0)])
    log(process, 1, actor__pg_loss=1.0)
    memory.settle()
    process.step_values.absorb([one("actor/pg_loss", 1, 99.0), one("a/b", 1, 2.0)])  # too late for the event
    log(process, 2, actor__pg_loss=2.0)
    assert steps_of(memory) == [(1, {"actor/pg_loss": 1.0}), (2, {"actor/pg_loss": 2.0}), (1, {"a/b": 2.0})]
    memory.settle()
    process.step_values.absorb([one("actor/pg_loss", 2, 99.0)])
    process.recorder.finish()
    assert len(steps_of(memory)) == 3


def test_an_event_waits_for_answers_but_not_for_ever(process, memory, monkeypatch):
    monkeypatch.setattr(recorder_module, "WAIT_FOR_VALUES", 0.2)
    process.step_values.ask = lambda: Answers([one("a/b", 1, 1.0)])
    started = time.monotonic()
    log(process, 1, x=1.0)
    assert steps_of(memory) == [(1, {"x": 1.0})]
    assert 0.2 <= time.monotonic() - started < 10


def test_metrics_do_not_wait_for_answers(process, memory, monkeypatch):
    monkeypatch.setattr(recorder_module, "WAIT_FOR_VALUES", 60)
    answers = Answers([])
    process.step_values.ask = lambda: answers
    log(process, 1, actor__pg_loss=1.0)
    deadline, seen = time.monotonic() + 30, []
    while "verl.policy.loss" not in seen and time.monotonic() < deadline:
        data = memory._reader.get_metrics_data()
        seen = [m.name for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics] if data else []
        time.sleep(0.002)
    assert "verl.policy.loss" in seen
    assert memory._logs.get_finished_logs() == ()
    answers.answer()
    assert steps_of(memory) == [(1, {"actor/pg_loss": 1.0})]


def test_events_of_steps_that_follow_each_other_quickly_stay_in_order(process, memory, monkeypatch):
    monkeypatch.setattr(recorder_module, "WAIT_FOR_VALUES", 0.1)
    asked = []
    process.step_values.ask = lambda: asked.append(Answers([one("a/b", len(asked) + 1, 1.0)])) or asked[-1]
    for step in range(1, 4):
        log(process, step, x=float(step))
    assert [step for step, _ in steps_of(memory)] == [1, 2, 3]
    for answers in asked:
        answers.answer()
    process.step_values.ask = lambda: None
    process.recorder.finish()
    assert sorted(step for step, _ in steps_of(memory)[3:]) == [1, 2, 3]  # and none of the answers is lost
    assert all(body == {"a/b": 1.0} for _, body in steps_of(memory)[3:])


def test_values_per_epoch_are_in_the_event_of_the_next_epochs_first_step(process, memory):
    for step, epoch in ((1, 0), (2, 0), (3, 1)):
        process.step_values.absorb([one("a/e", step, float(step), "epoch")])
        log(process, step, training__epoch=epoch)
        memory.settle()
    process.recorder.finish()
    of_first = {"a/e": 1.5, "a/e/min": 1.0, "a/e/max": 2.0, "a/e/count": 2}
    assert steps_of(memory) == [
        (1, {"training/epoch": 0}),
        (2, {"training/epoch": 0}),
        (3, {"training/epoch": 1, **of_first}),
        (3, {"a/e": 3.0}),
    ]


def test_the_end_of_the_run_is_the_last_event(process, memory, monkeypatch):
    monkeypatch.setattr(recorder_module, "WAIT_FOR_VALUES", 0.2)
    ready = threading.Event()
    process.step_values.wait_for(ready.is_set)
    log(process, 1, x=1.0)
    process.step_values.absorb([one("a/b", 2, 1.0)])
    process.run_finished(None)
    process.run_finished(None)
    time.sleep(0.05)
    assert memory._logs.get_finished_logs() == ()
    ready.set()
    assert [event.event_name for event in memory.events] == ["verl.step", "verl.step", "verl.run.finished"]
    assert steps_of(memory) == [(1, {"x": 1.0}), (2, {"a/b": 1.0})]


def test_the_run_ends_also_where_nothing_ever_answers(process, memory, monkeypatch):
    monkeypatch.setattr(recorder_module, "WAIT_FOR_VALUES", 0.1)
    process.step_values.ask = lambda: Answers([])
    process.step_values.wait_for(lambda: False)
    log(process, 1, x=1.0)
    process.run_finished(ValueError("no"))
    assert [event.event_name for event in memory.events] == ["verl.step", "verl.run.finished"]
    assert memory.events[-1].attributes["verl.run.state"] == "failed"

"""What users call (`api.py`, `metrics/user.py`): anywhere in a run, with anything, and it never raises."""

import asyncio
import contextlib
import math
import time
from decimal import Decimal

import numpy
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from opentelemetry import baggage
from opentelemetry import context as otel_context
from opentelemetry.context import Context

import verl_otel
from verl_otel import api, border, telemetry
from verl_otel.metrics import user as user_module
from verl_otel.metrics.recorder import Logged


@pytest.fixture(autouse=True)
def no_stages_yet(monkeypatch):
    monkeypatch.setattr(api, "_stages", set())


class Followed:
    """verl's trainer."""

    global_steps = 5


class Process:
    """The process in which the user's code runs."""

    def __init__(self, memory, monkeypatch, role, **identity):
        self.memory = memory
        self.telemetry = memory.process(role, **identity)
        monkeypatch.setattr(telemetry, "_current", self.telemetry)
        if role == "trainer":
            self._followed = Followed()
            self.telemetry.steps.follow(self._followed)

    def taken(self):
        """What the trainer is told: key and step -> (count, sum)."""
        return {(key, step): (count, total) for key, step, _, count, total, *_ in self.telemetry.user.take()}

    def point(self, name):
        (point,) = self.memory.points(name)
        return point

    def labels(self, name):
        attributes = dict(self.point(name).attributes)
        return attributes["rank"], attributes["stage"], attributes["model_type"]


@pytest.fixture
def process(memory, monkeypatch):
    """Makes the process of a role the current one."""
    made = []

    def make(role="trainer", **identity):
        made.append(Process(memory, monkeypatch, role, **identity))
        return made[-1]

    return make


@contextlib.contextmanager
def attached(context):
    token = otel_context.attach(context)
    try:
        yield
    finally:
        otel_context.detach(token)


# ---- where things are logged ----------------------------------------------------------------------------------------


def test_in_a_trainer_a_value_is_of_its_step_and_stage(process, memory):
    trainer = process()
    stage = trainer.telemetry.steps.enter("reward")
    verl_otel.log_scalar("reward/creative_score", 0.7)
    trainer.telemetry.steps.leave(stage)
    point = trainer.point("verl.user.reward.creative_score")
    assert point.value == 0.7
    assert dict(point.attributes) == {
        **{"rank": "all", "stage": "reward", "model_type": "reward"},
        "verl.key": "reward/creative_score",
    }
    trainer.telemetry.log({"actor/lr": 1.0}, 5)
    (event,) = [event for event in memory.events if event.event_name == "verl.step"]
    assert dict(event.body) == {"actor/lr": 1.0, "reward/creative_score": 0.7}


def test_outside_everything_a_value_is_of_the_module_that_its_name_says(process):
    trainer = process()
    verl_otel.log_scalar("reward/a", 1)
    verl_otel.log_scalar("mine/a", 2)
    assert trainer.labels("verl.user.reward.a") == ("all", "reward", "none")
    assert trainer.labels("verl.user.mine.a") == ("all", "other", "none")
    assert trainer.taken() == {("reward/a", 5): (1, 1), ("mine/a", 5): (1, 2)}


def test_in_a_workers_call_a_value_is_of_its_rank(process):
    worker = process("worker", worker_index="3")
    context = baggage.set_baggage("stage", "update", baggage.set_baggage("model_type", "critic"))
    with attached(baggage.set_baggage("verl.step.number", "8", context)):
        call = worker.telemetry.workers.enter(Followed(), "update_critic")
        verl_otel.log_scalar("critic/mine", 1.5)
        worker.telemetry.workers.leave(call)
    assert worker.labels("verl.user.critic.mine") == ("3", "update", "critic")
    assert worker.taken() == {("critic/mine", 8): (1, 1.5)}


@pytest.mark.parametrize("recorded", [4, 0])
@pytest.mark.parametrize("validate", [False, True])
def test_in_a_trajectory_a_value_is_of_the_step_that_scheduled_it(process, monkeypatch, recorded, validate):
    monkeypatch.setenv("VERL_OTEL_TRAJECTORIES", str(recorded))
    agent = process("agent_loop", worker_index="2")
    trajectories = agent.telemetry.trajectories
    for sample, value in enumerate((1.0, 3.0)):
        trajectory = trajectories.enter(6, sample, 0, validate)
        assert trajectory.span.is_recording() is bool(recorded)
        verl_otel.log_scalar("agent/tool_calls", value)
        trajectories.leave(trajectory)
    stage, key = ("validation", "val/agent/tool_calls") if validate else ("rollout", "agent/tool_calls")
    assert agent.labels("verl.user.agent.tool_calls") == ("2", stage, "rollout")
    assert agent.taken() == {(key, 6): (2, 4.0)}


@pytest.mark.parametrize(
    ("role", "where"),
    [
        ("agent_loop", ("0", "rollout", "rollout")),
        ("rollout_server", ("0", "rollout", "rollout")),
        ("reward_worker", ("0", "reward", "reward")),
        ("worker", ("0", "other", "none")),
        ("other", ("0", "other", "none")),
    ],
)
def test_outside_any_call_a_process_says_by_its_role_where_it_is(process, role, where):
    found = process(role)
    verl_otel.log_scalar("mine/a", 1)
    assert found.labels("verl.user.mine.a") == where
    assert found.taken() == {("mine/a", None): (1, 1)}


def test_validation_does_not_get_into_the_figures_of_training(process, memory):
    trainer = process()
    for stage_timer, value in (("reward", 1.0), ("testing", 5.0)):
        scope = trainer.telemetry.steps.enter(stage_timer)
        verl_otel.log_scalar("reward/mine", value)
        trainer.telemetry.steps.leave(scope)
    assert trainer.taken() == {("reward/mine", 5): (1, 1.0), ("val/reward/mine", 5): (1, 5.0)}
    assert memory.values("verl.user.reward.mine", "stage") == {("reward",): 1.0, ("validation",): 5.0}


# ---- scalars, histograms, texts -------------------------------------------------------------------------------------


def test_values_of_a_step_are_added_up_and_taken_once(process):
    trainer = process()
    for value in (1.0, 2.0, 6.0):
        verl_otel.log_scalar("reward/mine", value)
    ((key, step, frequency, *figures),) = trainer.telemetry.user.take()
    assert (key, step, frequency, figures) == ("reward/mine", 5, "step", [3, 9.0, 1.0, 6.0])
    assert trainer.telemetry.user.take() == []
    assert trainer.point("verl.user.reward.mine").value == 6.0  # the last


NUMBERS = (1, 2.5, True, numpy.float32(0.5), numpy.int64(7), torch.tensor(1.5), torch.tensor([2.0]), Decimal("0.25"))


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_numbers_of_any_library_are_logged(process, value):
    trainer = process()
    verl_otel.log_scalar("mine/a", value)
    assert trainer.point("verl.user.mine.a").value == float(value)
    assert border.failures() == {}


@pytest.mark.parametrize(
    "values", [[1, 2, 6], (1.0, 2.0, 6.0), numpy.array([1, 2, 6]), torch.tensor([[1.0, 2.0, 6.0]])]
)
def test_a_histogram_has_all_values(process, values):
    trainer = process()
    verl_otel.log_histogram("reward/all", values)
    point = trainer.point("verl.user.reward.all")
    assert (point.count, point.sum, point.min, point.max) == (3, 9.0, 1.0, 6.0)
    ((*_, count, total, low, high),) = trainer.telemetry.user.take()
    assert (count, total, low, high) == (3, 9.0, 1.0, 6.0)


def test_a_histogram_of_a_generator_and_of_none(process, memory):
    trainer = process()
    verl_otel.log_histogram("reward/generated", (number for number in (1, 2)))
    verl_otel.log_histogram("reward/empty", [])
    assert trainer.point("verl.user.reward.generated").count == 2
    assert memory.points("verl.user.reward.empty") == []
    assert border.failures() == {}


def test_the_values_are_those_of_the_time_of_the_call(process):
    trainer, array = process(), numpy.array([1.0, 2.0])
    verl_otel.log_histogram("reward/all", array)
    array[:] = 99.0
    assert trainer.point("verl.user.reward.all").max == 2.0


def test_tensors_keep_their_precision(process):
    trainer = process()
    verl_otel.log_histogram("mine/ids", torch.tensor([2**24 + 1], dtype=torch.int64))
    assert trainer.point("verl.user.mine.ids").sum == 2**24 + 1


class OnDevice:
    """A tensor on a device; reading it would wait for the device."""

    device = torch.device("cuda", 0)
    read: list[str] = []

    def item(self):
        self.read.append("waited for the device")
        return 1.0

    detach = __float__ = __len__ = item


@pytest.mark.parametrize("value", [OnDevice(), torch.ones((), device="meta")])
def test_tensors_on_a_device_are_refused_and_not_waited_for(process, memory, caplog, value):
    trainer = process()
    for _ in range(3):
        verl_otel.log_scalar("mine/a", value)
        verl_otel.log_histogram("mine/b", value)
    assert trainer.taken() == {}
    assert OnDevice.read == []
    assert [record.message.count("on the CPU") for record in caplog.records] == [1, 1]
    assert memory.points("verl.user.mine.a") == memory.points("verl.user.mine.b") == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_hides_the_gauge_and_is_counted_and_an_event(process, memory, bad):
    trainer = process()
    verl_otel.log_scalar("reward/mine", 1.0)
    verl_otel.log_scalar("reward/mine", bad)
    verl_otel.log_histogram("reward/all", [1.0, bad])
    assert memory.points("verl.user.reward.mine") == []
    assert trainer.point("verl.user.reward.all").count == 1
    assert memory.values("verl.metric.non_finite", "metric", "rank")[("verl.user.reward.mine", "all")] == 1
    events = [event for event in memory.events if event.event_name == "verl.non_finite"]
    assert [event.attributes["metric"] for event in events] == ["verl.user.reward.mine", "verl.user.reward.all"]
    assert events[0].attributes["verl.step.number"] == 5
    assert trainer.taken() == {("reward/mine", 5): (1, 1.0), ("reward/all", 5): (1, 1.0)}


@pytest.mark.parametrize("values", [[1.0, math.nan, math.inf, 2.0, math.nan], [math.nan] * 3])
def test_each_value_of_a_histogram_that_is_not_finite_is_counted_once_under_its_name(process, memory, values):
    process()
    verl_otel.log_histogram("reward/all", values)
    (point,) = memory.points("verl.metric.non_finite")
    assert point.value == 3
    assert (point.attributes["metric"], point.attributes["verl.key"]) == ("verl.user.reward.all", "reward/all")
    assert sum(point.count for point in memory.points("verl.user.reward.all")) == len(values) - 3


def texts(memory):
    return [event for event in memory.events if event.event_name == "verl.text"]


def test_a_text_is_an_event_of_its_step(process, memory):
    process()
    verl_otel.log_text("agent/transcript", "héllo")
    (event,) = texts(memory)
    assert dict(event.body) == {"text": "héllo"}
    assert dict(event.attributes) == {
        **{"verl.run.id": "run-1", "verl.run.attempt": 1, "verl.step.number": 5},
        **{"verl.text.name": "agent/transcript", "verl.text.truncated": False},
    }


@pytest.mark.parametrize(("length", "cut"), [(4096, False), (4097, True), (100_000, True)])
def test_a_long_text_is_cut_and_says_so(process, memory, length, cut):
    process()
    verl_otel.log_text("agent/transcript", "x" * length)
    (event,) = texts(memory)
    assert (len(event.body["text"]), event.attributes["verl.text.truncated"]) == (min(length, 4096), cut)


def test_a_text_that_is_not_unicode_can_be_sent(process, memory):
    process()
    verl_otel.log_text("agent/transcript", "a\ud800b")
    assert texts(memory)[0].body["text"] == "a?b"


def test_texts_are_capped_by_step_and_the_others_counted(process, memory):
    process("agent_loop")
    for step in ("1", "2"):
        with attached(baggage.set_baggage("verl.step.number", step)):
            for number in range(20):
                verl_otel.log_text("agent/transcript", f"{step}.{number}")
    found = [event.body["text"] for event in texts(memory)]
    assert found == [f"{step}.{number}" for step in (1, 2) for number in range(16)]
    assert memory.values("verl.otel.dropped", "verl.otel.signal", "verl.otel.reason") == {("logs", "text_cap"): 8}


def test_the_counts_of_texts_are_forgotten_with_their_steps(process):
    agent = process("agent_loop")
    for step in range(200):
        with attached(baggage.set_baggage("verl.step.number", str(step))):
            verl_otel.log_text("agent/transcript", "x")
    assert len(agent.telemetry.user._texts) <= 64


# ---- declarations ---------------------------------------------------------------------------------------------------


def exported(memory, name):
    memory.settle()
    (found,) = [
        metric
        for of_resource in memory._reader.get_metrics_data().resource_metrics
        for of_scope in of_resource.scope_metrics
        for metric in of_scope.metrics
        if metric.name == name
    ]
    return found


def test_a_metric_can_be_declared(process, memory, caplog):
    trainer = process("worker", worker_index="3")
    verl_otel.declare("reward/cost", "counter", unit="s", description="Time of the judge", scope="global")
    for amount in (1.0, 2.5, -7.0):
        verl_otel.log_scalar("reward/cost", amount)
    metric = exported(memory, "verl.user.reward.cost")
    assert (metric.unit, metric.description) == ("s", "Time of the judge")
    assert metric.data.is_monotonic
    assert metric.data.data_points[0].value == 3.5  # what is negative is no amount
    assert [r for r in caplog.records if "proto" not in r.name] == []  # the SDK would warn of each
    assert trainer.labels("verl.user.reward.cost")[0] == "all"


def test_without_a_description_a_metric_says_whose_it_is(process, memory):
    process()
    verl_otel.log_scalar("reward/mine", 1)
    assert exported(memory, "verl.user.reward.mine").description == "The user's reward/mine"


def test_a_value_for_each_episode_is_a_histogram(process):
    agent = process("agent_loop")
    verl_otel.declare("agent/length", frequency="episode")
    for value in (1.0, 5.0):
        verl_otel.log_scalar("agent/length", value)
    point = agent.point("verl.user.agent.length")
    assert (point.count, point.sum) == (2, 6.0)


def test_the_frequency_travels_with_the_values(process):
    trainer = process()
    verl_otel.declare("reward/slow", frequency="epoch")
    verl_otel.log_scalar("reward/slow", 2.0)
    ((key, step, frequency, *_),) = trainer.telemetry.user.take()
    assert (key, step, frequency) == ("reward/slow", 5, "epoch")


@pytest.mark.parametrize("wrong", [{"kind": "meter"}, {"frequency": "often"}, {"scope": "galaxy"}])
def test_a_wrong_declaration_is_reported_once_and_has_no_effect(process, memory, caplog, wrong):
    process()
    for _ in range(3):
        verl_otel.declare("mine/a", **wrong)
    assert len([record for record in caplog.records if record.name == "verl_otel"]) == 1
    verl_otel.log_scalar("mine/a", 1)
    assert type(exported(memory, "verl.user.mine.a").data).__name__ == "Gauge"


# ---- one name, one type ---------------------------------------------------------------------------------------------


def kinds(memory):
    memory.settle()
    data = memory._reader.get_metrics_data()
    found = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics]
    return [(m.name, type(m.data).__name__) for m in found if m.name.startswith("verl.user.")]


def test_a_histogram_is_one_whether_values_come_one_by_one_or_together(process, memory):
    trainer = process()
    verl_otel.log_histogram("reward/all", [1.0, 2.0])
    verl_otel.log_scalar("reward/all", 4.0)
    point = trainer.point("verl.user.reward.all")
    assert (point.count, point.sum) == (3, 7.0)
    assert kinds(memory) == [("verl.user.reward.all", "Histogram")]


def test_a_histogram_has_one_series_whether_the_sdk_or_we_count(process, memory, monkeypatch):
    """With histograms of ours (`metrics/distributions.py`) single values are counted there too."""
    recorded = []

    class Distributions:
        def record(self, metric, labels, values):
            recorded.extend(values.tolist())
            return True

    trainer = process()
    monkeypatch.setattr(trainer.telemetry.instruments, "_distributions", Distributions())
    verl_otel.log_histogram("reward/all", [-1.0, 2.0])
    verl_otel.log_scalar("reward/all", -4.0)
    memory.settle()
    assert recorded == [-1.0, 2.0, -4.0]
    assert memory.points("verl.user.reward.all") == []


def test_a_gauge_cannot_become_a_histogram(process, memory, caplog):
    trainer = process()
    verl_otel.log_scalar("reward/mine", 1.0)
    for _ in range(2):
        verl_otel.log_histogram("reward/mine", [2.0, 3.0])
    assert kinds(memory) == [("verl.user.reward.mine", "Gauge")]
    assert len([record for record in caplog.records if record.name == "verl_otel"]) == 1
    assert trainer.taken() == {("reward/mine", 5): (5, 11.0)}  # nothing is lost


def test_a_declaration_that_comes_too_late_does_not_change_the_type(process, memory, caplog):
    process()
    verl_otel.log_scalar("reward/mine", 1.0)
    for _ in range(2):
        verl_otel.declare("reward/mine", "counter")
    verl_otel.log_scalar("reward/mine", 3.0)
    assert kinds(memory) == [("verl.user.reward.mine", "Gauge")]
    assert memory.values("verl.user.reward.mine") == {(): 3.0}
    assert len([record for record in caplog.records if record.name == "verl_otel"]) == 1


@pytest.mark.parametrize("other", ["reward/a-b", "Reward/A_B", "reward/a.b", "reward/a/b"])
def test_names_that_look_alike_to_prometheus_have_one_type(process, memory, caplog, other):
    process()
    verl_otel.log_scalar("reward/a_b", 1.0)
    verl_otel.log_histogram(other, [1.0])
    verl_otel.log_histogram(other, [1.0])
    assert kinds(memory) == [("verl.user.reward.a_b", "Gauge")]
    assert len([record for record in caplog.records if record.name == "verl_otel"]) == 1


def test_names_that_look_alike_and_are_of_one_kind_are_told_apart_by_their_key(process, memory):
    process()
    verl_otel.log_scalar("reward/a_b", 1.0)
    verl_otel.log_scalar("reward/a-b", 2.0)
    assert memory.values("verl.user.reward.a_b", "verl.key") == {("reward/a_b",): 1.0, ("reward/a-b",): 2.0}


# ---- stages ---------------------------------------------------------------------------------------------------------


def test_a_stage_is_a_span_under_the_step_and_has_a_duration(process, memory):
    trainer = process()
    step = trainer.telemetry.steps.enter("step")
    with verl_otel.stage("filter_samples"):
        verl_otel.log_scalar("mine/a", 1)
    trainer.telemetry.steps.leave(step)
    assert memory.tree() == {"verl.step": {"verl.filter_samples": {}}}
    (of_stage,) = [p for p in memory.points("verl.stage.duration") if p.attributes["verl.timer"] == "filter_samples"]
    assert (of_stage.count, of_stage.attributes["stage"], of_stage.attributes["rank"]) == (1, "other", "all")
    assert trainer.labels("verl.user.mine.a") == ("all", "other", "none")


def test_as_decorator_a_stage_is_open_during_each_call(process, memory):
    trainer = process()

    @verl_otel.stage("sort")
    def sort(values, *, reverse=False):
        """Sorts."""
        return sorted(values, reverse=reverse)

    @verl_otel.stage("judge")
    async def judge(value):
        await asyncio.sleep(0)
        with verl_otel.stage("inner"):
            return value + 1

    async def both():
        return await asyncio.gather(judge(1), judge(2))

    step = trainer.telemetry.steps.enter("step")
    assert sort([1, 3, 2], reverse=True) == [3, 2, 1]
    assert asyncio.run(both()) == [2, 3]
    trainer.telemetry.steps.leave(step)
    assert (sort.__name__, sort.__doc__, asyncio.iscoroutinefunction(judge)) == ("sort", "Sorts.", True)
    assert memory.tree() == {
        "verl.step": {"verl.sort": {}, "verl.judge": {"verl.inner": {}}, "verl.judge (2)": {"verl.inner": {}}}
    }


def test_a_stage_that_fails_has_the_error_and_the_user_gets_it(process, memory):
    process()
    failure = ValueError("mine")
    with pytest.raises(ValueError) as caught, verl_otel.stage("sort"):
        raise failure
    assert caught.value is failure

    @verl_otel.stage("judge")
    async def judge():
        raise failure

    with pytest.raises(ValueError):
        asyncio.run(judge())
    assert [span.status.status_code.name for span in memory.spans] == ["ERROR", "ERROR"]


def test_one_stage_object_can_be_entered_again_inside_itself(process, memory):
    process()
    again = verl_otel.stage("sort")
    with again, again:
        pass
    with again:
        pass
    assert memory.tree() == {"verl.sort": {"verl.sort": {}}, "verl.sort (2)": {}}


def test_in_a_workers_call_a_stage_is_under_the_call(process, memory):
    worker = process("worker", worker_index="3")
    call = worker.telemetry.workers.enter(Followed(), "update_actor")
    with verl_otel.stage("sort"):
        pass
    worker.telemetry.workers.leave(call)
    assert memory.tree() == {"verl.worker.update_actor": {"verl.sort": {}}}
    assert memory.span("verl.sort").attributes["rank"] == "3"


@pytest.mark.parametrize(("recorded", "tree"), [(1, {"verl.trajectory": {"verl.sort": {}}}), (0, {})])
def test_in_a_trajectory_a_stage_is_recorded_if_the_trajectory_is(process, memory, monkeypatch, recorded, tree):
    monkeypatch.setenv("VERL_OTEL_TRAJECTORIES", str(recorded))
    agent = process("agent_loop")
    trajectory = agent.telemetry.trajectories.enter(6, 0, 0, False)
    with verl_otel.stage("sort"):
        verl_otel.log_scalar("mine/a", 1)
    agent.telemetry.trajectories.leave(trajectory)
    assert memory.tree() == tree
    assert agent.taken() == {("mine/a", 6): (1, 1)}


def test_outside_everything_a_stage_is_in_the_trace_of_the_run(memory, monkeypatch):
    run = memory.tracer.start_span("verl.run", context=Context())
    monkeypatch.setattr(telemetry, "_current", memory.process("worker", run))
    with verl_otel.stage("sort"):
        pass
    assert memory.span("verl.sort").parent.span_id == run.get_span_context().span_id


@pytest.mark.parametrize("name", ["", "Sort", "a b", "1a", "x" * 65, "ä", "a/b", "step", None, 7, "a\n"])
def test_a_stage_with_a_wrong_name_is_reported_once_and_runs_all_the_same(process, memory, caplog, name):
    process()
    done = []
    for _ in range(3):
        with verl_otel.stage(name):
            done.append(1)
    assert done == [1, 1, 1]
    assert memory.spans == []
    assert len([record for record in caplog.records if record.name == "verl_otel"]) == 1


def test_there_are_not_more_than_100_stages(process, memory, caplog):
    process()
    for number in range(120):
        with verl_otel.stage(f"s{number}"):
            pass
    assert len({span.name for span in memory.spans}) == 100


# ---- wrong names and values, and caps -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["score", "", "a/", "/a", "a//b", "1a/b", "a b/c", "ä/b", "a/b@c", "x/" + "y" * 119, None, 3]
)
def test_a_wrong_name_is_reported_once_and_left_out(process, memory, caplog, name):
    trainer = process()
    for _ in range(3):
        verl_otel.log_scalar(name, 1.0)
        verl_otel.log_histogram(name, [1.0])
        verl_otel.log_text(name, "x")
        verl_otel.declare(name)
    assert trainer.taken() == {}
    assert [record.message.count("is not the name of a metric") for record in caplog.records] == [1]
    assert memory.events == []


@pytest.mark.parametrize(
    "log",
    [
        lambda t, n: t.user.scalar(f"prompt {n}", 1.0),
        lambda t, n: t.user.scalar(f"reward/x{n}", "text"),
        lambda t, n: t.user.histogram(f"reward/x{n}" + "long" * 1000, ["text"]),
        lambda t, n: t.user.declare(f"reward/x{n}", "sum", "", "", "step", "rank"),
    ],
)
def test_wrong_names_without_end_fill_neither_memory_nor_log(memory, caplog, log):
    t = memory.process("reward_worker")
    for n in range(border.MAX_SITES + 300):
        log(t, n)
    assert len(caplog.records) == len(border.failures()) == border.MAX_SITES + 1
    assert sum(border.failures().values()) == border.MAX_SITES + 300
    assert max(map(len, border.failures())) < 200


@pytest.mark.parametrize("name", ["a/b", "Reward/creative-score", "a/b/c.d", "x/" + "y" * 118])
def test_a_right_name_is_taken(process, name):
    trainer = process()
    verl_otel.log_scalar(name, 1.0)
    assert trainer.taken() == {(name, 5): (1, 1.0)}


@pytest.mark.parametrize("value", ["1", None, [1, 2], {"a": 1}, object(), 10**400, 1j, torch.tensor([1, 2])], ids=repr)
def test_a_value_that_is_not_a_number_is_reported_once_and_left_out(process, caplog, value):
    trainer = process()
    for _ in range(3):
        verl_otel.log_scalar("mine/a", value)
    assert trainer.taken() == {}
    assert "log_scalar('mine/a'" in caplog.text


def test_too_many_names_are_left_out_and_counted(process, memory, monkeypatch, caplog):
    monkeypatch.setattr(user_module, "MAX_NAMES", 3)
    trainer = process()
    for _ in range(2):
        for number in range(5):
            verl_otel.log_scalar(f"mine/a{number}", 1.0)
    verl_otel.declare("mine/b", "counter")
    assert set(trainer.taken()) == {(f"mine/a{number}", 5) for number in range(3)}
    assert memory.values("verl.otel.dropped", "verl.otel.reason") == {("user_names",): 5}
    assert len([record for record in caplog.records if record.name == "verl_otel"]) == 1
    assert len(trainer.telemetry.user._declared) == 3


def test_values_that_nobody_takes_are_bounded_and_counted(process, memory, monkeypatch):
    monkeypatch.setattr(user_module, "MAX_NAMES", 2)
    agent = process("agent_loop")
    for step in range(30):
        with attached(baggage.set_baggage("verl.step.number", str(step))):
            verl_otel.log_scalar("mine/a", 1.0)
    assert len(agent.taken()) == 20
    assert memory.values("verl.otel.dropped", "verl.otel.signal", "verl.otel.reason") == {("logs", "user_values"): 10}


class Hostile:
    """Raises whatever is asked of it."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def _raise(self, *_):
        raise RuntimeError("no")

    __float__ = __int__ = __str__ = __len__ = __iter__ = __bool__ = __eq__ = __array__ = _raise
    __hash__ = object.__hash__


class HostileToShow(Hostile):
    __repr__ = Hostile._raise


SCALARS = (
    st.floats()
    | st.integers()
    | st.text(max_size=5)
    | st.none()
    | st.booleans()
    | st.complex_numbers()
    | st.decimals()
    | st.sampled_from(
        [
            *(
                numpy.float16("nan"),
                numpy.int8(3),
                numpy.str_("x"),
                numpy.array(2.0),
                numpy.array([1, 2]),
                numpy.array([]),
            ),
            *(torch.tensor(float("nan")), torch.ones(2, 2), torch.ones((), device="meta"), torch.tensor(1 + 2j)),
            *(Hostile(), OnDevice(), object(), b"x", {}, set(), len, Ellipsis),
        ]
    )
)
NAMES = st.text(max_size=20) | st.from_regex(r"[a-z]{1,3}/[a-z@_.-]{1,3}", fullmatch=True) | SCALARS


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NAMES, SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(), SCALARS, max_size=2))
@example("a/b", Hostile())
@example("a/b", [Hostile()])
@example(Hostile(), 1.0)
@example("a/b", [10**400])
@example("a/b", ["1", "2"])
@example("a/b", float("nan"))
def test_nothing_that_is_given_makes_a_call_raise(shared, name, value):
    verl_otel.log_scalar(name, value)
    verl_otel.log_histogram(name, value)
    verl_otel.log_text(name, value)
    verl_otel.declare(name, value)
    verl_otel.declare("a/b", "counter", unit=value, description=value)
    with verl_otel.stage(name):
        pass


@pytest.fixture
def shared(process, memory):
    """One process for all examples; whatever they were, good values are recorded after them."""
    trainer = process()
    yield trainer
    verl_otel.log_scalar("good/value", 1.0)
    assert trainer.point("verl.user.good.value").value == 1.0
    assert "recording in the background" not in border.failures()


@pytest.mark.parametrize("place", range(7))
def test_an_object_that_raises_whatever_is_asked_is_refused_wherever_it_is(process, place):
    process()
    hostile = HostileToShow()
    for log in (verl_otel.log_scalar, verl_otel.log_histogram, verl_otel.log_text):
        log("a/b", hostile)
        log(hostile, 1.0)
    verl_otel.log_histogram("a/b", [hostile])
    arguments = [hostile if place == number else "" for number in range(6)]
    names = ("name", "kind", "unit", "description", "frequency", "scope")
    verl_otel.declare(**dict(zip(names, arguments, strict=True)))
    with verl_otel.stage(hostile):
        pass
    assert border.failures()


def test_text_is_not_read_as_numbers(process, caplog):
    trainer = process()
    verl_otel.log_histogram("mine/a", ["1", "2"])
    verl_otel.log_histogram("mine/b", "12")
    assert trainer.taken() == {}
    assert len(caplog.records) == 2


# ---- off ------------------------------------------------------------------------------------------------------------


def test_where_telemetry_is_off_nothing_happens(memory):
    assert telemetry.current() is None
    started = time.perf_counter()
    for _ in range(10_000):
        verl_otel.log_scalar("mine/a", 1.0)
    seconds = (time.perf_counter() - started) / 10_000
    verl_otel.log_histogram("mine/a", Hostile())
    verl_otel.log_text("mine/a", Hostile())
    verl_otel.declare("not a name")

    @verl_otel.stage("Not A Name")
    def add(a, b):
        return a + b

    assert add(1, 2) == 3
    verl_otel.flush()
    assert border.failures() == {}
    assert seconds < 50e-6


def test_of_a_module_that_is_off_only_the_step_event_has_values(process, memory, monkeypatch):
    monkeypatch.setenv("VERL_OTEL_LEVELS", "reward=off")
    trainer = process()
    verl_otel.log_scalar("reward/mine", 1.0)
    verl_otel.log_histogram("reward/all", [1.0])
    verl_otel.log_scalar("agent/mine", 1.0)
    assert kinds(memory) == [("verl.user.agent.mine", "Gauge")]
    trainer.telemetry.recorder.submit(Logged({}, 5, 1, Context()))
    memory.settle()
    assert dict(memory.events[0].body) == {"reward/mine": 1.0, "reward/all": 1.0, "agent/mine": 1.0}


def test_what_is_logged_leaves_with_flush(process, memory):
    trainer = process()
    verl_otel.log_scalar("mine/a", 1.0)
    trainer.telemetry.recorder.submit(Logged({}, 5, 1, Context()))
    verl_otel.flush(30)
    assert [dict(log.log_record.body) for log in memory._logs.get_finished_logs()] == [{"mine/a": 1.0}]

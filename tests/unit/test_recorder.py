"""The background recorder (`metrics/recorder.py`): what was logged, at full precision, or counted as lost."""

import math
import threading
import time

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, InMemoryLogRecordExporter

from verl_otel import background, border
from verl_otel.metrics import recorder as recorder_module
from verl_otel.metrics.recorder import Logged
from verl_otel.semconv.registry import load

TIME_NS = 1_800_000_000_123_456_789


def logged(data, step=1, context=None):
    return Logged(data, step, TIME_NS, context or Context())


class Held:
    """A value that keeps the recorder waiting until it is released."""

    def __init__(self):
        self.reached, self.released = threading.Event(), threading.Event()

    def __float__(self):
        self.reached.set()
        self.released.wait(60)
        return 0.0


@pytest.fixture
def held():
    held = Held()
    yield held
    held.released.set()


@pytest.fixture
def process(memory):
    return memory.process(attempt=2)


@pytest.fixture
def recorder(process):
    return process.recorder


def record(recorder, *calls):
    for call in calls:
        recorder.submit(call)
    assert recorder._background.drained(30)


def test_the_event_has_every_value_as_it_was_logged(recorder, memory):
    data = {
        "critic/score/mean": 0.1 + 0.2,
        "actor/pg_loss": -1.2345678901234567e-8,
        "actor/lr": 5e-324,
        "perf/total_num_tokens": 9_007_199_254_740_993,  # not a double
        "training/global_step": 7,
        "val-core/gsm8k/acc/mean@1": 1.0,
        "flag": True,
        "奖励/均值": 2.5,
    }
    record(recorder, logged(data, step=7))
    (event,) = memory.events
    assert event.event_name == "verl.step"
    assert event.timestamp == TIME_NS
    assert dict(event.attributes) == {"verl.run.id": "run-1", "verl.run.attempt": 2, "verl.step.number": 7}
    assert dict(event.body) == data
    assert type(event.body["perf/total_num_tokens"]) is int


def test_the_event_belongs_to_the_span_of_its_step(recorder, memory):
    span = memory.tracer.start_span("verl.step", context=Context())
    record(recorder, logged({"a": 1.0}, context=trace.set_span_in_context(span, Context())))
    (event,) = memory.events
    assert (event.trace_id, event.span_id) == (span.get_span_context().trace_id, span.get_span_context().span_id)


def test_a_gauge_has_the_exact_value_and_the_three_attributes(recorder, memory):
    record(recorder, logged({"critic/score/mean": 0.1234567890123456789, "actor/pg_loss": 3}))
    (reward,) = memory.points("verl.reward.mean")
    assert reward.value == 0.1234567890123456789
    assert dict(reward.attributes) == {
        "rank": "all",
        "stage": "reward",
        "model_type": "reward",
        "verl.key": "critic/score/mean",
    }
    assert memory.values("verl.policy.loss") == {(): 3}


def test_series_of_one_metric_are_kept_apart(recorder, memory):
    record(
        recorder, logged({"actor/grad_norm": 1.5, "critic/grad_norm": 2.5, "actor/ppo_kl": 0.25, "actor/kl_loss": 0.5})
    )
    assert memory.values("verl.grad_norm", "model_type") == {("actor",): 1.5, ("critic",): 2.5}
    assert memory.values("verl.kl.divergence", "verl.kl.type") == {("update",): 0.25, ("loss",): 0.5}


def test_a_gauge_shows_the_last_value_at_every_export(recorder, memory):
    record(recorder, logged({"actor/lr": 1.0}, 1), logged({"actor/lr": 2.0}, 2))
    assert memory.values("verl.learning_rate") == {(): 2.0}
    record(recorder, logged({"other": 1.0}, 3))
    assert memory.values("verl.learning_rate") == {(): 2.0}


def test_the_time_of_the_last_call_is_a_metric(recorder, memory):
    record(recorder, logged({}))
    (point,) = memory.points("verl.step.last_timestamp")
    assert point.value == TIME_NS / 1e9
    assert dict(point.attributes) == {"rank": "all", "stage": "step", "model_type": "none"}


def test_a_process_that_stays_after_training_does_not_look_as_if_a_step_were_late(process, recorder, memory):
    record(recorder, logged({"a/b": 1.0}))
    process.finish()
    assert recorder._background.drained(30)
    assert memory.points("verl.step.last_timestamp") == []
    record(recorder, logged({"a/b": 1.0}, 2))  # another training in this process
    assert len(memory.points("verl.step.last_timestamp")) == 1


def test_what_is_not_a_number_is_counted_by_kind_and_left_out(recorder, memory):
    data = {"note": "text", "nothing": None, "list": [1, 2], "again": "text", "good": 1.0}
    record(recorder, logged(data), logged({"note": "text"}))
    (event, _) = memory.events
    assert dict(event.body) == {"good": 1.0}
    assert memory.values("verl.metric.skipped", "verl.key", "verl.value.kind") == {
        ("note", "text"): 2,
        ("again", "text"): 1,
        ("nothing", "none"): 1,
        ("list", "array"): 1,
    }
    assert memory.points("verl.note") == []
    for point in memory.points("verl.metric.skipped"):
        assert point.attributes["rank"] == "all" and point.attributes["model_type"] == "none"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_counted_and_hides_the_last_good_one(recorder, memory, bad):
    record(recorder, logged({"actor/grad_norm": 1.5, "critic/grad_norm": 2.5}))
    record(recorder, logged({"actor/grad_norm": bad, "critic/grad_norm": 3.5}))
    assert memory.values("verl.grad_norm", "model_type") == {("critic",): 3.5}
    (counted,) = memory.points("verl.metric.non_finite")
    assert counted.value == 1
    assert dict(counted.attributes) == {
        "rank": "all",
        "stage": "update",
        "model_type": "actor",
        "metric": "verl.grad_norm",
        "verl.key": "actor/grad_norm",
    }
    steps = [event for event in memory.events if event.event_name == "verl.step"]
    in_event = steps[1].body["actor/grad_norm"]  # the event is the lossless history
    assert math.isnan(in_event) if math.isnan(bad) else in_event == bad
    record(recorder, logged({"actor/grad_norm": 4.5}))
    assert memory.values("verl.grad_norm", "model_type") == {("actor",): 4.5, ("critic",): 3.5}


def test_a_full_queue_drops_and_counts_and_does_not_block(memory, held, monkeypatch):
    monkeypatch.setattr(background, "MAX_PENDING", 6)
    process = memory.process()
    recorder = process.recorder
    recorder.submit(logged({"a": held}, 0))
    assert held.reached.wait(30)
    started = time.monotonic()
    for step in range(1, 21):
        recorder.submit(logged({"a": float(step)}, step))
    assert time.monotonic() - started < 10
    assert not process.background.drained(0.02)
    held.released.set()
    assert process.background.drained(30)
    steps = [event.body["a"] for event in memory.events]
    assert steps == list(range(len(steps)))  # the first ones, in order
    assert 2 <= len(steps) <= 7
    (dropped,) = memory.points("verl.otel.dropped")
    assert dropped.value >= 21 - len(steps)
    assert dict(dropped.attributes) == {"verl.otel.signal": "metrics", "verl.otel.reason": "queue_full"}


def test_the_event_has_the_values_of_the_time_of_the_call(recorder, memory, held):
    recorder.submit(logged({"first": held}))
    metrics = {"a": 1.0}
    recorder.submit(logged(dict(metrics), 2))  # a copy, as the hook hands it over
    metrics.clear()
    metrics["a"] = 99.0
    held.released.set()
    memory.settle()
    assert [dict(event.body) for event in memory.events] == [{"first": 0.0}, {"a": 1.0}]


def test_a_key_that_is_not_unicode_does_not_lose_the_batch(recorder, memory):
    record(recorder, logged({"bad\ud800key": 1.0, "good": 2.0, "text\udfff": "not a number"}))
    request = ExportLogsServiceRequest.FromString(encode_logs(memory.logs).SerializeToString())
    (log,) = request.resource_logs[0].scope_logs[0].log_records
    assert {pair.key: pair.value.double_value for pair in log.body.kvlist_value.values} == {"bad?key": 1.0, "good": 2.0}
    assert sorted(memory.values("verl.metric.skipped", "verl.key")) == [("text?",)]


def test_keys_that_are_not_text_are_recorded_as_text(recorder, memory):
    record(recorder, logged({1: 1.5, ("a", 2): 2.5}))
    assert dict(memory.events[0].body) == {"1": 1.5, "('a', 2)": 2.5}


@pytest.mark.parametrize(("step", "number"), [(3, 3), (3.0, 3), (None, None), ("three", None)])
def test_a_step_that_is_not_a_number_is_not_guessed(recorder, memory, step, number):
    record(recorder, logged({"a": 1.0}, step))
    assert memory.events[0].attributes.get("verl.step.number") == number


def test_a_call_that_cannot_be_recorded_costs_only_itself(recorder, memory, caplog):
    class Unreadable:
        def __str__(self):
            raise RuntimeError("no name")

    record(recorder, logged({Unreadable(): 1.0}), logged({"a": 1.0}, 2))
    assert dict(memory.events[-1].body) == {"a": 1.0}
    assert sum(border.failures().values()) == 1
    assert "the run goes on" in caplog.text


def test_what_is_logged_leaves_the_process_when_it_is_logged(memory):
    exporter = InMemoryLogRecordExporter()
    processor = BatchLogRecordProcessor(exporter, schedule_delay_millis=3_600_000)
    memory.logger_provider.add_log_record_processor(processor)
    recorder = memory.process().recorder
    for step in range(1, 3):
        recorder.submit(logged({"a": float(step)}, step))
        deadline = time.monotonic() + 30
        while len(exporter.get_finished_logs()) < step and time.monotonic() < deadline:
            time.sleep(0.005)
        assert [log.log_record.body["a"] for log in exporter.get_finished_logs()] == [float(n + 1) for n in range(step)]
    processor.shutdown()


def test_work_that_fails_in_the_background_is_counted_and_the_rest_is_done(process, recorder, memory):
    def fail():
        raise RuntimeError("no")

    done = []
    process.background.defer(fail)
    process.background.defer(done.append, 1)
    record(recorder, logged({"a": 1.0}))
    assert done == [1]
    assert len(memory.events) == 1
    assert sum(border.failures().values()) == 1


def test_too_many_keys_are_only_in_the_events_and_counted(recorder, memory, monkeypatch):
    monkeypatch.setattr(recorder_module, "MAX_KEYS", 3)
    data = {f"k{i}": i for i in range(5)}
    record(recorder, logged(data))
    assert dict(memory.events[0].body) == data
    assert [len(memory.points(f"verl.k{i}")) for i in range(5)] == [1, 1, 1, 0, 0]
    assert memory.values("verl.otel.dropped", "verl.otel.signal", "verl.otel.reason") == {
        ("metrics", "too_many_keys"): 2
    }


def test_withdrawing_a_series_that_was_never_set_is_harmless(process, memory):
    metric = load().metrics["verl.loss"]
    process.instruments.withdraw(metric, {"a": "1"})
    process.instruments.set(metric, {"a": "1"}, 1.0)
    process.instruments.withdraw(metric, {"a": "2"})
    assert memory.values("verl.loss", "a") == {("1",): 1.0}

"""Instruments from the registry (`metrics/instruments.py`): levels, caps, and one type for each name."""

import math

import numpy
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from verl_otel.config import Levels
from verl_otel.metrics import distributions as distributions_module
from verl_otel.metrics import instruments as instruments_module
from verl_otel.metrics.distributions import Distributions
from verl_otel.metrics.instruments import Instruments
from verl_otel.semconv import metrics as names
from verl_otel.semconv.registry import load

METRICS = load().metrics

LABELS = {"rank": "all", "stage": "update", "model_type": "actor"}


def made(memory, levels="", distributions=None):
    return Instruments(memory.meter, Levels.parse(levels), distributions)


def one_of(module, level, instrument="gauge"):
    return next(m for m in METRICS.values() if (m.module, m.level, m.instrument) == (module, level, instrument))


BASIC, DETAILED = one_of("actor", "basic"), one_of("actor", "detailed")
OF_CRITIC = one_of("critic", "detailed")


@pytest.mark.parametrize(
    ("levels", "shown"),
    [
        ("", {BASIC, DETAILED, OF_CRITIC}),
        ("actor=detailed", {BASIC, DETAILED, OF_CRITIC}),
        ("actor=basic", {BASIC, OF_CRITIC}),
        ("actor=off", {OF_CRITIC}),
        ("*=basic", {BASIC}),
        ("*=off,actor=basic", {BASIC}),
        ("*=off", set()),
        ("actor=loud", {BASIC, DETAILED, OF_CRITIC}),
    ],
)
def test_levels_say_by_module_what_is_recorded(memory, levels, shown):
    instruments = made(memory, levels)
    for metric in (BASIC, DETAILED, OF_CRITIC):
        instruments.set(metric, LABELS, 1.0)
    assert {metric for metric in (BASIC, DETAILED, OF_CRITIC) if memory.points(metric.name)} == shown


def test_levels_apply_to_counters_and_histograms_too(memory):
    instruments = made(memory, "*=off")
    instruments.add(names.GENERATED_TOKENS, LABELS, 5)
    instruments.record(names.STAGE_DURATION, LABELS, 1.0)
    instruments.record_all(names.REWARD_SCORE, LABELS, numpy.asarray([1.0, math.nan]))
    for name in ("verl.rollout.generated_tokens", "verl.stage.duration", "verl.reward.score", "verl.metric.non_finite"):
        assert memory.points(name) == []


def test_levels_come_from_the_environment(memory, monkeypatch):
    monkeypatch.setenv("VERL_OTEL_LEVELS", "rollout=detailed,critic=basic,reward=off")
    process = memory.process()
    process.log({"critic/score/mean": 1.0, "actor/pg_loss": 2.0}, 1)
    assert memory.points("verl.reward.mean") == []
    assert memory.values("verl.policy.loss") == {(): 2.0}
    assert dict(memory.events[0].body) == {"critic/score/mean": 1.0, "actor/pg_loss": 2.0}  # events have everything


# ---- series ---------------------------------------------------------------------------------------------------------


def test_too_many_series_are_counted_and_those_that_are_there_go_on(memory, monkeypatch):
    monkeypatch.setattr(instruments_module, "MAX_SERIES", 3)
    instruments = made(memory)
    for rank in range(5):
        instruments.set(names.LOSS, {"rank": str(rank)}, float(rank))
    instruments.set(names.GRAD_NORM, {"rank": "0"}, 1.0)  # the cap is for all gauges together
    instruments.set(names.LOSS, {"rank": "1"}, 7.0)
    assert memory.values("verl.loss", "rank") == {("0",): 0.0, ("1",): 7.0, ("2",): 2.0}
    assert memory.points("verl.grad_norm") == []
    assert memory.values("verl.otel.dropped", "verl.otel.signal", "verl.otel.reason") == {
        ("metrics", "too_many_series"): 3
    }


def test_a_series_that_is_withdrawn_frees_its_place(memory, monkeypatch):
    monkeypatch.setattr(instruments_module, "MAX_SERIES", 1)
    instruments = made(memory)
    instruments.set(names.LOSS, {"rank": "0"}, 1.0)
    instruments.withdraw(names.LOSS, {"rank": "0"})
    instruments.withdraw(names.LOSS, {"rank": "0"})  # twice is once
    instruments.set(names.LOSS, {"rank": "1"}, 2.0)
    instruments.set(names.LOSS, {"rank": "2"}, 3.0)
    assert memory.values("verl.loss", "rank") == {("1",): 2.0}
    assert memory.values("verl.otel.dropped") == {(): 1}


def test_the_order_of_labels_makes_no_other_series(memory):
    instruments = made(memory)
    instruments.set(names.LOSS, {"rank": "0", "stage": "update"}, 1.0)
    instruments.set(names.LOSS, {"stage": "update", "rank": "0"}, 2.0)
    assert memory.values("verl.loss", "rank") == {("0",): 2.0}
    instruments.withdraw(names.LOSS, {"stage": "update", "rank": "0"})
    assert memory.points("verl.loss") == []


def test_a_gauge_of_zero_is_shown(memory):
    made(memory).set(names.LOSS, LABELS, 0.0)
    assert memory.values("verl.loss") == {(): 0.0}


# ---- counters and histograms ----------------------------------------------------------------------------------------


def test_counters_only_go_up(memory, caplog):
    process, seen = memory.process(), []
    for step, tokens in enumerate((100, 50, -7, 0, math.nan, math.inf, 25)):
        process.log({"perf/total_num_tokens": tokens}, step)
        seen += memory.values("verl.training.tokens").values()
    counter = [s.metric for s in names.series_of("perf/total_num_tokens") if s.metric.instrument == "counter"]
    assert [metric.name for metric in counter] == ["verl.training.tokens"]
    assert seen == [100, 150, 150, 150, 150, 150, 175]
    assert caplog.records == []  # the SDK would warn of each


def test_a_counter_goes_on_from_zero_in_the_process_of_the_next_attempt(memory, new_memory):
    """After a resume the counter of the new process has its own start; `increase` over both adds up."""
    again = new_memory()
    memory.process(attempt=1).log({"perf/total_num_tokens": 100}, 1)
    again.process(attempt=2).log({"perf/total_num_tokens": 10}, 2)
    (first,), (second,) = memory.points("verl.training.tokens"), again.points("verl.training.tokens")
    assert (first.value, second.value) == (100, 10)
    assert second.start_time_unix_nano > first.start_time_unix_nano


def test_values_that_are_not_finite_are_counted_and_not_recorded(memory):
    instruments = made(memory)
    instruments.record_all(names.REWARD_SCORE, LABELS, numpy.asarray([1.0, math.nan, 2.0, math.inf, -math.inf]))
    (point,) = memory.points("verl.reward.score")
    assert (point.count, point.sum) == (2, 3.0)
    (bad,) = memory.points("verl.metric.non_finite")
    assert bad.value == 3
    assert dict(bad.attributes) == {**LABELS, "metric": "verl.reward.score", "verl.key": ""}


@pytest.mark.parametrize("values", [[], [math.nan, math.nan]])
def test_without_a_finite_value_there_is_no_histogram(memory, values):
    made(memory).record_all(names.REWARD_SCORE, LABELS, numpy.asarray(values))
    assert memory.points("verl.reward.score") == []


def test_negative_values_which_a_histogram_of_the_sdk_refuses_are_counted_and_not_warned_of(memory, caplog):
    made(memory).record_all(names.REWARD_SCORE, LABELS, numpy.asarray([-1.0, 2.0, -3.0]))
    (point,) = memory.points("verl.reward.score")
    assert (point.count, point.sum) == (1, 2.0)
    assert memory.values("verl.otel.dropped", "verl.otel.reason") == {("negative_value",): 2}
    assert caplog.records == []


def test_too_many_series_of_histograms_are_counted(memory, monkeypatch):
    monkeypatch.setattr(distributions_module, "MAX_SERIES", 1)
    distributions = Distributions(Resource.get_empty(), InstrumentationScope("verl_otel"))
    instruments = made(memory, distributions=distributions)
    for rank in ("0", "1"):
        instruments.record_all(names.REWARD_SCORE, {"rank": rank}, numpy.asarray([-1.0]))
    assert memory.values("verl.otel.dropped", "verl.otel.reason") == {("too_many_series",): 1}
    assert memory.points("verl.reward.score") == []  # the SDK has none of them


def test_one_value_and_many_have_the_registrys_buckets(memory):
    instruments = made(memory)
    instruments.record(names.STAGE_DURATION, LABELS, 1.0)
    instruments.record_all(names.REWARD_SCORE, LABELS, numpy.asarray([1.0]))
    for metric in (names.STAGE_DURATION, names.REWARD_SCORE):
        (point,) = memory.points(metric.name)
        assert tuple(point.explicit_bounds) == metric.boundaries


# ---- one name, one type ---------------------------------------------------------------------------------------------


def types_of(memory):
    """name -> the types and units that were exported under it."""
    memory.settle()
    found = {}
    for of_resource in memory._reader.get_metrics_data().resource_metrics:
        for of_scope in of_resource.scope_metrics:
            for metric in of_scope.metrics:
                found.setdefault(metric.name, set()).add((type(metric.data).__name__, metric.unit))
    return found


def test_no_name_of_the_registry_has_two_types_however_its_values_come(memory):
    process = memory.process()
    keys = [key.pattern for metric in METRICS.values() for key in metric.keys if "<" not in key.pattern]
    process.log({key: 1 for key in keys}, 1)
    process.log({key: 2.5 for key in keys}, 2)
    process.log({key: numpy.float32(3.5) for key in keys}, 3)
    found = types_of(memory)
    assert len(found) > 100
    assert {name: types for name, types in found.items() if len(types) > 1} == {}
    for name, ((kind, _),) in ((name, tuple(types)) for name, types in found.items() if name in METRICS):
        assert kind == {"gauge": "Gauge", "counter": "Sum", "histogram": "Histogram"}[METRICS[name].instrument]


def test_an_instrument_is_created_once(memory, caplog):
    instruments = made(memory)
    for rank in range(3):
        instruments.set(names.LOSS, {"rank": str(rank)}, 1.0)
        instruments.add(names.GENERATED_TOKENS, LABELS)
        instruments.record(names.STAGE_DURATION, LABELS, 1.0)
    instruments.withdraw(names.LOSS, {"rank": "0"})
    instruments.set(names.LOSS, {"rank": "0"}, 1.0)
    assert len(memory.points("verl.loss")) == 3
    assert "already been created" not in caplog.text

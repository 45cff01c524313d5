"""Figures computed from those of a step (`metrics/derived.py`): from measured values only, and none from a guess."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_otel.metrics import derived

STEP = {
    "timing_s/step": 10.0,
    "timing_s/gen": 4.0,
    "timing_s/update_actor": 3.0,
    "timing_s/adv": 0.5,
    "timing_s/testing": 5.0,  # outside the step
    "timing_s/agent_loop/generate_sequences/mean": 3.0,  # a part of a stage
    "timing_s/my_own": 1.0,  # who knows where
    "timing_per_token_ms/gen": 0.5,
    "actor/lr": 1.0,
}


def figures(values, generated=None):
    """name (and timer) -> value"""
    found = {}
    for series, value in derived.of_step(values, generated):
        timer = series.attributes.get("verl.timer")
        found[f"{series.metric.name} {timer}" if timer else series.metric.name] = value
    return found


def test_rate_shares_and_the_rest_of_a_step():
    assert figures(STEP) == {
        "verl.step.rate": 0.1,
        "verl.step.stage_share gen": 0.4,
        "verl.step.stage_share update_actor": 0.3,
        "verl.step.stage_share adv": 0.05,
        "verl.step.unaccounted": 2.5,
    }


def test_a_share_says_whose_it_is():
    shares = [series for series, _ in derived.of_step(STEP) if series.metric.name == "verl.step.stage_share"]
    assert {tuple(series.attributes.values()) for series in shares} == {
        ("all", "rollout", "rollout", "gen"),
        ("all", "update", "actor", "update_actor"),
        ("all", "advantage", "none", "adv"),
    }


def test_throughput_is_tokens_over_the_time_of_generation():
    assert figures(STEP, generated=800.0)["verl.rollout.throughput"] == 200.0


def test_without_the_time_of_the_step_there_is_only_the_throughput():
    values = {key: value for key, value in STEP.items() if key != "timing_s/step"}
    assert figures(values) == {}
    assert figures(values, 800.0) == {"verl.rollout.throughput": 200.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_nothing_is_computed_from_a_time_that_is_none(bad):
    assert figures({**STEP, "timing_s/step": bad}) == {}
    assert "verl.rollout.throughput" not in figures({**STEP, "timing_s/gen": bad}, 800.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_stage_whose_time_is_not_finite_has_no_share(bad):
    found = figures({**STEP, "timing_s/gen": bad})
    assert "verl.step.stage_share gen" not in found
    assert found["verl.step.unaccounted"] == 6.5


def test_stages_that_overlap_leave_nothing_over_and_not_less():
    assert figures({**STEP, "timing_s/gen": 9.0})["verl.step.unaccounted"] == 0.0


@given(st.dictionaries(st.sampled_from([*STEP, "timing_s/", "timing_s"]), st.floats()), st.none() | st.floats(0, 1e9))
def test_whatever_the_values_are_figures_are_finite_or_not_there(values, generated):
    for name, value in figures(values, generated).items():
        if math.isfinite(value) is False:
            assert min(abs(v) for v in values.values() if v) < 1e-200, name  # the quotient is beyond all floats


class Trainer:
    global_steps = 1


@pytest.mark.parametrize("waits", [False, True])
def test_a_timer_that_is_only_a_wait_gives_no_throughput(memory, waits):
    process = memory.process()
    trainer = Trainer()
    process.steps.follow(trainer)
    process.steps.waits_for_rollout = waits
    step = process.steps.enter("step")
    process.step_values.add(1, {"verl.rollout.tokens": 800})
    process.log(dict(STEP), 1)
    process.steps.leave(step)
    assert memory.values("verl.rollout.throughput", "stage") == ({} if waits else {("rollout",): 200.0})
    assert memory.values("verl.step.rate", "stage") == {("step",): 0.1}
    assert memory.values("verl.step.unaccounted") == {(): 2.5}


def test_tokens_of_another_step_are_not_taken_for_this_one(memory):
    process = memory.process()
    trainer = Trainer()
    process.steps.follow(trainer)
    step = process.steps.enter("step")
    process.step_values.add(2, {"verl.rollout.tokens": 800})
    process.log(dict(STEP), 1)
    process.steps.leave(step)
    assert memory.points("verl.rollout.throughput") == []


# ---- over several steps ---------------------------------------------------------------------------------------------


def shown(memory):
    """What the gauges show: timer -> share, and the figures that are one for the step."""
    shares = {timer: value for (timer,), value in memory.values("verl.step.stage_share", "verl.timer").items()}
    return shares, memory.values("verl.step.rate") | memory.values("verl.step.unaccounted")


def test_a_stage_that_this_step_does_not_have_shows_no_share(memory):
    process = memory.process()
    process.log({"timing_s/step": 10.0, "timing_s/gen": 2.0, "timing_s/save_checkpoint": 8.0}, 20)
    assert shown(memory)[0] == {"gen": 0.2, "save_checkpoint": 0.8}
    process.log({"timing_s/step": 4.0, "timing_s/gen": 3.0}, 21)
    assert shown(memory) == ({"gen": 0.75}, {(): 1.0})


@pytest.mark.parametrize("time", [{}, {"timing_s/step": math.nan}, {"timing_s/step": 0.0}])
def test_without_the_time_of_this_step_that_of_the_last_one_is_not_shown(memory, time):
    process = memory.process()
    process.log(dict(STEP), 1)
    process.log({"timing_s/gen": 4.0, **time}, 2)
    assert shown(memory) == ({}, {})
    process.log(dict(STEP), 3)
    assert shown(memory) == ({"gen": 0.4, "update_actor": 0.3, "adv": 0.05}, {(): 2.5})


@pytest.mark.parametrize("more", [{"val-core/acc": 1.0}, {"timing_s/testing": 5.0}, {"timing_s/save_checkpoint": 1.0}])
def test_a_second_call_for_a_step_that_does_not_time_it_leaves_its_figures(memory, more):
    process = memory.process()
    process.log(dict(STEP), 1)
    before = shown(memory)
    process.log(more, 1)
    assert shown(memory) == before


def test_a_call_without_timers_does_not_begin_a_step(memory):
    process = memory.process()
    process.log(dict(STEP), 1)
    before = shown(memory)
    process.log({"val-core/acc": 1.0, "timing_s/testing": 5.0}, 2)
    assert shown(memory) == before

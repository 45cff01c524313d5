"""verl's metric keys and timers -> OpenTelemetry names (`semconv/metrics.py`, `semconv/stages.py`)."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider

from verl_otel.semconv.metrics import derived_name, series_of
from verl_otel.semconv.stages import TRAJECTORY_TIMERS, stage_of

LEGAL_NAME = re.compile(r"^[a-zA-Z][-_./a-zA-Z0-9]{0,254}$")
STAGES = {
    *("rollout", "reward", "log_prob", "values", "advantage", "update"),
    *("weight_sync", "checkpoint", "validation", "step", "other"),
}
MODEL_TYPES = {"actor", "critic", "ref", "reward", "rollout", "teacher", "none"}
REAL_KEYS = (Path(__file__).parent / "data" / "metric_keys_gae_step.txt").read_text().split("\n")[:-1]

METER_PROVIDER = MeterProvider(shutdown_on_exit=False)

any_text = st.text(st.characters(), max_size=300)  # with lone surrogates
like_verl = st.from_regex(r"[a-z0-9_@#. -]{1,12}(/[a-zA-Z0-9_@#. -]{1,12}){0,4}", fullmatch=True)
timings = st.builds(
    str.__add__, st.sampled_from(["timing_s/", "timing_per_token_ms/", "timing_s/agent_loop/"]), any_text
)
keys = any_text | like_verl | timings


def metric_of(key):
    """The gauge of a key, and its attributes."""
    (gauge,) = [series for series in series_of(key) if series.metric.instrument == "gauge"]
    return SimpleNamespace(**{**vars(gauge.metric), "attributes": gauge.attributes, "description": gauge.metric.brief})


def series(key):
    metric = metric_of(key)
    return metric.name, tuple(sorted(metric.attributes.items()))


def series_on_prometheus(key):
    """Prometheus: other characters become `_`, several of them one, and letters stay as they are."""
    metric = metric_of(key)
    name = re.sub(r"_+", "_", re.sub(r"[^a-zA-Z0-9_:]", "_", metric.name))
    return name, tuple(sorted((re.sub(r"[^a-zA-Z0-9_]", "_", k), v) for k, v in metric.attributes.items()))


@pytest.mark.parametrize(
    ("key", "name", "unit"),
    [
        ("training/global_step", "verl.training.step", ""),
        ("training/epoch", "verl.training.epoch", ""),
        ("critic/score/mean", "verl.reward.mean", ""),
        ("actor/lr", "verl.learning_rate", ""),
        ("perf/throughput", "verl.throughput", "{token}/s"),
        ("perf/total_num_tokens", "verl.step.tokens", "{token}"),
        ("perf/time_per_step", "verl.step.time", "s"),
        ("actor/pg_loss", "verl.policy.loss", ""),
        ("response_length/clip_ratio", "verl.response.clip_ratio", "1"),
    ],
)
def test_the_names_of_the_contract_are_exact(key, name, unit):
    assert (metric_of(key).name, metric_of(key).unit) == (name, unit)


def test_four_kinds_of_kl_are_one_metric_told_apart_by_type():
    kinds = {
        "actor/reward_kl_penalty": ("penalty", "advantage"),
        "actor/kl_loss": ("loss", "update"),
        "actor/ppo_kl": ("update", "update"),
        "rollout_corr/kl": ("rollout", "rollout"),
    }
    for key, (kind, stage) in kinds.items():
        metric = metric_of(key)
        assert metric.name == "verl.kl.divergence"
        assert metric.attributes == {
            "rank": "all",
            "stage": stage,
            "model_type": "actor",
            "verl.key": key,
            "verl.kl.type": kind,
        }


@pytest.mark.parametrize("what", ["grad_norm", "lr"])
def test_actor_and_critic_share_a_metric_told_apart_by_model_type(what):
    actor, critic = metric_of(f"actor/{what}"), metric_of(f"critic/{what}")
    assert actor.name == critic.name
    assert (actor.attributes["model_type"], critic.attributes["model_type"]) == ("actor", "critic")
    assert actor.attributes["stage"] == critic.attributes["stage"] == "update"


@pytest.mark.parametrize(
    ("key", "stage", "model_type"),
    [
        ("critic/score/max", "reward", "reward"),  # exists without a critic
        ("critic/rewards/mean", "reward", "reward"),
        ("critic/advantages/mean", "advantage", "none"),
        ("critic/returns/min", "advantage", "none"),
        ("critic/values/mean", "values", "critic"),
        ("critic/vf_explained_var", "values", "critic"),
        ("critic/vf_loss", "update", "critic"),
        ("actor/entropy", "log_prob", "actor"),
        ("actor/pg_loss", "update", "actor"),
        ("perf/mfu/actor", "update", "actor"),
        ("perf/mfu/critic", "update", "critic"),
        ("perf/max_memory_allocated_gb", "update", "actor"),
        ("val-core/gsm8k/acc/mean@1", "validation", "rollout"),
        ("response_length/mean", "rollout", "rollout"),
        ("training/rollout_probs_diff_mean", "rollout", "rollout"),
        ("train/loss", "update", "actor"),
        ("val/loss", "validation", "actor"),
        ("my/own/metric", "other", "none"),
    ],
)
def test_a_key_is_attributed_to_its_stage_and_model(key, stage, model_type):
    attributes = metric_of(key).attributes
    assert (attributes["stage"], attributes["model_type"]) == (stage, model_type)


def test_a_timing_is_one_metric_in_seconds_by_timer():
    metric = metric_of("timing_s/update_actor")
    assert (metric.name, metric.unit) == ("verl.timing", "s")
    assert metric.attributes == {
        "rank": "all",
        "stage": "update",
        "model_type": "actor",
        "verl.key": "timing_s/update_actor",
        "verl.timer": "update_actor",
    }


def test_a_timing_per_token_is_one_metric_in_milliseconds_by_timer():
    metric = metric_of("timing_per_token_ms/ref")
    assert (metric.name, metric.unit) == ("verl.timing.per_token", "ms")
    assert metric.attributes["verl.timer"] == "ref"
    assert (metric.attributes["stage"], metric.attributes["model_type"]) == ("log_prob", "ref")


@pytest.mark.parametrize(
    "timer",
    [
        "agent_loop/num_preempted/mean",
        "agent_loop/num_preempted/max",
        "agent_loop/slowest/num_preempted",
        "agent_loop/slowest/response_length",
        "agent_loop/slowest/prompt_length",
        "generation_timing/topk_ratio",
    ],
)
def test_a_count_among_the_timings_is_not_given_seconds(timer):
    metric = metric_of(f"timing_s/{timer}")
    assert metric.unit != "s"
    assert metric.name != "verl.timing"


@pytest.mark.parametrize("timer", ["gen", "agent_loop/generate_sequences/max", "agent_loop/slowest/tool_calls", "x"])
def test_a_real_timing_keeps_seconds(timer):
    assert metric_of(f"timing_s/{timer}").unit == "s"


@pytest.mark.parametrize(
    ("key", "core", "source", "variable", "metric", "n", "statistic"),
    [
        ("val-core/gsm8k/acc/mean@16", "true", "gsm8k", "acc", "mean", "16", "none"),
        ("val-aux/openai/gsm8k/reward/best@8/std", "false", "openai/gsm8k", "reward", "best", "8", "std"),
        ("val-core/a/b/c/acc/maj@4/mean", "true", "a/b/c", "acc", "maj", "4", "mean"),
    ],
)
def test_a_validation_key_is_taken_apart_from_the_right(key, core, source, variable, metric, n, statistic):
    found = metric_of(key)
    assert found.name == "verl.validation.score"
    validation = {k[len("verl.validation.") :]: v for k, v in found.attributes.items() if k.startswith("verl.val")}
    assert validation == {
        "core": core,
        "data_source": source,
        "variable": variable,
        "metric": metric,
        "n": n,
        "statistic": statistic,
    }
    assert found.attributes["verl.key"] == key


def test_a_key_with_at_sign_gets_a_legal_name():
    assert re.fullmatch(r"verl\.mine\.mean_16_[0-9a-f]{8}", metric_of("mine/mean@16").name)


def test_a_name_of_the_registry_is_not_given_to_another_key_even_as_prometheus_shows_it():
    for key in ("reward/mean", "reward_mean", "training/step", "user/reward/x"):
        assert re.search(r"_[0-9a-f]{8}$", metric_of(key).name), key


@pytest.mark.parametrize("other", ["a/B", "a_b", "a.b", "a//b", "a/b/", "a b", "A/b", "a@b", "a-b"])
def test_keys_that_look_alike_have_different_names(other):
    assert derived_name(other) != derived_name("a/b")


@given(keys)
@example("")
@example("/")
@example("@")
@example("奖励/均值")
@example("9lives")
@example("x" * 1000)
@example("\ud800")
@example("a\nb\0c")
def test_any_key_gets_a_name_that_opentelemetry_accepts(key):
    metric = metric_of(key)
    assert LEGAL_NAME.match(metric.name), metric.name
    meter = METER_PROVIDER.get_meter("test")
    meter.create_observable_gauge(metric.name, [], metric.unit, metric.description)  # raises if it is not legal


@given(keys)
@example("timing_s/")
@example("timing_per_token_ms/")
def test_every_metric_says_rank_stage_model_type_and_key(key):
    attributes = metric_of(key).attributes
    assert attributes["rank"] == "all"
    assert attributes["stage"] in STAGES
    assert attributes["model_type"] in MODEL_TYPES
    assert attributes["verl.key"] == key
    assert all(isinstance(value, str) for value in attributes.values())


@given(keys)
def test_a_key_has_the_same_name_each_time(key):
    assert metric_of(key) == metric_of(key)
    assert series(key) == series(key)


@given(st.lists(keys, unique=True, min_size=2, max_size=6))
@example(["actor/grad_norm", "critic/grad_norm"])
@example(["a/b", "a_b", "a.b", "a b", "A/B", "a/b_", "_a/b"])
@example(["training/global_step", "training/step"])
@example(["timing_s/gen", "timing_s/GEN", "timing_s/gen/"])
def test_two_keys_never_share_a_series(found):
    assert len({series(key) for key in found}) == len(found)
    assert len({series_on_prometheus(key) for key in found}) == len(found)


def test_every_key_of_a_real_step_has_a_series_of_its_own():
    assert len(REAL_KEYS) == len(set(REAL_KEYS)) > 100
    assert len({series(key) for key in REAL_KEYS}) == len(REAL_KEYS)
    assert len({series_on_prometheus(key) for key in REAL_KEYS}) == len(REAL_KEYS)


@pytest.mark.parametrize("key", REAL_KEYS)
def test_a_key_of_a_real_step_maps(key):
    metric = metric_of(key)
    assert LEGAL_NAME.match(metric.name) and metric.name.startswith("verl.")
    assert metric.description
    assert metric.attributes["stage"] in STAGES - {"other"}
    assert metric.attributes["model_type"] in MODEL_TYPES


def test_keys_of_one_metric_agree_on_unit_and_description():
    found = {}
    for key in REAL_KEYS:
        metric = metric_of(key)
        assert found.setdefault(metric.name, (metric.unit, metric.description)) == (metric.unit, metric.description)


@pytest.mark.parametrize(
    ("timer", "span", "stage", "model_type"),
    [
        ("step", "verl.step", "step", "none"),
        ("gen", "verl.rollout", "rollout", "rollout"),
        ("gen_max", "verl.rollout", "rollout", "rollout"),
        ("reward", "verl.reward", "reward", "reward"),
        ("old_log_prob", "verl.log_prob", "log_prob", "actor"),
        ("ref", "verl.ref_log_prob", "log_prob", "ref"),
        ("values", "verl.values", "values", "critic"),
        ("adv", "verl.advantage", "advantage", "none"),
        ("update_actor", "verl.update_actor", "update", "actor"),
        ("update_critic", "verl.update_critic", "update", "critic"),
        ("update_weights", "verl.weight_sync", "weight_sync", "rollout"),
        ("sync_rollout_weights", "verl.weight_sync", "weight_sync", "rollout"),
        ("save_checkpoint", "verl.checkpoint", "checkpoint", "none"),
        ("testing", "verl.validation", "validation", "rollout"),
        ("my_own_stage", "verl.my_own_stage", "other", "none"),
        ("my/Own stage!", "verl.my.own_stage", "other", "none"),
    ],
)
def test_a_timer_is_a_stage(timer, span, stage, model_type):
    found = stage_of(timer)
    assert (found.span, found.stage, found.model_type) == (span, stage, model_type)


@given(any_text)
def test_any_timer_is_a_stage(timer):
    stage = stage_of(timer)
    assert re.fullmatch(r"verl\.[a-z0-9_.]*", stage.span)
    assert stage.stage in STAGES and stage.model_type in MODEL_TYPES
    assert stage == stage_of(timer)


def test_the_parts_of_a_trajectory_are_in_the_allowed_sets():
    assert {stage.stage for stage in TRAJECTORY_TIMERS.values()} <= STAGES
    assert {stage.model_type for stage in TRAJECTORY_TIMERS.values()} <= MODEL_TYPES

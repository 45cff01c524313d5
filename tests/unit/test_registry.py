"""`semconv/registry.yaml`: well-formed, complete, and what the document and Prometheus say of it."""

import re
from collections import Counter
from importlib import resources
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from verl_otel.semconv import attributes as attr
from verl_otel.semconv import document, registry, stages
from verl_otel.semconv.prometheus import prometheus_name

ROOT = Path(__file__).parents[2]
REAL_KEYS = (Path(__file__).parent / "data" / "metric_keys_gae_step.txt").read_text().split("\n")[:-1]
PROMETHEUS_NAMES = ROOT / "tests" / "e2e" / "data" / "prometheus_names.txt"

RAW = yaml.safe_load(resources.files("verl_otel.semconv").joinpath("registry.yaml").read_text())
REGISTRY = registry.load()
METRICS = list(REGISTRY.metrics.values())

LEVELS = {"basic", "detailed"}
INSTRUMENTS = {"gauge", "counter", "updowncounter", "histogram"}
MODULES = {
    *("trainer", "actor", "critic", "ref", "rollout", "reward", "advantage"),
    *("validation", "weight_sync", "server", "hardware", "telemetry"),
}
MODEL_TYPES = {"actor", "critic", "ref", "reward", "rollout", "teacher", "none"}
REDUCTIONS = {"mean", "max", "min", "sum", "last"}
ALWAYS = {attr.RANK, attr.STAGE, attr.MODEL_TYPE}
VERSIONS = re.compile(r"(>=|<)0\.\d+\.\d+(,<0\.\d+\.\d+)?")
UNIT = re.compile(r"(s|ms|min|By|MiBy|GiBy|J|W|Cel|Hz|%|1|\{[a-z_]+\}(/s)?|)")
GROUP = re.compile(r"\{([^{}]*\|[^{}]*)\}")
CAPTURE = re.compile(r"<([^<>*]+)(\*?)>")


def strings(node):
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, list):
        return [text for value in node for text in strings(value)]
    return [node] if isinstance(node, str) else []


def each(metrics=METRICS):
    return pytest.mark.parametrize("metric", metrics, ids=lambda metric: metric.name)


# ---- the file


@pytest.mark.parametrize("entry", RAW["metrics"], ids=lambda entry: entry["name"][:60])
def test_the_alternations_of_an_entry_are_expanded_in_parallel(entry):
    sizes = {len(group.split("|")) for text in strings(entry) for group in GROUP.findall(text)}
    assert len(sizes) <= 1
    assert bool(GROUP.search(entry["name"])) == bool(sizes), "metrics of one name"
    for text in (entry["level"], entry["module"], entry["stage"], entry["model_type"], entry["instrument"]):
        assert not GROUP.search(text)


def test_no_two_metrics_have_one_name():
    names = []
    for entry in RAW["metrics"]:
        group = GROUP.search(entry["name"])
        names += [GROUP.sub(way, entry["name"]) for way in group[1].split("|")] if group else [entry["name"]]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert set(names) == set(REGISTRY.metrics)


@pytest.mark.parametrize("listed", ["attributes", "spans", "events"])
def test_no_two_entries_have_one_name(listed):
    names = [entry["name"] for entry in RAW[listed]]
    assert len(names) == len(set(names)) > 0
    assert all(entry["brief"] for entry in RAW[listed])


def test_boundaries_go_up():
    for name, bounds in RAW["boundaries"].items():
        assert all(low < high for low, high in pairwise(bounds)), name


def test_a_reward_of_exactly_0_or_1_has_a_bucket_of_its_own():
    bounds = RAW["boundaries"]["reward"]
    assert bounds[bounds.index(0.0) - 1] == pytest.approx(0, abs=1e-5)
    assert bounds[bounds.index(1.0) - 1] == pytest.approx(1, abs=1e-5)


# ---- each metric


@each()
def test_a_metric_is_described_by_closed_sets(metric):
    assert re.fullmatch(r"(verl|hw|system|gen_ai)(\.[a-z0-9_]+)+", metric.name)
    assert metric.level in LEVELS
    assert metric.module in MODULES
    assert metric.instrument in INSTRUMENTS
    assert metric.stage in stages.STAGES
    assert metric.model_type in MODEL_TYPES
    assert UNIT.fullmatch(metric.unit), metric.unit
    assert metric.brief and not set("{}|") & set(metric.brief), metric.brief
    assert bool(metric.boundaries) == (metric.instrument == "histogram")


@each()
def test_a_metrics_attributes_are_declared(metric):
    for name in metric.attributes:
        assert "metric" in REGISTRY.attributes[name]["on"], name
    assert not ALWAYS & set(metric.attributes)
    assert len(metric.attributes) == len(set(metric.attributes))


@each([metric for metric in METRICS if metric.keys])
def test_the_keys_of_a_metric_say_all_its_attributes(metric):
    assert metric.instrument in ("gauge", "counter")
    assert attr.VERL_KEY not in metric.attributes, "said by having keys"
    for key in metric.keys:
        assert not set("{}|") & set(key.pattern)
        assert key.reduction in REDUCTIONS
        assert VERSIONS.fullmatch(key.versions), key.versions
        captured = {name for name, _ in CAPTURE.findall(key.pattern)}
        assert captured | set(key.set) - {attr.STAGE, attr.MODEL_TYPE} == set(metric.attributes), key.pattern
        assert not captured & set(key.set)
        assert key.set.get(attr.STAGE, metric.stage) in stages.STAGES
        assert key.set.get(attr.MODEL_TYPE, metric.model_type) in MODEL_TYPES
        assert all(isinstance(value, str) for value in key.set.values())


@each([metric for metric in METRICS if not metric.keys and metric.module != "telemetry"])
def test_what_has_no_key_of_verl_says_where_it_comes_from(metric):
    measured = {
        "verl.stage.",
        "verl.worker.",
        "verl.step.last_timestamp",
        "verl.process.",
        "verl.run.",
        "hw.",
        "system.",
    }
    assert "verl-otel" in metric.brief or any(metric.name.startswith(name) for name in measured)


def test_ranks_report_loss_gradient_norm_and_learning_rate_themselves():
    assert {metric.name for metric in METRICS if metric.per_rank} == {
        "verl.loss",
        "verl.grad_norm",
        "verl.learning_rate",
    }


def test_basic_is_a_small_set_and_detailed_the_rest():
    levels = Counter(metric.level for metric in METRICS)
    assert levels["detailed"] >= 37
    assert levels["basic"] <= 40


# ---- verl's keys


def test_each_key_feeds_exactly_one_gauge():
    keys = [key.pattern for metric in METRICS if metric.instrument == "gauge" for key in metric.keys]
    assert [key for key, count in Counter(keys).items() if count > 1] == []
    of_counters = {key.pattern for metric in METRICS if metric.instrument == "counter" for key in metric.keys}
    assert of_counters <= set(keys)


def example_of(pattern):
    return CAPTURE.sub(lambda match: "a/b" if match[2] else "c", pattern)


@pytest.mark.parametrize("metric", [metric for metric in METRICS if metric.keys], ids=lambda metric: metric.name)
def test_a_key_leads_to_its_metric_and_to_no_other_gauge(metric):
    for key in metric.keys:
        matches = REGISTRY.match(example_of(key.pattern))
        assert metric.name in [found.name for found, _ in matches]
        assert [found.instrument for found, _ in matches].count("gauge") == 1, key.pattern
        for found, attributes in matches:
            assert set(attributes) == {attr.STAGE, attr.MODEL_TYPE, *found.attributes}


@pytest.mark.parametrize("key", REAL_KEYS)
def test_a_key_of_a_real_step_is_known(key):
    assert [metric.instrument for metric, _ in REGISTRY.match(key)].count("gauge") == 1


def match(key):
    ((metric, attributes),) = REGISTRY.match(key)
    return metric.name, attributes


@pytest.mark.parametrize(
    ("key", "section", "source", "variable", "metric", "n", "statistic"),
    [
        ("val-core/gsm8k/acc/mean@16", "true", "gsm8k", "acc", "mean", "16", "none"),
        ("val-core/openai/gsm8k/acc/best@4/mean", "true", "openai/gsm8k", "acc", "best", "4", "mean"),
        ("val-aux/a/b/c/reward/maj@2/std", "false", "a/b/c", "reward", "maj", "2", "std"),
        ("val-aux/tiny/arith/reward/mean@1", "false", "tiny/arith", "reward", "mean", "1", "none"),
    ],
)
def test_a_validation_score_is_taken_apart_from_the_right(key, section, source, variable, metric, n, statistic):
    name, attributes = match(key)
    assert name == "verl.validation.score"
    assert attributes == {
        "stage": "validation",
        "model_type": "rollout",
        "verl.validation.core": section,
        "verl.validation.data_source": source,
        "verl.validation.variable": variable,
        "verl.validation.metric": metric,
        "verl.validation.n": n,
        "verl.validation.statistic": statistic,
    }


@pytest.mark.parametrize(
    ("key", "name", "option"),
    [
        ("rollout_rs_seq_max", "sequence.max", "none"),
        ("rollout_rs_seq_max_deviation", "sequence.max_deviation", "none"),
        ("rollout_rs_token_k1_max", "max", "token_k1"),
        ("rollout_rs_token_k1_seq_max", "sequence.max", "token_k1"),
        ("rollout_rs_seq_max_k2_max", "max", "seq_max_k2"),
        ("rollout_rs_seq_mean_k3_seq_masked_fraction", "masked.sequences", "seq_mean_k3"),
    ],
)
@pytest.mark.parametrize(("prefix", "stage"), [("rollout_corr/", "rollout"), ("actor/rollout_corr/", "update")])
def test_the_option_of_rejection_sampling_is_told_from_the_statistic(prefix, stage, key, name, option):
    found, attributes = match(prefix + key)
    assert found == f"verl.rollout_correction.rejection.{name}"
    assert (attributes["stage"], attributes["verl.rollout_correction.option"]) == (stage, option)


@pytest.mark.parametrize(
    ("key", "unit"),
    [
        ("timing_s/gen", "s"),
        ("timing_s/agent_loop/slowest/generate_sequences", "s"),
        ("timing_s/timing_s/param_sync", "s"),
        ("timing_s/agent_loop/num_preempted/mean", "{preemption}"),
        ("timing_s/agent_loop/slowest/num_preempted", "{preemption}"),
        ("timing_s/agent_loop/slowest/response_length", "{token}"),
        ("timing_s/agent_loop/slowest/prompt_length", "{token}"),
        ("timing_s/generation_timing/topk_ratio", ""),
    ],
)
def test_not_everything_among_the_timings_is_seconds(key, unit):
    name, _ = match(key)
    assert REGISTRY.metrics[name].unit == unit
    assert (name == "verl.timing") == (unit == "s")


def test_the_kinds_of_kl_are_one_metric_told_apart_by_type():
    kinds = {
        "actor/reward_kl_penalty": "penalty",
        "actor/kl_loss": "loss",
        "actor/ppo_kl": "update",
        "rollout_corr/kl": "rollout",
    }
    for key, kind in kinds.items():
        name, attributes = match(key)
        assert (name, attributes["verl.kl.type"]) == ("verl.kl.divergence", kind)


@pytest.mark.parametrize(
    ("key", "gauge", "counter"),
    [
        ("perf/total_num_tokens", "verl.step.tokens", "verl.training.tokens"),
        ("train/global_tokens", "verl.step.tokens", "verl.training.tokens"),
        ("training/rollout_failure/evicted_samples", "verl.rollout.evicted", "verl.rollout.evictions"),
        (
            "validation/filter_groups/discarded_surplus_samples",
            "verl.rollout.surplus",
            "verl.rollout.surplus.discarded",
        ),
    ],
)
def test_what_can_be_summed_up_is_counted_besides(key, gauge, counter):
    assert {metric.name: metric.instrument for metric, _ in REGISTRY.match(key)} == {gauge: "gauge", counter: "counter"}


@pytest.mark.parametrize("key", ["", "my/own/metric", "actor/pg_loss/x", "gdpo/mean", "val-core/a/b", "timing_s/"])
def test_another_key_is_not_known(key):
    assert REGISTRY.match(key) == []


# ---- attributes, spans, events


def test_every_constant_is_listed():
    listed = {*REGISTRY.attributes, *REGISTRY.spans, *REGISTRY.events}
    constants = {name: value for name, value in vars(attr).items() if name.isupper() and isinstance(value, str)}
    for name, value in constants.items():
        if name.endswith("_PREFIX"):
            assert any(found.startswith(value) for found in listed), name
        elif name.startswith("EVENT_"):
            assert value in REGISTRY.events, name
        elif name.startswith("SPAN_"):
            assert value in REGISTRY.spans, name
        elif name not in ("ALL_RANKS", "SERVICE_DOCTOR"):  # values
            assert value in REGISTRY.attributes, name


def test_attributes_of_spans_and_events_are_declared():
    for kind, entries in (("span", REGISTRY.spans), ("event", REGISTRY.events)):
        for entry in entries.values():
            for name in entry["attributes"]:
                assert kind in REGISTRY.attributes[name]["on"], (entry["name"], name)


def test_an_attribute_says_its_type_and_where_it_is():
    used = {
        "metric": ALWAYS.union({attr.VERL_KEY}, *(metric.attributes for metric in METRICS)),
        "span": {name for entry in REGISTRY.spans.values() for name in entry["attributes"]},
        "event": {name for entry in REGISTRY.events.values() for name in entry["attributes"]},
    }
    python = {"string": str, "int": int, "double": float, "boolean": bool, "string[]": list}
    for attribute in REGISTRY.attributes.values():
        assert attribute["on"] and set(attribute["on"]) <= {"resource", *used}
        assert attribute["examples"]
        assert all(type(example) is python[attribute["type"]] for example in attribute["examples"]), attribute["name"]
        for where in set(attribute["on"]) - {"resource"}:
            assert attribute["name"] in used[where], (attribute["name"], where)


TIMERS = (
    *("step", "gen", "gen_max", "generate_async", "wait_for_enough_samples", "reward", "old_log_prob", "ref", "values"),
    *("adv", "update_actor", "update_critic", "update_weights", "save_checkpoint", "testing"),
)


def test_the_spans_of_stages_are_listed():
    spans = {stages.stage_of(timer).span for timer in TIMERS} | {stages.SETUP.span}
    spans |= {stage.span for stage in stages.TRAJECTORY_TIMERS.values()}
    assert spans <= set(REGISTRY.spans)


# ---- the document


def test_usual_names_lead_to_metrics_or_say_why_not():
    assert len(REGISTRY.usual_names) >= 16
    for usual in REGISTRY.usual_names:
        assert set(usual["metrics"]) <= set(REGISTRY.metrics), usual
        assert usual["metrics"] or usual["note"]


def test_the_document_is_up_to_date():
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert text == document.document(REGISTRY), "python -m verl_otel.semconv.document > docs/metrics.md"


def test_each_metric_is_in_the_document_once():
    text = document.document(REGISTRY)
    for name in REGISTRY.metrics:
        assert text.count(f"\n| `{name}` |") == (2 if name in {*REGISTRY.spans, *REGISTRY.events} else 1), name


# ---- Prometheus


def in_prometheus(metric):
    """All names that a metric's series have there."""
    name = prometheus_name(metric.name, metric.unit, metric.instrument)
    return [name + end for end in ("_bucket", "_count", "_sum")] if metric.instrument == "histogram" else [name]


def test_names_in_prometheus_are_unique_and_legal():
    names = [name for metric in METRICS for name in in_prometheus(metric)]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("training/global_step", "verl_training_step"),
        ("critic/score/mean", "verl_reward_mean"),
        ("actor/reward_kl_penalty", "verl_kl_divergence"),
        ("actor/kl_loss", "verl_kl_divergence"),
        ("actor/ppo_kl", "verl_kl_divergence"),
        ("rollout_corr/kl", "verl_kl_divergence"),
    ],
)
def test_the_names_of_the_contract_are_exact(key, name):
    ((metric, _),) = REGISTRY.match(key)
    assert (in_prometheus(metric), metric.instrument, metric.unit) == ([name], "gauge", "")


@pytest.mark.parametrize(
    ("name", "unit", "instrument", "wanted"),
    [
        ("a.b", "", "gauge", "a_b"),
        ("a.b", "{token}", "gauge", "a_b"),
        ("a.b", "{token}/s", "gauge", "a_b_per_second"),
        ("a.b", "By/s", "gauge", "a_b_bytes_per_second"),
        ("a.b", "s", "histogram", "a_b_seconds"),
        ("a.seconds.b", "s", "gauge", "a_seconds_b"),
        ("a.b", "ms", "gauge", "a_b_milliseconds"),
        ("a.b", "GiBy", "gauge", "a_b_gibibytes"),
        ("a.b", "J", "counter", "a_b_joules_total"),
        ("a.b", "%", "gauge", "a_b_percent"),
        ("a.b", "parsec", "gauge", "a_b_parsec"),
        ("a.b", "1", "gauge", "a_b_ratio"),
        ("a.b", "1", "counter", "a_b_total"),
        ("a.b", "1", "histogram", "a_b"),
        ("a.ratio.b", "1", "gauge", "a_b_ratio"),
        ("a.clip_ratio", "1", "gauge", "a_clip_ratio"),
        ("a.clip_ratio", "", "gauge", "a_clip_ratio"),
        ("a.total.b", "{token}", "counter", "a_b_total"),
        ("a.total", "By", "gauge", "a_total_bytes"),
        ("a..b__c-d", "", "gauge", "a_b_c_d"),
        ("9lives", "", "gauge", "_9lives"),
        ("a:b", "", "gauge", "a:b"),
    ],
)
def test_a_name_in_prometheus(name, unit, instrument, wanted):
    assert prometheus_name(name, unit, instrument) == wanted


def test_names_in_prometheus_are_those_that_a_real_prometheus_gave():
    """The file is written by tests/e2e/test_metric_names.py."""
    golden = dict(line.split(" ") for line in PROMETHEUS_NAMES.read_text().splitlines())
    ours = {metric.name: prometheus_name(metric.name, metric.unit, metric.instrument) for metric in METRICS}
    assert ours == golden

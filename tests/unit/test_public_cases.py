"""What goes wrong for people who run such jobs, from public threads: one test for each case, with its own input.

V: verl's tracking. O: OpenTelemetry for Python. C: Collector and Prometheus. (G, GPUs: `test_hardware.py`.)
"""

import gc
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
from decimal import Decimal
from pathlib import Path

import numpy
import pytest
import torch
import yaml
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

import verl_otel
from verl_otel import telemetry
from verl_otel.identity import Identity
from verl_otel.metrics import ranks as ranks_module
from verl_otel.metrics.ranks import Called
from verl_otel.semconv import metrics as names
from verl_otel.semconv.prometheus import prometheus_name
from verl_otel.semconv.registry import load

ROOT = Path(__file__).parents[2]
GOLDEN = dict(line.split() for line in (ROOT / "tests/e2e/data/prometheus_names.txt").read_text().splitlines())
LEGAL = re.compile(r"[a-zA-Z][-_./a-zA-Z0-9]{0,254}")


@pytest.fixture
def process(memory):
    return memory.process()


def metrics_of(memory):
    """What is exported now: (name, unit, type, points) of each metric."""
    memory.settle()
    data = memory._reader.get_metrics_data()
    return [
        (metric.name, metric.unit, type(metric.data).__name__, list(metric.data.data_points))
        for of_resource in data.resource_metrics
        for of_scope in of_resource.scope_metrics
        for metric in of_scope.metrics
    ]


def series_in_prometheus(memory):
    """verl's key -> the series that it is in Prometheus: a name and labels."""
    found = {}
    for name, unit, kind, points in metrics_of(memory):
        in_prometheus = prometheus_name(name, unit, {"Sum": "counter"}.get(kind, kind.lower()))
        for point in points:
            if "verl.key" in point.attributes and name != "verl.metric.skipped":
                labels = tuple(sorted((re.sub(r"\W", "_", k), v) for k, v in point.attributes.items()))
                found.setdefault(point.attributes["verl.key"], []).append((in_prometheus, labels))
    return found


def steps_of(memory):
    return [(e.attributes.get("verl.step.number"), dict(e.body)) for e in memory.events if e.event_name == "verl.step"]


def launch(scripts_and_folders, **environ):
    """Run scripts at the same time, as processes that record to files; returns their exit codes."""
    environ = {
        **os.environ,
        "VERL_OTEL_RUN_ID": "run-1",
        "OTEL_METRICS_EXPORTER": "verl_otel_file",
        "OTEL_METRIC_EXPORT_INTERVAL": "3600000",
        **environ,
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            env={**environ, "VERL_OTEL_FOLDER": str(folder)},
            stderr=subprocess.DEVNULL,
        )
        for script, folder in scripts_and_folders
    ]
    return [process.wait(60) for process in running]


def recorded(folder, signal):
    """(resource, scope) of each request of a signal in a folder; `signal` as in OTLP: Metrics, Logs, Spans."""
    for file in folder.rglob("*.jsonl"):
        for line in file.read_text().splitlines():
            for of_resource in json.loads(line).get(f"resource{signal}", ()):
                attributes = {a["key"]: a["value"].get("stringValue") for a in of_resource["resource"]["attributes"]}
                for of_scope in of_resource[f"scope{signal}"]:
                    yield attributes, of_scope


# ---- V --------------------------------------------------------------------------------------------------------------


def test_v1_keys_that_back_ends_reject_are_renamed_and_do_not_collide(process, memory, caplog):
    """V1: validation keys such as `val-aux/x/reward/mean@1` were rejected, and the logging call raised."""
    keys = [
        *("val-core/math/acc/mean@8", "val-core/math/acc/best@8/std", "val/中文", "1x", "long/" + "k" * 295),
        *("a/b", "a_b", "timing(s)/gen", "val-aux/x/reward/mean@1"),
    ]
    data = {key: float(number) for number, key in enumerate(keys, 1)}
    process.log(dict(data), 1)
    assert steps_of(memory) == [(1, data)]
    found = series_in_prometheus(memory)
    assert set(found) == set(keys)
    assert all(len(series) == 1 for series in found.values())
    assert len({series[0] for series in found.values()}) == len(keys)
    for name, *_ in metrics_of(memory):
        assert LEGAL.fullmatch(name)
    (mean,) = [p for p in memory.points("verl.validation.score") if p.attributes["verl.key"] == keys[0]]
    assert mean.value == 1.0
    split = {"verl.validation.data_source": "math", "verl.validation.variable": "acc"}
    assert split.items() <= dict(mean.attributes).items()
    assert "8" in mean.attributes.values()
    assert caplog.records == []


ENDINGS = {"the end": "", "an exception": "1 / 0", "sys.exit": "sys.exit(1)", "Ctrl-C": "raise KeyboardInterrupt"}


def test_v3_the_last_steps_metrics_are_delivered_however_the_process_ends(tmp_path):
    """V3: the final validation was printed but absent from the tracker, since only `__del__` flushed."""
    script = """
        import sys
        from verl_otel import telemetry
        telemetry.enable()
        t = telemetry.current()
        step = t.steps.enter("step")
        t.steps.leave(step)
        t.log({{"val-core/math/acc/mean@1": 0.5}}, 52)
        {}
    """
    codes = launch([(script.format(ending), tmp_path / name) for name, ending in ENDINGS.items()])
    assert codes[:3] == [0, 1, 1] and codes[3] in (1, -signal.SIGINT)  # where SIGINT is ignored, a plain failure
    for name in ENDINGS:
        bodies = [
            record["body"]
            for _, of_scope in recorded(tmp_path / name, "Logs")
            for record in of_scope["logRecords"]
            if record.get("eventName") == "verl.step"
        ]
        (value,) = bodies[0]["kvlistValue"]["values"]
        assert (len(bodies), value["key"], value["value"]["doubleValue"]) == (1, "val-core/math/acc/mean@1", 0.5), name
        metrics = [m["name"] for _, of_scope in recorded(tmp_path / name, "Metrics") for m in of_scope["metrics"]]
        assert "verl.validation.score" in metrics, name
        spans = [span["name"] for _, of_scope in recorded(tmp_path / name, "Spans") for span in of_scope["spans"]]
        assert spans == ["verl.step"], name


class Followed:
    """verl's trainer."""

    def __init__(self, step):
        self.global_steps = step


def test_v6_what_is_made_in_one_sync_window_and_logged_in_the_next_is_of_the_first(memory, new_memory, monkeypatch):
    """V6: in async training metrics were logged one window late, against another step than theirs."""
    trainer, of_agent = memory.process("trainer"), new_memory()
    agent = of_agent.process("agent_loop")
    trainer.step_values.ask = lambda: Asked([agent.user.take()])
    followed = Followed(1)
    trainer.steps.follow(followed)
    for window in (1, 2):
        followed.global_steps = window
        trainer.steps.policy_version = window - 1
        step = trainer.steps.enter("step")
        if window == 2:
            # produced for window 1, finished in window 2
            monkeypatch.setattr(telemetry, "_current", agent)
            trajectory = agent.trajectories.enter(1, 0, 0, False)
            verl_otel.log_scalar("agent/turns", 3.0)
            agent.trajectories.leave(trajectory)
        trainer.steps.leave(step)
        trainer.log({"window": window}, window)
        memory.settle()
    steps = [span for span in memory.spans if span.name == "verl.step"]
    assert [(s.attributes["verl.step.number"], s.attributes["verl.policy.version"]) for s in steps] == [(1, 0), (2, 1)]
    (trajectory,) = of_agent.spans
    assert trajectory.attributes["verl.step.number"] == 1
    assert trajectory.context.trace_id == steps[0].context.trace_id
    assert steps_of(memory) == [(1, {"window": 1}), (2, {"window": 2}), (1, {"agent/turns": 3.0})]


class Asked:
    def dead(self):
        return False

    def __init__(self, answers):
        self._answers = answers

    def ready(self):
        return True

    def get(self):
        answers, self._answers = self._answers, []
        return answers


BAD = {"actor/grad_norm": math.nan, "actor/kl_loss": math.inf, "actor/pg_loss": 0.1}
GOOD = {"actor/grad_norm": 1.5, "actor/kl_loss": 0.25, "actor/pg_loss": 0.2}


def run_with_bad_steps(memory):
    """A good step, three bad ones and a good one; what the gauges showed after each, and the process."""
    process, shown = memory.process(), []
    followed = Followed(0)
    process.steps.follow(followed)
    for number, data in enumerate((GOOD, BAD, BAD, BAD, GOOD)):
        followed.global_steps = number
        step = process.steps.enter("step")
        process.log(dict(data), number)
        process.steps.leave(step)
        gauges = ("verl.grad_norm", "verl.kl.divergence", "verl.policy.loss")
        shown.append({name: value for name in gauges for value in memory.values(name).values()})
    return shown


SHOWN_GOOD = {"verl.grad_norm": 1.5, "verl.kl.divergence": 0.25, "verl.policy.loss": 0.2}


def test_v9_a_metric_that_turns_nan_is_visible_at_once_and_hides_its_last_good_value(memory):
    """V9: the gradient's norm or a KL turned NaN, and the last good value went on being shown."""
    shown = run_with_bad_steps(memory)
    assert shown == [SHOWN_GOOD, *[{"verl.policy.loss": 0.1}] * 3, SHOWN_GOOD]
    assert memory.values("verl.metric.non_finite", "metric", "verl.key", "rank") == {
        ("verl.grad_norm", "actor/grad_norm", "all"): 3,
        ("verl.kl.divergence", "actor/kl_loss", "all"): 3,
    }
    spans = [span for span in memory.spans if span.name == "verl.step"]
    on_spans = [[(e.attributes["metric"], e.attributes["verl.value"]) for e in span.events] for span in spans]
    assert on_spans == [[], *[[("verl.grad_norm", "nan"), ("verl.kl.divergence", "inf")]] * 3, []]
    events = [event for event in memory.events if event.event_name == "verl.non_finite"]
    assert [event.attributes["verl.step.number"] for event in events] == [1, 1, 2, 2, 3, 3]
    assert {event.severity_text or event.severity_number.name for event in events} == {"WARN"}
    bodies = [body for _, body in steps_of(memory)]
    assert math.isnan(bodies[1]["actor/grad_norm"]) and bodies[1]["actor/kl_loss"] == math.inf


def test_v21_values_are_numbers_or_are_counted_as_skipped_by_kind(process, memory):
    """V21: a bundle of tracker bugs: numpy types, tensors, tables."""
    values = (
        *(numpy.float32(0.5), numpy.int64(7), torch.tensor(1.0), torch.tensor([1, 2]), True),
        *(None, "x", [], {"a": 1}, Decimal("0.25")),
    )
    process.log({f"k{number}": value for number, value in enumerate(values)}, 1)
    ((_, body),) = steps_of(memory)
    assert body == {"k0": 0.5, "k1": 7, "k2": 1.0, "k4": 1, "k9": 0.25}
    assert {type(value) for value in body.values()} == {float, int}
    assert memory.values("verl.metric.skipped", "verl.key", "verl.value.kind") == {
        **{("k3", "array"): 1, ("k5", "none"): 1, ("k6", "text"): 1, ("k7", "array"): 1, ("k8", "mapping"): 1}
    }


def test_v22_a_key_that_is_the_beginning_of_another_does_not_collide_with_it(process, memory):
    """V22: `a` and `a/b` collide in MLflow's file store; in Prometheus `a/b` and `a_b` do, but for the label."""
    keys = ["timing/train", "timing/train/x", "a_b", "a/b", "timing_train_x", "timing/train_x"]
    process.log({key: float(number) for number, key in enumerate(keys)}, 1)
    found = series_in_prometheus(memory)
    assert set(found) == set(keys)
    assert len({series for of_key in found.values() for series in of_key}) == len(keys)
    own_names = {name for name, *_ in metrics_of(memory)} - set(GOLDEN)
    assert len(own_names) == len(keys)
    assert steps_of(memory) == [(1, {key: float(number) for number, key in enumerate(keys)})]


# ---- O --------------------------------------------------------------------------------------------------------------


def test_o1_one_nan_does_not_poison_counters_and_histograms(memory, caplog):
    """O1: before SDK 1.44 one NaN stayed in a counter for ever; from 1.44 on it is dropped with a warning each time."""
    shown = run_with_bad_steps(memory)
    assert shown[-1] == SHOWN_GOOD
    process = memory.process()
    tokens = {"perf/total_num_tokens": 100}
    for number, value in enumerate((100, math.nan, math.inf, 50)):
        process.log({**tokens, "perf/total_num_tokens": value}, number)
    labels = {"rank": "all", "stage": "reward", "model_type": "reward"}
    for values in ([1.0, math.nan], [math.inf], [2.0]):
        process.instruments.record_all(names.REWARD_SCORE, labels, numpy.asarray(values))
    assert memory.values("verl.training.tokens") == {(): 150}
    (histogram,) = memory.points("verl.reward.score")
    assert (histogram.count, histogram.sum, histogram.max) == (2, 3.0, 2.0)
    for _, _, _, points in metrics_of(memory):
        for point in points:
            assert math.isfinite(getattr(point, "value", None) or getattr(point, "sum", 0))
    assert caplog.records == []  # it is counted, not warned of by the SDK


def test_o4_processes_with_one_environment_are_told_apart(tmp_path):
    """O4: several workers shared one resource: counters jumped and sums were wrong."""
    script = """
        from verl_otel import telemetry
        from verl_otel.semconv import metrics as names
        telemetry.enable()
        t = telemetry.current()
        t.instruments.add(names.GENERATED_TOKENS, {"rank": "all", "stage": "rollout", "model_type": "rollout"}, 1)
        t.close()
    """
    codes = launch(
        [(script, tmp_path)] * 4,
        OTEL_RESOURCE_ATTRIBUTES="service.instance.id=pod-1,team=rl",
        OTEL_SERVICE_NAME="mine",
        RANK="0",
    )
    assert codes == [0, 0, 0, 0]
    last = {}
    for resource, of_scope in recorded(tmp_path, "Metrics"):
        for metric in of_scope["metrics"]:
            if metric["name"] == "verl.rollout.generated_tokens":
                (point,) = metric["sum"]["dataPoints"]
                last[resource["service.instance.id"]] = float(point.get("asInt", point.get("asDouble")))
                assert (resource["team"], resource["service.name"]) == ("rl", "mine")
    assert len(last) == 4
    assert sum(last.values()) == 4
    assert all(instance.startswith("pod-1") for instance in last)


def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


ALLOWED = {
    *("rank", "stage", "model_type", "verl.key", "metric", "verl.timer", "verl.worker.method", "verl.kl.type"),
    *("verl.value.kind", "verl.otel.signal", "verl.otel.reason", "verl.otel.outcome", "verl.otel.site"),
}


def test_o9_after_many_steps_of_many_ranks_series_and_memory_are_as_few_as_at_the_beginning(new_memory):
    """O9: unbounded attribute sets grew memory to 3 GB in 15 days; newer SDKs fold them into an overflow series."""
    memory = new_memory(sampler=ALWAYS_OFF)
    process, followed = memory.process("trainer"), Followed(0)
    process.steps.follow(followed)

    class Rank:
        rank = 0

    labels = [
        {
            **{"rank": str(rank), "stage": "update", "model_type": "actor"},
            **{"verl.key": "actor/loss", "verl.worker.method": "update_actor"},
        }
        for rank in range(64)
    ]
    series = [ranks_module.series_of_rank(names.LOSS, of_rank) for of_rank in labels]

    def run(first, last):
        for number in range(first, last):
            followed.global_steps = number
            step = process.steps.enter("step")
            for rank in range(64):
                process.instruments.set(names.LOSS, series[rank], float(number))
            Rank.rank = number % 64
            call = process.workers.enter(Rank(), "update_actor")
            process.workers.note("loss", [1.0])
            process.workers.leave(call)
            if number % 20 == 0:  # statistics over all ranks, as for a stage
                stage = process.steps.enter("update_actor")
                for rank, of_rank in enumerate(labels):
                    report = [(str(rank), of_rank, {"loss": 1.0, "duration": 1.0 + rank}, 0)]
                    call = Called(str(rank), "update_actor", 1)
                    process.ranks.called(stage.id, rank, call, lambda report=report: Asked([(report, [])]))
                process.steps.leave(stage)
            process.log({"actor/pg_loss": 1.0, "critic/score/mean": 0.5, "timing_s/step": 1.0, "mine": number}, number)
            process.steps.leave(step)
            if number % 100 == 99:
                memory.settle()
                memory._logs.clear()
                memory._spans.clear()

    def found():
        return {
            (name, tuple(sorted(p.attributes.items())))
            for name, _, _, points in metrics_of(memory)
            for p in points
            if not name.startswith("verl.otel.")  # of other tests' endpoints too
        }

    run(0, 1000)
    before, bytes_before = found(), resident()
    run(1000, 10_000)
    after, grown = found(), resident() - bytes_before
    assert len(before) > 100
    assert after == before
    assert {name for _, attributes in after for name, _ in attributes} <= ALLOWED
    assert not any("9999" in value for _, attributes in after for _, value in attributes)
    assert grown < 16 * 2**20  # a hundred bytes for each point would be 55 MiB; test_memory.py is exact


# ---- C --------------------------------------------------------------------------------------------------------------


def promoted(resource):
    """A resource as labels in Prometheus: job, instance, and what its configuration promotes."""
    wanted = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())
    names_of_promoted = wanted["otlp"]["promote_resource_attributes"]
    labels = {name: str(resource[name]) for name in names_of_promoted if name in resource}
    job = f"{resource['service.namespace']}/{resource['service.name']}"
    return tuple(sorted({**labels, "job": job, "instance": resource["service.instance.id"]}.items()))


@pytest.mark.parametrize("users", [None, "service.instance.id=pod-1,host.name=node"])
def test_c1_no_two_processes_have_the_same_labels(new_memory, monkeypatch, users):
    """C1: "was collected before with the same name and label values": 8 ranks x 2 nodes, alike in all else."""
    if users is not None:
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", users)
    found, losses = [], 0
    for _ in range(2):  # nodes
        for rank in range(8):
            memory = new_memory()
            identity = dict(role="worker", worker_index=str(rank), worker_group="WorkerDict", experiment="e")
            resource = Identity("run-1", 1, **identity).resource().attributes
            process = memory.process(**identity)

            class Rank:
                pass

            worker = Rank()
            worker.rank = rank
            call = process.workers.enter(worker, "update_actor")
            process.workers.note("loss", [1.0])
            process.workers.leave(call)
            for name, _, _, points in metrics_of(memory):
                losses += name == "verl.loss"
                found += [(name, promoted(resource), tuple(sorted(p.attributes.items()))) for p in points]
    assert losses == 16
    assert len(set(found)) == len(found)
    # and the point's own labels tell the ranks apart within a run
    assert len({attributes for name, _, attributes in found if name == "verl.loss"}) == 8


def test_c4_each_metric_has_the_name_in_prometheus_that_is_published(process, memory):
    """C4: units and types add suffixes, and names differ from the documents'."""
    keys = [key.pattern for metric in load().metrics.values() for key in metric.keys if "<" not in key.pattern]
    process.log({key: 1.5 for key in keys}, 1)
    exported = {
        name: prometheus_name(name, unit, {"Sum": "counter"}.get(kind, kind.lower()))
        for name, unit, kind, _ in metrics_of(memory)
    }
    assert len(exported) > 100
    assert exported == {name: GOLDEN[name] for name in exported}
    for name in ("verl_training_step", "verl_reward_mean", "verl_kl_divergence"):
        assert name in exported.values()
    assert len(set(GOLDEN.values())) == len(GOLDEN)


def test_c5_a_key_that_is_first_an_integer_and_then_a_float_has_one_type(process, memory, caplog):
    """C5: one name with two types: a key seen first as an integer count, then as a float."""
    keys = ("mine/count", "perf/total_num_tokens")
    for number, value in enumerate((3, 3.5, numpy.int64(4))):
        process.log({key: value for key in keys}, number)
    types = {}
    for name, unit, kind, _ in metrics_of(memory):
        types.setdefault(prometheus_name(name, unit, "gauge").removesuffix("_total"), set()).add((name, kind))
    assert all(len(found) == 1 for found in types.values())
    assert memory.values("verl.mine.count") == {(): 4}
    assert memory.values("verl.training.tokens") == {(): 10.5}
    assert "already been created" not in caplog.text

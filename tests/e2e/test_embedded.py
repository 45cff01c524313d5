"""The main job with nothing configured: recorded in files, and on a page."""

import json
from collections import Counter

import bed
import pytest
from trees import assert_complete_ppo_step, assert_trajectories, orphans, root, step_traces, traces

from verl_otel.recording import reader
from verl_otel.version import __version__

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def plain(plain_run):
    return reader.load(plain_run.telemetry)


def test_every_process_of_verl_loads_us_exactly_once(plain_run):
    """Each process says once, as a metric, that it joined the run; but for the launcher, which is there before."""
    joined = Counter()
    for path in plain_run.telemetry.glob("*.metrics.jsonl"):
        times = set()
        for line in path.read_text().splitlines():
            for group in json.loads(line)["resourceMetrics"]:
                resource = reader.attributes_of(group["resource"]["attributes"])
                for metric in (m for scope in group["scopeMetrics"] for m in scope["metrics"]):
                    if metric["name"] == "verl.process.start_time":
                        times |= {point["asDouble"] for point in metric["gauge"]["dataPoints"]}
        if resource["verl.process.role"] == "launcher":
            continue
        assert len(times) == 1, path
        joined[resource["verl.process.role"], resource["verl.worker.group"]] += 1
    assert joined + Counter({("launcher", ""): 1}) == bed.PROCESSES
    assert len({path.name.split(".")[0] for path in plain_run.telemetry.glob("launcher-*")}) == 1


def test_one_trace_for_each_step_with_stages_and_ranks(plain):
    steps = step_traces(plain.spans)
    assert sorted(steps) == [1, 2, 3, 4]
    for number, trace in steps.items():
        stages = {s.name: s for s in trace if s.parent_id == root(trace).span_id}
        assert list(dict.fromkeys(s for s in stages if s != "verl.validation")) != []
        calls = Counter((s.name, s.attributes["rank"]) for s in trace if s.name.startswith("verl.worker."))
        assert calls == {
            (call, rank): 1
            for call in ("verl.worker.compute_log_prob", "verl.worker.update_actor", "verl.worker.update_weights")
            for rank in ("0", "1")
        }
        assert root(trace).attributes["verl.policy.version"] == number - 1
        assert_trajectories(trace)


def test_no_span_is_an_orphan_and_no_trace_is_unexpected(plain):
    found = {root(trace).name: orphans(trace) for trace in traces(plain.spans).values()}
    assert found == {"verl.run": [], "verl.validation": [], "verl.step": []}


def test_set_up_and_validation_before_training_are_visible(plain):
    names = {(s.name, s.attributes.get("rank")) for s in plain.spans}
    assert ("verl.setup", "all") in names and ("verl.worker.init_model", "1") in names
    (before,) = [t for t in traces(plain.spans).values() if root(t).name == "verl.validation"]
    assert root(before).attributes["verl.step.number"] == 0


def test_step_events_are_what_verl_printed(plain, plain_run):
    printed = plain_run.printed()
    events = plain.step_values()
    assert sorted(events) == [0, 1, 2, 3, 4]
    verls = {step: sorted(key for key in body if not key.startswith("verl.")) for step, body in events.items()}
    assert {step: sorted(keys) for step, keys in printed.items()} == verls
    assert len(printed[0]) > 5 and len(printed[1]) > 80
    for step, values in printed.items():
        assert {key: events[step][key] for key in values} == pytest.approx(values, rel=1e-12, nan_ok=True)


def test_the_run_starts_and_finishes_once(plain):
    assert [e.attributes["verl.run.state"] for e in plain.events_named("verl.run.finished")] == ["finished"]
    (started,) = plain.events_named("verl.run.started")
    assert started.body["algorithm.adv_estimator"] == "grpo"
    assert started.attributes["verl.project.name"] == "verl-otel"


def test_nothing_of_ours_is_complained_about(plain_run):
    complaints = [line for line in plain_run.output.splitlines() if "verl-otel: " in line or "Failed to detach" in line]
    assert complaints == []


def test_a_run_says_once_what_shows_it(plain_run):
    folder = plain_run.telemetry
    said = [line for line in plain_run.output.splitlines() if line.startswith("verl-otel ")]
    assert said == [f"verl-otel {__version__}: run {folder.name} is recorded: verl-otel report {folder}"]


def test_a_run_that_joins_an_older_cluster_has_the_same_trace(joined_run):
    recording = reader.load(joined_run.telemetry)
    steps = step_traces(recording.spans)
    assert sorted(steps) == [1, 2]
    for trace in steps.values():
        assert_complete_ppo_step(trace)
        assert_trajectories(trace)
    roots = Counter(root(trace).name for trace in traces(recording.spans).values())
    assert roots == {"verl.run": 1, "verl.validation": 1, "verl.step": 2}
    assert [line for line in joined_run.output.splitlines() if "verl-otel:" in line] == []


def test_a_failing_run_fails_as_without_us_and_says_where(tmp_path, fork_server):
    run = bed.run(
        tmp_path,
        [
            "grpo",
            *bed.FAST_SAMPLER,
            "trainer.val_before_train=False",
            "actor_rollout_ref.actor.policy_loss.loss_mode=no_such_loss",
        ],
        ranks=1,
        steps=1,
        fork_server=fork_server,
    )
    assert run.returncode == 1
    assert "no_such_loss" in run.output
    recording = reader.load(run.telemetry)
    failed = {span.name: span.error for span in recording.spans if span.error}
    assert failed.keys() == {"verl.worker.update_actor", "verl.update_actor", "verl.step"}
    assert all("no_such_loss" in error for error in failed.values())
    (finished,) = recording.events_named("verl.run.finished")
    assert finished.attributes["verl.run.state"] == "failed"

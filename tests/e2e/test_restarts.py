"""A rank that is killed, and a run that goes on from its checkpoint."""

import json
import re
import subprocess

import bed
import pytest
from asking import eventually, get, prometheus
from trees import root, traces

from verl_otel.recording import reader

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run in which rank 1 is killed in its second update."""
    run = bed.run(
        tmp_path_factory.mktemp("killed"),
        ["grpo", *bed.FAST_SAMPLER],
        environment={"MODULES": "verl_cpu.register,loss_fault", "LOSS_FAULT": "kill"},
    )
    assert run.returncode != 0
    return reader.load(run.telemetry)


def test_the_step_of_a_killed_rank_shows_rank_and_stage(killed):
    (dead,) = [s for s in killed.spans if s.attributes.get("verl.worker.unfinished") and s.attributes["rank"] == "1"]
    assert (dead.name, dead.error) == ("verl.worker.update_actor", "the process of this rank has died")
    by_id = {s.span_id: s for s in killed.spans}
    stage = by_id[dead.parent_id]
    assert stage.name == "verl.update_actor" and stage.error
    assert (stage.attributes["verl.ranks.dead"], stage.attributes["verl.ranks.dead_rank"]) == (1, 1)
    step = by_id[stage.parent_id]
    assert (step.name, step.attributes["verl.step.number"]) == ("verl.step", 2) and step.error
    assert 0 < dead.seconds < 120


def test_the_step_event_and_an_event_of_its_own_say_so_too(killed):
    assert killed.step_values()[2]["verl.ranks/update_actor/dead_rank"] == 1
    errors = {e.attributes["rank"]: e for e in killed.events_named("verl.worker.error")}
    assert errors["1"].attributes["verl.worker.method"] == "update_actor"
    (finished,) = killed.events_named("verl.run.finished")
    assert finished.attributes["verl.run.state"] == "failed"


def test_what_the_killed_rank_did_before_is_there(killed):
    """At most the last second is lost: the whole first step is recorded, with every call on rank 1."""
    (first,) = [t for t in traces(killed.spans).values() if root(t).attributes.get("verl.step.number") == 1]
    calls = {(s.name, s.attributes["rank"]) for s in first if s.name.startswith("verl.worker.")}
    assert {rank for name, rank in calls if name == "verl.worker.update_actor"} == {"0", "1"}
    assert {rank for name, rank in calls if name == "verl.worker.compute_log_prob"} == {"0", "1"}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, stack, fork_server):
    """Two steps with checkpoints, then two more from the last one. Nobody names the run."""
    folder = tmp_path_factory.mktemp("resumed")
    runs = []
    for attempt, steps in ((1, 2), (2, 4)):
        run = bed.run(
            folder / str(attempt),
            [
                "grpo",
                *bed.FAST_SAMPLER,
                "trainer.project_name=resumed",
                "trainer.save_freq=1",
                "trainer.test_freq=-1",
                "trainer.resume_mode=auto",
                f"trainer.default_local_dir={folder}/checkpoints",
            ],
            steps=steps,
            fork_server=fork_server,
            environment={"OTEL_EXPORTER_OTLP_ENDPOINT": stack.url("otlp_http")},
        )
        assert run.returncode == 0, run.output[-4000:]
        runs.append(run)
    return runs


@pytest.mark.stack
def test_a_resumed_run_is_the_same_run_in_its_next_attempt(stack, resumed):
    def ask():
        found = prometheus(stack, 'last_over_time(verl_training_step{verl_project_name="resumed"}[1h])')
        return found if len(found) == 2 else None

    series = [s["metric"] | {"step": s["value"][1]} for s in eventually(ask)]
    assert len({s["verl_run_id"] for s in series}) == 1
    assert {(s["verl_run_attempt"], s["step"]) for s in series} == {("1", "2"), ("2", "4")}


@pytest.mark.stack
def test_how_each_attempt_has_ended_is_in_prometheus(stack, resumed):
    def ask():
        found = prometheus(stack, 'last_over_time(verl_run_end_time_seconds{verl_project_name="resumed"}[1h])')
        return found if len(found) == 2 else None

    ends = [(s["metric"], float(s["value"][1])) for s in eventually(ask)]
    assert {(labels["verl_run_attempt"], labels["verl_run_state"]) for labels, _ in ends} == {
        ("1", "finished"),
        ("2", "finished"),
    }
    first, second = sorted(at for _, at in ends)
    assert second - first > 1


@pytest.mark.stack
def test_counters_of_attempts_are_series_of_their_own_and_their_sum_is_the_work_done(stack, resumed):
    def tokens(run):
        return sum(values.get("perf/total_num_tokens", 0) for values in run.printed().values())

    query = 'last_over_time(verl_training_tokens_total{verl_project_name="resumed"}[1h])'
    found = {s["metric"]["verl_run_attempt"]: float(s["value"][1]) for s in prometheus(stack, query)}
    assert found == {"1": tokens(resumed[0]), "2": tokens(resumed[1])}


@pytest.mark.stack
def test_mlflow_continues_the_run(stack, resumed):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(stack.url("mlflow"))
    experiment = client.get_experiment_by_name("resumed")

    def ask():
        runs = client.search_runs([experiment.experiment_id])
        ended = [r for r in runs if r.info.status == "FINISHED" and r.data.tags["verl.run.attempt"] == "2"]
        return runs if ended else None

    (run,) = eventually(ask)
    history = client.get_metric_history(run.info.run_id, "actor/loss")
    assert [m.step for m in history] == [1, 2, 3, 4]


# ---- the Collector is away from the second step on, and back after the end


@pytest.fixture(scope="module")
def without_collector(tmp_path_factory, stack, fork_server):
    def on_line(line):
        if "step:1 - " in line and stack.processes["collector"].alive():
            stack.kill("collector")

    run = bed.run(
        tmp_path_factory.mktemp("away"),
        [*bed.PPO_WITH_CRITIC_AND_REFERENCE, *bed.FAST_SAMPLER, "trainer.project_name=away"],
        fork_server=fork_server,
        on_line=on_line,
        environment={
            "OTEL_EXPORTER_OTLP_ENDPOINT": stack.url("otlp_http"),
            "OTEL_LOGS_EXPORTER": "otlp,verl_otel_file",
            "OTEL_TRACES_EXPORTER": "otlp,verl_otel_file",
            "VERL_OTEL_RUN_ID": "away-run",
        },
    )
    stack.kill("collector")  # a run that has failed early has not
    stack.restart("collector")
    assert run.returncode == 0, run.output[-4000:]
    return run


@pytest.fixture(scope="module")
def replayed(without_collector, stack):
    """What the command says, the first time and the second."""
    command = [
        *(bed.PYTHON.parent / "verl-otel", "replay", without_collector.telemetry),
        *("--endpoint", stack.url("otlp_http")),
    ]
    return [subprocess.run(command, capture_output=True, text=True, timeout=120) for _ in range(2)]


@pytest.mark.stack
def test_what_was_spooled_is_replayed_once(replayed):
    first, second = replayed
    assert first.returncode == 0, first.stderr
    sent = int(re.match(r"sent (\d+) items", first.stdout)[1])
    assert sent > 200
    assert "give --copies" in first.stdout  # what was sent while the Collector was there is recorded too
    assert second.stdout.startswith("sent 0 items in 0 requests; ")


@pytest.mark.stack
def test_after_the_replay_jaeger_has_every_span_that_was_recorded(stack, without_collector, replayed):
    recorded = {s.span_id for s in reader.load(without_collector.telemetry).spans}

    def ask():
        found = set()
        for trace_id in {s.trace_id for s in reader.load(without_collector.telemetry).spans}:
            for trace in get(f"{stack.url('jaeger')}/api/traces/{trace_id}")["data"]:
                found |= {span["spanID"] for span in trace["spans"]}
        return found if recorded <= found else None

    assert len(recorded) > 100
    assert eventually(ask) == recorded


@pytest.mark.stack
def test_after_the_replay_mlflow_has_every_step(stack, without_collector, replayed):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(stack.url("mlflow"))

    def ask():
        experiment = client.get_experiment_by_name("away")
        runs = client.search_runs([experiment.experiment_id]) if experiment else []
        return runs if runs and runs[0].info.status == "FINISHED" else None

    (run,) = eventually(ask)
    for key, values in (("actor/loss", [1, 2, 3]), ("critic/vf_loss", [1, 2, 3])):
        history = {m.step: m.value for m in client.get_metric_history(run.info.run_id, key)}
        assert sorted(history) == values
        assert history == {step: pytest.approx(without_collector.printed()[step][key]) for step in values}


STAGES = {"rollout", "log_prob", "ref_log_prob", "values", "advantage", "update_critic", "update_actor"}


@pytest.mark.stack
def test_the_report_of_a_run_without_its_collector_is_complete(without_collector, replayed, tmp_path):
    command = [bed.PYTHON.parent / "verl-otel", "report", without_collector.telemetry, "-o", tmp_path / "page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert "<span>State</span>finished<" in page and "<span>Steps</span>0 to 3<" in page
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    data = json.loads(data)

    assert [share["step"] for share in data["shares"]] == [1, 2, 3]
    for share in data["shares"]:
        assert {name for name, seconds in share["seconds"].items() if seconds > 0} >= STAGES
    timelines = {found["label"]: found for found in data["timelines"]}
    for step in (1, 2, 3):
        assert {"trainer", "rank 0", "rank 1", "trajectory 1"} <= set(timelines[f"step {step}"]["lanes"])
        assert {f"verl.{name}" for name in STAGES} <= {bar["name"] for bar in timelines[f"step {step}"]["bars"]}

    printed = without_collector.printed()
    assert sorted(printed) == [0, 1, 2, 3]
    for step, values in printed.items():
        shown = {key: dict(zip(curve["x"], curve["y"], strict=True)) for key, (curve,) in data["curves"].items()}
        assert {key: shown[key][step] for key in values} == pytest.approx(values)

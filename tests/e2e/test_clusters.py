"""Runs that are not alone or not by themselves: two on one cluster, one on two nodes, one as a job of Ray's."""

import json
import socket
import subprocess
import threading
import time
from collections import defaultdict

import bed
import pytest
from asking import eventually, prometheus
from trees import assert_complete_ppo_step, assert_trajectories, orphans, root, step_traces, traces

from verl_otel.recording import reader

pytestmark = [pytest.mark.run, pytest.mark.stack]

RUNS = ("first-run", "second-run")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def recorded_by(folder, metric):
    """The processes that have recorded a metric."""
    found = set()
    for path in folder.rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            for resource in json.loads(line).get("resourceMetrics", ()):
                names = {m["name"] for scope in resource["scopeMetrics"] for m in scope["metrics"]}
                attributes = {a["key"]: a["value"] for a in resource["resource"]["attributes"]}
                if metric in names:
                    found.add(attributes["service.instance.id"]["stringValue"])
    return found


# ---- two runs at the same time on one cluster


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory, stack, fork_server):
    """Two runs of one project and experiment on one cluster, at the same time, into one folder and one stack.

    With the legacy trainer: what the V1 trainer uses, TransferQueue 0.1, has one queue per cluster, into which two runs
    would put their samples together.
    """
    folder = tmp_path_factory.mktemp("two")
    found = {}

    def start(name):
        found[name] = bed.run(
            folder / name,
            [
                "grpo",
                *bed.FAST_SAMPLER,
                "trainer.use_v1=False",
                "trainer.val_before_train=False",
                "trainer.project_name=shared-cluster",
                "trainer.experiment_name=same",
            ],
            ranks=1,
            steps=4,
            cluster=address,
            fork_server=fork_server,
            environment={
                "OTEL_EXPORTER_OTLP_ENDPOINT": stack.url("otlp_http"),
                **{f"OTEL_{signal}_EXPORTER": "otlp,verl_otel_file" for signal in ("TRACES", "METRICS", "LOGS")},
                "VERL_OTEL_FOLDER": str(folder / "telemetry"),
                "VERL_OTEL_RUN_ID": name,
            },
        )

    with bed.cluster(free_port()) as address:
        threads = [threading.Thread(target=start, args=(name,)) for name in RUNS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for run in found.values():
        assert run.returncode == 0, run.output[-4000:]
    return folder / "telemetry", found


@pytest.fixture(scope="module")
def recordings(two_runs):
    telemetry, _ = two_runs
    assert {path.name for path in telemetry.iterdir()} == set(RUNS)
    return {name: reader.load(telemetry / name) for name in RUNS}


def test_they_ran_at_the_same_time(recordings):
    """Otherwise the tests below would say nothing."""
    (first, second) = ([s for s in recordings[name].spans if s.name == "verl.step"] for name in RUNS)
    assert max(s.start for s in first) > min(s.start for s in second)
    assert max(s.start for s in second) > min(s.start for s in first)


def test_each_has_its_own_whole_traces(recordings):
    for name in RUNS:
        spans = recordings[name].spans
        assert {s.resource["verl.run.id"] for s in spans} == {name}
        assert sorted(step_traces(spans)) == [1, 2, 3, 4]
        assert {root(trace).name for trace in traces(spans).values()} == {"verl.run", "verl.step"}
        assert [orphan for trace in traces(spans).values() for orphan in orphans(trace)] == []
    first, second = (traces(recordings[name].spans).keys() for name in RUNS)
    assert not first & second


def test_each_has_its_own_step_events_as_verl_printed_them(recordings, two_runs):
    _, found = two_runs
    for name in RUNS:
        assert {e.attributes["verl.run.id"] for e in recordings[name].events_named("verl.step")} == {name}
        bodies = recordings[name].step_values()
        printed = found[name].printed()
        assert sorted(bodies) == sorted(printed) == [1, 2, 3, 4]
        for step, values in printed.items():
            assert {key: bodies[step][key] for key in values} == pytest.approx(values, rel=1e-12, nan_ok=True)
    losses = [[recordings[name].events_named("verl.step")[0].body["timing_s/step"]] for name in RUNS]
    assert losses[0] != losses[1], "the runs can be told apart by what they have measured"


def test_their_processes_are_different_ones(recordings):
    instances = [{s.resource["service.instance.id"] for s in recordings[name].spans} for name in RUNS]
    assert len(instances[0]) >= 5 and len(instances[1]) >= 5
    assert not instances[0] & instances[1]


def test_prometheus_tells_their_series_apart_by_the_run(stack, two_runs):
    sent = '{verl_run_id=~"first-run|second-run",__name__!~"verl:.+|ALERTS.*"}'  # not what rules have made of it
    by_run = {}

    def steps():
        by_run.update({name: defaultdict(list) for name in RUNS})
        for found in prometheus(stack, f"last_over_time({sent}[15m])"):
            by_run[found["metric"]["verl_run_id"]][found["metric"]["__name__"]].append(found)
        return {run: [float(f["value"][1]) for f in names["verl_training_step"]] for run, names in by_run.items()}

    eventually(lambda: steps() == {name: [4.0] for name in RUNS})
    assert steps() == {name: [4.0] for name in RUNS}, "one series of the step for each run, and it is the run's own"
    names = [set(by_run[name]) for name in RUNS]
    assert names[0] == names[1] and len(names[0]) > 100
    instances = [{f["metric"]["instance"] for found in by_run[name].values() for f in found} for name in RUNS]
    assert not instances[0] & instances[1]


def test_neither_complains(two_runs):
    _, found = two_runs
    for run in found.values():
        assert [line for line in run.output.splitlines() if "verl-otel:" in line] == []


# ---- one run on two nodes


@pytest.fixture(scope="module")
def on_two_nodes(tmp_path_factory, fork_server):
    """A run with a rank on each of two nodes. The nodes are on one machine, and say who they are as pods do."""
    folder = tmp_path_factory.mktemp("nodes")
    nodes = [f"OTEL_RESOURCE_ATTRIBUTES=k8s.pod.name={pod},k8s.node.name={pod}-node" for pod in ("head", "second")]
    with bed.cluster(free_port(), nodes=nodes) as address:
        run = bed.run(
            folder,
            [
                "grpo",
                *bed.FAST_SAMPLER,
                "trainer.val_before_train=False",
                "trainer.nnodes=2",
                "trainer.n_gpus_per_node=1",
                "actor_rollout_ref.rollout.n_gpus_per_node=1",
            ],
            steps=2,
            cluster=address,
            fork_server=fork_server,
            environment={"OTEL_RESOURCE_ATTRIBUTES": "team=rl,k8s.pod.name=submitter,host.id=of-the-submitter"},
        )
    assert run.returncode == 0, run.output[-4000:]
    return run


@pytest.fixture(scope="module")
def two_nodes(on_two_nodes):
    return reader.load(on_two_nodes.telemetry)


def pod(span):
    return span.resource.get("k8s.pod.name")


@pytest.mark.matrix
def test_ranks_of_both_nodes_are_in_each_step(two_nodes):
    steps = step_traces(two_nodes.spans)
    assert sorted(steps) == [1, 2]
    for trace in steps.values():
        assert orphans(trace) == []
        assert_trajectories(trace)
        ranks = {(pod(s), s.attributes["rank"]) for s in trace if s.name == "verl.worker.update_actor"}
        assert {rank for _, rank in ranks} == {"0", "1"} and {found for found, _ in ranks} == {"head", "second"}


@pytest.mark.matrix
def test_each_process_says_its_own_node_and_what_the_run_says(two_nodes, on_two_nodes):
    """And no worker what the launcher said of itself."""
    launchers = [s for s in two_nodes.spans if s.resource["verl.process.role"] == "launcher"]
    workers = [s for s in two_nodes.spans if s.resource["verl.process.role"] != "launcher"]
    assert {(pod(s), s.resource.get("host.id")) for s in launchers} == {("submitter", "of-the-submitter")}
    assert {(pod(s), s.resource.get("k8s.node.name")) for s in workers} == {
        ("head", "head-node"),
        ("second", "second-node"),
    }
    assert all("host.id" not in s.resource for s in workers)
    assert {s.resource["team"] for s in two_nodes.spans} == {"rl"}
    complaints = [line for line in on_two_nodes.output.splitlines() if "verl-otel:" in line or "Invalid key" in line]
    assert complaints == []


@pytest.mark.matrix
def test_the_host_is_sampled_once(on_two_nodes):
    """Both nodes are on one machine: one host."""
    assert len(recorded_by(on_two_nodes.telemetry, "system.cpu.time")) == 1
    assert len(recorded_by(on_two_nodes.telemetry, "verl.worker.duration")) == 2


# ---- ray job submit


@pytest.fixture(scope="module")
def job(tmp_path_factory, fork_server):
    """`ray job submit`, with the environment in the job's runtime_env, as its documentation has it."""
    folder = tmp_path_factory.mktemp("job")
    dashboard = free_port()
    given = {
        "PYTHON": str(bed.PYTHON),
        "ASSETS": str(bed.assets()),
        "OUT": str(folder),
        "RANKS": "1",
        "STEPS": "2",
        "JOB": "1",
        "LAUNCH": bed.INSTRUMENT,
        "ZYGOTE": str(fork_server.socket),
        "ZYGOTE_PYTHON": str(bed.PYTHON),
        "PYTHONPATH": str(bed.BED),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu.register",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_AUTH_MODE": "token",
        "VERL_OTEL_FOLDER": str(folder / "verl-otel"),
        "OTEL_RESOURCE_ATTRIBUTES": "team=rl",
    }
    entrypoint = [str(bed.BED / "run_ppo.sh"), *bed.PPO_WITH_CRITIC_AND_REFERENCE, *bed.FAST_SAMPLER]
    submit = [
        *(bed.PYTHON.parent / "ray", "job", "submit", "--address", f"http://127.0.0.1:{dashboard}"),
        *("--runtime-env-json", json.dumps({"env_vars": given}), "--", *entrypoint),
    ]
    env, log = bed.clean_environment(RAY_AUTH_MODE="token"), folder / "run.log"
    with bed.cluster(free_port(), dashboard=dashboard):
        for _ in range(10):
            with log.open("wb") as output:
                submitted = subprocess.run(submit, env=env, stdout=output, stderr=subprocess.STDOUT, timeout=300)
            run = bed.Run(submitted.returncode, folder, log, 0.0)
            if "No available agent to submit job" not in run.output:  # it starts behind `ray start`
                break
            time.sleep(2)
    assert run.returncode == 0, run.output[-4000:]
    return run


def test_a_submitted_job_has_whole_traces_and_no_orphans(job):
    recording = reader.load(job.telemetry)
    steps = step_traces(recording.spans)
    assert sorted(steps) == [1, 2]
    for trace in steps.values():
        assert_complete_ppo_step(trace, ranks=["0"])
        assert_trajectories(trace)
    found = {root(trace).name: orphans(trace) for trace in traces(recording.spans).values()}
    assert found == {"verl.run": [], "verl.validation": [], "verl.step": []}
    roles = {s.resource["verl.process.role"] for s in recording.spans}
    assert roles >= {"launcher", "trainer", "worker", "agent_loop", "rollout_server", "reward_worker"}
    assert {s.resource["team"] for s in recording.spans} == {"rl"}


def test_a_submitted_job_is_one_run_that_has_finished(job):
    recording = reader.load(job.telemetry)
    assert [e.attributes["verl.run.state"] for e in recording.events_named("verl.run.finished")] == ["finished"]
    assert [line for line in job.output.splitlines() if "verl-otel:" in line] == []

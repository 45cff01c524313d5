"""Runs that are not alone, or not on one node: two at once on one cluster."""

import json
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections import defaultdict

import bed
import pytest
from trees import orphans, root, step_traces, traces

from verl_otel.recording import reader

pytestmark = [pytest.mark.run, pytest.mark.stack]

RUNS = ("first-run", "second-run")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


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
                "trainer.project_name=alpha",
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
        events = recordings[name].events_named("verl.step")
        assert {e.attributes["verl.run.id"] for e in events} == {name}
        bodies = {e.attributes["verl.step.number"]: e.body for e in events}
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
    def series():
        query = 'last_over_time({verl_run_id=~"first-run|second-run"}[15m])'
        url = f"{stack.url('prometheus')}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=30) as response:
            return json.load(response)["data"]["result"]

    deadline = time.monotonic() + 60
    while True:
        by_run = defaultdict(lambda: defaultdict(list))
        for found in series():
            by_run[found["metric"]["verl_run_id"]][found["metric"]["__name__"]].append(found)
        steps = {run: [float(f["value"][1]) for f in names["verl_training_step"]] for run, names in by_run.items()}
        if steps == {name: [4.0] for name in RUNS} or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert steps == {name: [4.0] for name in RUNS}, "one series of the step for each run, and it is the run's own"
    names = [set(by_run[name]) for name in RUNS]
    assert names[0] == names[1] and len(names[0]) > 100
    instances = [{f["metric"]["instance"] for found in by_run[name].values() for f in found} for name in RUNS]
    assert not instances[0] & instances[1]


def test_neither_complains(two_runs):
    _, found = two_runs
    for run in found.values():
        assert [line for line in run.output.splitlines() if "verl-otel:" in line] == []

"""A real run whose processes are scraped by a real Prometheus, with no Collector (`export/prometheus.py`).

So are its rollout servers (`export/server_targets.py`), whose `/metrics` is a stub of vLLM's.
"""

import urllib.request
from collections import Counter

import bed
import pytest
import yaml
from prometheus_server import Prometheus

pytestmark = [pytest.mark.run, pytest.mark.stack]

JOBS = ("scrape-processes", "scrape-rollout-servers")
STUB = "++actor_rollout_ref.rollout.engine_kwargs.hf_cpu.stub_metrics=True"


class Scraping(Prometheus):
    """With our scrape jobs, for what is announced in the folder `files`."""

    def __init__(self, folder, files):
        jobs = []
        for job in JOBS:
            text = (bed.ROOT / "deploy" / "prometheus" / f"{job}.yaml").read_text()
            for of_the_example, here in (('"/srv/verl-otel/', f'"{files}/'), (": 5s", ": 1s"), (": 10s", ": 1s")):
                assert text.count(of_the_example) == 1, of_the_example
                text = text.replace(of_the_example, here)
            jobs += yaml.safe_load(text)["scrape_configs"]
        config = folder / "prometheus.yaml"
        config.write_text(yaml.safe_dump({"scrape_configs": jobs}))
        super().__init__(folder, config)

    def seen(self, selector):
        """The last sample of each series of the run, those of dead processes too: (labels, value)."""
        return [(labels, float(value)) for labels, (_, value) in self.ask(f"last_over_time({selector}[15m])")]

    def own(self, name):
        """The sum of one of its own metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory, fork_server):
    """Prometheus after the run, and the run."""
    folder = tmp_path_factory.mktemp("pull")
    with Scraping(folder, folder / "telemetry") as prometheus:
        run = bed.run(
            folder / "run",
            ["grpo", *bed.FAST_SAMPLER, STUB, "trainer.project_name=alpha", "trainer.experiment_name=pull"],
            steps=3,
            fork_server=fork_server,
            environment={
                "OTEL_METRICS_EXPORTER": "prometheus",
                "OTEL_TRACES_EXPORTER": "none",
                "OTEL_LOGS_EXPORTER": "none",
                "VERL_OTEL_FOLDER": str(folder / "telemetry"),
                "VERL_OTEL_RUN_ID": "pull-run",
            },
        )
        assert run.returncode == 0, run.output[-4000:]
        yield prometheus, run


def test_every_process_is_found_and_told_apart(scraped):
    prometheus, _ = scraped
    up = [labels for labels, _ in prometheus.seen('up{job="verl-otel"}')]
    found = Counter((labels["verl_process_role"], labels.get("verl_worker_group", "")) for labels in up)
    assert found == bed.PROCESSES
    assert (
        len({labels["instance"] for labels in up}) == len({labels["service_instance_id"] for labels in up}) == len(up)
    )
    assert {labels["instance"].split(":")[0] for labels in up} == {"127.0.0.1"}
    for labels in up:
        assert (labels["job"], labels["verl_run_id"], labels["verl_run_attempt"]) == ("verl-otel", "pull-run", "1")
        if labels["verl_process_role"] != "launcher":
            assert (labels["verl_project_name"], labels["verl_experiment_name"]) == ("alpha", "pull")


def test_the_trainer_s_step_is_there_once(scraped):
    prometheus, _ = scraped
    ((labels, value),) = prometheus.seen("verl_training_step")
    assert labels["verl_run_id"] == "pull-run" and labels["verl_process_role"] == "trainer"
    assert (labels["rank"], labels["stage"], labels["model_type"]) == ("all", "step", "none")
    assert value in (1, 2, 3)


def test_both_ranks_durations_are_there_once(scraped):
    prometheus, _ = scraped
    series = [labels for labels, _ in prometheus.seen("verl_worker_duration_seconds_count")]
    assert {labels["verl_run_id"] for labels in series} == {"pull-run"}
    calls = Counter((labels["verl_worker_method"], labels["stage"], labels["rank"]) for labels in series)
    assert {("update_actor", "update", "0"), ("update_actor", "update", "1")} <= calls.keys()
    assert set(calls.values()) == {1}, calls


def test_prometheus_met_no_duplicate_and_every_process(scraped):
    prometheus, _ = scraped
    assert prometheus.own("prometheus_target_scrapes_sample_duplicate_timestamp_total") == 0
    assert prometheus.own("prometheus_target_scrapes_sample_out_of_order_total") == 0
    assert len(prometheus.seen('up{job="verl-otel"}')) == sum(bed.PROCESSES.values())


def test_no_target_is_left_when_the_run_is_over(scraped):
    """Ray kills its workers: the launcher tidies up after them, or `up == 0` would alert after every run."""
    _, run = scraped
    telemetry = run.folder.parent / "telemetry"
    assert {path.name for path in telemetry.iterdir()} >= {"prometheus", "rollout-servers"}
    for folder in ("prometheus", "rollout-servers"):
        assert list((telemetry / folder).iterdir()) == []


def test_the_run_warned_of_nothing(scraped):
    _, run = scraped
    assert [line for line in run.output.splitlines() if "verl-otel:" in line] == []


def test_the_rollout_servers_own_metrics_are_found_and_told_apart(scraped):
    prometheus, _ = scraped
    up = [labels for labels, _ in prometheus.seen('up{job="verl-rollout-servers"}')]
    assert {labels["verl_replica"] for labels in up} == {"0", "1"} and len(up) == 2
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert len(prometheus.seen(name)) == 2, name
    for labels, tokens in prometheus.seen("vllm:generation_tokens_total"):
        assert tokens > 0
        assert (
            labels.items()
            >= {
                "job": "verl-rollout-servers",
                "verl_run_id": "pull-run",
                "verl_run_attempt": "1",
                "verl_project_name": "alpha",
                "verl_experiment_name": "pull",
                "verl_process_role": "rollout_server",
                "gen_ai_provider_name": "hf_cpu",
                "model_type": "rollout",
                "model_name": "stub",
                "engine": "0",
            }.items()
        )


def test_the_servers_requests_are_counted_by_replica(scraped):
    """By verl-otel, in the servers' processes: beside what the engine says."""
    prometheus, _ = scraped
    requests = {
        (labels["verl_replica"], labels["stage"], labels["verl_stop_reason"]): count
        for labels, count in prometheus.seen("verl_server_requests_total")
    }
    assert {replica for replica, _, _ in requests} == {"0", "1"}
    assert {stage for _, stage, _ in requests} == {"rollout", "validation"}
    answered = sum(count for labels, count in prometheus.seen("vllm:request_success_total"))
    assert sum(requests.values()) == pytest.approx(answered, rel=0.5), "the last scrapes are not at one moment"
    tokens = {(labels["gen_ai_token_type"]) for labels, _ in prometheus.seen("verl_server_tokens_total")}
    assert tokens == {"input", "output"}
    durations = prometheus.seen("gen_ai_server_request_duration_seconds_count")
    assert {labels["gen_ai_provider_name"] for labels, _ in durations} == {"hf_cpu"}
    versions = dict((labels["verl_replica"], value) for labels, value in prometheus.seen("verl_server_policy_version"))
    assert versions.keys() == {"0", "1"} and all(0 <= value <= 3 for value in versions.values())

"""`verl-otel doctor` with the real stack: what it sends comes back, what is wrong there is told with what to do."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import bed
import jsonschema
import pytest
from asking import eventually, prometheus

from verl_otel import hooks
from verl_otel.doctor import endpoints
from verl_otel.doctor.asked import Asked
from verl_otel.semconv import registry
from verl_otel.stack.stack import Stack

pytestmark = pytest.mark.stack

SCHEMA = json.loads((bed.ROOT / "docs" / "doctor.schema.json").read_text())
NO_HOOKS = ",".join(sorted({hook.name for hook in hooks.HOOKS}))
"""Nothing of verl is imported, which is what takes long; tests/contract/test_doctor_on_verl.py does."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """One of its own: here backends are stopped, and no run of others is to be complained about."""
    with Stack(tmp_path_factory.mktemp("stack")) as own:
        yield own


def doctor(stack, folder, *arguments):
    """Exit status and findings (id -> findings) of the command, as a user calls it."""
    command = [Path(sys.executable).with_name("verl-otel"), "doctor", "--json", *arguments]
    for name in ("jaeger", "prometheus", "mlflow"):
        command += [f"--{name}", stack.url(name)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {"OTEL_EXPORTER_OTLP_ENDPOINT": stack.url("otlp_http"), "VERL_OTEL_FOLDER": str(folder)}
    env = bed.clean_environment(PATH=path, VERL_OTEL_DISABLED_HOOKS=NO_HOOKS, **given)
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)
    content = json.loads(done.stdout)
    jsonschema.validate(content, SCHEMA)
    assert content["exit_status"] == done.returncode and done.stderr == ""
    found = {}
    for finding in content["findings"]:
        found.setdefault(finding["id"], []).append(finding)
    return done.returncode, found


def test_of_a_stack_that_is_well_the_span_the_metric_and_the_event_are_read_back(stack, tmp_path):
    status, found = doctor(stack, tmp_path, "--strict")
    wrong = {id for id, of_id in found.items() if any(f["level"] in ("warning", "problem") for f in of_id)}
    assert (status, wrong) == (0, set()), found
    assert {f["data"]["backend"] for f in found["VO-READ-BACK"]} == {"Jaeger", "Prometheus", "MLflow"}
    assert found["VO-ENDPOINT"][0]["data"]["signals"] == ["traces", "metrics", "logs"]
    assert len(found["VO-CLOCK"]) == 4 and "VO-PIPELINE" in found


def test_no_run_is_made_of_it_and_prometheus_has_one_series_of_a_host(stack, tmp_path):
    from mlflow.tracking import MlflowClient

    assert doctor(stack, tmp_path)[0] == 0
    second = Asked({"OTEL_EXPORTER_OTLP_ENDPOINT": stack.url("otlp_http")})
    assert {finding.level for finding in endpoints.check(second)} == {"ok"}
    client = MlflowClient(stack.url("mlflow"))
    experiment = client.get_experiment_by_name("verl-otel-doctor")
    assert client.search_runs([experiment.experiment_id]) == []
    assert eventually(lambda: prometheus(stack, f"verl_doctor_timestamp_seconds == {second.probe.value!r}"))
    (series,) = prometheus(stack, "verl_doctor_timestamp_seconds")
    assert series["metric"]["job"] == "verl/verl-otel-doctor" and "verl_run_id" not in series["metric"]


def test_with_the_collector_stopped_it_says_that_nothing_listens_and_what_to_do(stack, tmp_path):
    stack.kill("collector")
    try:
        status, found = doctor(stack, tmp_path)
    finally:
        stack.restart("collector")
    (finding,) = found["VO-ENDPOINT-REFUSED"]
    assert status == 1 and finding["level"] == "problem"
    assert stack.url("otlp_http") in finding["what"] and finding["fix"].startswith("start the Collector")
    assert len(found["VO-READ-BACK-NOTHING"]) == 3  # the backends answer


def test_with_a_backend_stopped_it_says_which(stack, tmp_path):
    stack.kill("jaeger")
    try:
        status, found = doctor(stack, tmp_path)
    finally:
        stack.restart("jaeger")
    assert status == 1 and [f["data"]["backend"] for f in found["VO-BACKEND-NO-ANSWER"]] == ["Jaeger"]
    assert {f["data"]["backend"] for f in found["VO-READ-BACK"]} == {"Prometheus", "MLflow"}


def send(stack, run, service, *points):
    """Points (metric, value, attributes) of a process of a run."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    exporter = OTLPMetricExporter(stack.url("otlp_http") + "/v1/metrics")
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)
    resource = Resource({"service.name": service, "verl.run.id": run, "verl.run.attempt": 1})
    provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    meter = provider.get_meter("test")
    for name, value, attributes in points:
        metric = registry.load().metrics[name]
        labels = {"rank": "all", "stage": metric.stage, "model_type": metric.model_type, **attributes}
        if metric.instrument == "counter":
            meter.create_counter(*metric.arguments).add(value, labels)
        else:
            meter.create_gauge(*metric.arguments).set(value, labels)
    assert provider.force_flush()
    provider.shutdown()


def test_what_is_wrong_with_runs_in_prometheus_is_told(stack, tmp_path):
    send(stack, "doctors-twice", "pushed", ("verl.training.step", 3, {}))
    send(stack, "doctors-twice", "scraped", ("verl.training.step", 3, {}))
    send(stack, "doctors-silent", "s", ("verl.process.start_time", 1, {}))
    send(
        *(stack, "doctors-well", "s", ("verl.training.step", 3, {}), ("verl.mfu", 0.2, {})),
        *(("verl.throughput", 5000, {}), ("verl.process.start_time", 1, {})),
    )
    send(
        *(stack, "doctors-idle", "s", ("verl.training.step", 3, {}), ("verl.mfu", 0, {}), ("verl.throughput", 5, {})),
        ("verl.otel.exported", 7, {"verl.otel.outcome": "dropped", "verl.otel.reason": "spool_full"}),
        ("verl.otel.failures", 2, {"verl.otel.site": "doctors site"}),
    )
    assert eventually(lambda: len(prometheus(stack, 'count by (verl_run_id) ({verl_run_id=~"doctors-.+"})')) == 4)
    status, found = doctor(stack, tmp_path)
    assert status == 0

    def runs(id):
        return {f["data"]["run"] for f in found[id] if f["data"]["run"].startswith("doctors-")}

    assert runs("VO-SERIES-TWICE") == {"doctors-twice"}
    assert runs("VO-RUN-WITHOUT-STEPS") == {"doctors-silent"}
    assert runs("VO-RUN-WITHOUT-MFU") == {"doctors-idle"}
    assert found["VO-TELEMETRY-DROPPED"][0]["data"]["counts"]["spool_full"] >= 7
    assert found["VO-TELEMETRY-FAILED"][0]["data"]["counts"]["doctors site"] == 2
    (counted,) = found["VO-SERIES"]
    assert counted["data"]["runs"] >= 4 and counted["data"]["series"] >= 10
    assert not any(name.startswith("verl_doctor") for name in counted["data"]["top"])

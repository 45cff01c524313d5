"""The MLflow bridge (`bridges/mlflow`) on a real MLflow store: one run for one verl run, and twice is as once."""

import gzip
import http.server
import importlib.metadata
import importlib.util
import itertools
import json
import math
import posixpath
import socket
import threading
import types
import warnings
from pathlib import Path

import pytest
from bridge_runs import SECOND, START, VerlRun, log_request
from google.protobuf import json_format
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlflow.tracking import MlflowClient
from mlflow.utils.validation import _validate_batch_log_limits, _validate_metric, _validate_metric_name
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from verl_otel.bridges import server
from verl_otel.bridges.events import RunEvent, RunIdentity, identity_of
from verl_otel.bridges.mlflow import sink, traces
from verl_otel.bridges.mlflow.runs import Runs, metric_name
from verl_otel.bridges.mlflow.sink import MlflowSink
from verl_otel.bridges.mlflow.traces import MAX_ROOTS, Traces
from verl_otel.bridges.sink import Refused, TryLater
from verl_otel.cli import main
from verl_otel.semconv import attributes as attr

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # starlette prefers another client from some version on
    from starlette.testclient import TestClient

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """A real MLflow store, made once: that takes some seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # artifacts go to the working directory, taken when a store is first used
        MlflowClient(f"sqlite:///{folder / 'mlflow.db'}").search_experiments()
    return f"sqlite:///{folder / 'mlflow.db'}"


class StrictClient(MlflowClient):
    """Refuses what MLflow's server refuses: the store alone takes requests of any size."""

    def log_batch(self, run_id, metrics=(), params=(), tags=(), **more):
        _validate_batch_log_limits(metrics, params, tags)
        return super().log_batch(run_id, metrics, params, tags, **more)


@pytest.fixture(scope="module")
def client(uri):
    return StrictClient(uri)


@pytest.fixture
def runs(client):
    return Runs(client)


@pytest.fixture
def verl():
    """A verl run that is new in the store."""
    return VerlRun(f"run-{next(_numbers)}")


def history(client, run, key):
    return [(metric.step, metric.value, metric.timestamp) for metric in client.get_metric_history(run.run_id, key)]


# ---- runs


def texts(client, run, folder=""):
    return {path for entry in client.list_artifacts(run.run_id, folder)
            for path in (texts(client, run, entry.path) if entry.is_dir else {entry.path})}  # fmt: skip


def test_a_text_of_the_users_is_an_artifact_of_the_run_once(client, runs, verl, tmp_path):
    said = verl.event("verl.text", 3, {"text": "so it went"}, **{"verl.step.number": 7, "verl.text.name": "a/b../c d"})
    runs.handle([said])
    runs.handle([said])
    run = runs.resolve(verl.identity)
    (file,) = texts(client, run)
    assert file == f"texts/a/b_/c_d/step-7-{said.time_ns}.txt"
    assert Path(client.download_artifacts(run.run_id, file, str(tmp_path))).read_text() == "so it went"


def test_a_text_that_cannot_be_written_does_not_cost_the_numbers(client, runs, verl, monkeypatch, caplog):
    def refuse(*_):
        raise OSError("no such store")

    monkeypatch.setattr(client, "log_text", refuse)
    text = verl.event("verl.text", 3, {"text": "x"}, **{"verl.step.number": 1, "verl.text.name": "a/b"})
    assert runs.handle([text, verl.step(1, loss=0.5)]) == 0
    assert [value for _, value, _ in history(client, runs.resolve(verl.identity), "loss")] == [0.5]
    assert "no such store" in caplog.text


def test_a_run_gets_its_names_parameters_and_tags(client, runs, verl):
    body = {"data.train_batch_size": 8, "actor.lr": 1e-6, "shuffle": True, "vcs.ref.head.revision": "abc123"}
    assert runs.handle([verl.started(**body)]) == 0
    run = client.get_run(runs.resolve(verl.identity).run_id)
    assert client.get_experiment(run.info.experiment_id).name == "gsm8k"
    assert run.info.run_name == "ppo-1"
    assert run.info.status == "RUNNING"
    assert run.data.params == {"data.train_batch_size": "8", "actor.lr": "1e-06", "shuffle": "True"}
    assert run.data.tags["verl.run.id"] == verl.run_id
    assert run.data.tags["verl.run.attempt"] == "1"
    assert run.data.tags["verl.version"] == "0.9.1"
    assert run.data.tags["mlflow.source.git.commit"] == "abc123"


def test_metrics_are_at_their_steps_with_their_exact_values_and_times(client, runs, verl):
    values = [0.1 + 0.2, -1e-300, 3]
    runs.handle([verl.started(), *(verl.step(n, **{"critic/score/mean": v}) for n, v in enumerate(values, 1))])
    run = runs.resolve(verl.identity)
    assert history(client, run, "critic/score/mean") == [
        (n, float(v), (START + n * SECOND) // 1_000_000) for n, v in enumerate(values, 1)
    ]


def test_nan_is_kept_as_nan(client, runs, verl):
    runs.handle([verl.step(1, a=math.nan, b=1.0)])
    run = runs.resolve(verl.identity)
    assert math.isnan(history(client, run, "a")[0][1])
    assert history(client, run, "b")[0][1] == 1.0


def test_what_is_not_a_number_is_left_out(client, runs, verl):
    runs.handle([verl.step(1, a=1.0, text="x", flag=True, nothing=None, some=[1.0], map={"b": 1.0})])
    assert set(client.get_run(runs.resolve(verl.identity).run_id).data.metrics) == {"a"}


def test_delivering_everything_again_changes_nothing(client, runs, verl):
    delivered = [
        verl.started(lr=0.1),
        verl.step(1, a=1.0, b=2.0, c=math.nan),
        verl.step(2, a=1.5, b=2.0),
        verl.finished(),
    ]
    runs.handle(delivered)
    run = runs.resolve(verl.identity)
    before = client.get_run(run.run_id)
    histories = {key: len(history(client, run, key)) for key in "abc"}
    for again in (runs, Runs(client)):  # the same bridge, and one that was restarted
        again.handle(delivered)
        again.handle(delivered[1:2])
    after = client.get_run(run.run_id)
    assert {key: len(history(client, run, key)) for key in "abc"} == histories == {"a": 2, "b": 2, "c": 1}
    assert after.data.params == before.data.params
    assert after.data.tags == before.data.tags
    assert (after.info.status, after.info.end_time) == (before.info.status, before.info.end_time)
    assert len(client.search_runs([run.experiment_id], f"tags.`verl.run.id` = '{verl.run_id}'")) == 1


@pytest.mark.parametrize(("state", "status"), [("finished", "FINISHED"), ("failed", "FAILED"), ("killed", "KILLED")])
def test_the_end_of_the_run_is_its_state(client, runs, verl, state, status):
    body = {"exception.type": "RuntimeError", "exception.message": "CUDA out of memory"} if state == "failed" else {}
    runs.handle([verl.started(), verl.step(1, a=1.0), verl.finished(7, state=state, **body)])
    run = client.get_run(runs.resolve(verl.identity).run_id)
    assert run.info.status == status
    assert run.info.end_time == (START + 7 * SECOND) // 1_000_000
    assert {k: v for k, v in run.data.tags.items() if k.startswith("exception.")} == body
    assert run.data.metrics == {"a": 1.0}


def test_a_resumed_run_goes_on_and_changed_parameters_become_tags(client, runs, verl):
    runs.handle([verl.started(lr=0.1, seed=1), verl.step(1, a=1.0), verl.finished(5, state="failed")])
    first = runs.resolve(verl.identity)
    restarted = Runs(client)
    restarted.handle([verl.started(10, 2, lr=0.2, seed=1, new=7)])
    assert client.get_run(first.run_id).info.status == "RUNNING"
    restarted.handle([verl.step(1, 11, 2, a=1.25), verl.step(2, 12, 2, a=2.0), verl.finished(20, 2)])
    run = client.get_run(first.run_id)
    assert restarted.resolve(verl.identity) == first
    assert run.data.params == {"lr": "0.1", "seed": "1", "new": "7"}
    assert run.data.tags["lr.attempt_2"] == "0.2"
    assert "seed.attempt_2" not in run.data.tags
    assert run.data.tags["verl.run.attempt"] == "2"
    assert run.info.status == "FINISHED"
    assert [(step, value) for step, value, _ in history(client, first, "a")] == [(1, 1.0), (1, 1.25), (2, 2.0)]


def test_a_late_start_event_does_not_open_a_finished_run_again(client, runs, verl):
    runs.handle([verl.started(), verl.finished(5)])
    runs.handle([verl.started()])
    assert client.get_run(runs.resolve(verl.identity).run_id).info.status == "FINISHED"


def test_more_metrics_than_mlflow_takes_at_once_are_all_there(client, runs, verl):
    metrics = {f"k/{i}": float(i) for i in range(2001)}
    runs.handle([verl.step(1, **metrics)])
    run = runs.resolve(verl.identity)
    assert client.get_run(run.run_id).data.metrics == metrics


def test_more_parameters_than_mlflow_takes_at_once_are_all_there(client, runs, verl):
    runs.handle([verl.started(**{f"p.{i}": i for i in range(250)})])
    runs.handle([verl.started(1, 2, **{f"p.{i}": -i for i in range(250)})])
    found = client.get_run(runs.resolve(verl.identity).run_id).data
    assert found.params == {f"p.{i}": str(i) for i in range(250)}
    assert len([tag for tag in found.tags if tag.endswith(".attempt_2")]) == 249  # 0 has not changed


def test_a_parameter_that_is_too_long_is_cut(client, runs, verl):
    runs.handle([verl.started(long="x" * 20_000)])
    assert set(client.get_run(runs.resolve(verl.identity).run_id).data.params["long"]) == {"x"}


def test_two_keys_that_mlflow_would_not_tell_apart_are_told_apart(client, runs, verl):
    metrics = {"a@1": 1.0, "a_at_1": 2.0, "b#": 3.0, "b?": 4.0}
    runs.handle([verl.step(1, **metrics)])
    found = client.get_run(runs.resolve(verl.identity).run_id).data.metrics
    assert found["a_at_1"] == 1.0
    assert sorted(found.values()) == [1.0, 2.0, 3.0, 4.0]


def test_events_that_name_no_run_or_are_of_another_name_are_ignored_and_counted(client, runs, verl):
    nobody = RunEvent("verl.step", START, {}, {"a": 1.0}, {})
    unknown = verl.event("somebody.elses", 1, {"a": 1.0})
    assert runs.handle([nobody, verl.step(1, a=1.0), unknown, unknown]) == 3
    assert client.get_run(runs.resolve(verl.identity).run_id).data.metrics == {"a": 1.0}


def test_a_doctors_event_makes_no_run_and_cannot_cost_others(client, runs, verl, monkeypatch):
    doctors = RunEvent(attr.EVENT_DOCTOR, 0, {attr.DOCTOR_ID: "doctor-1"}, {}, {})
    assert runs.handle([doctors]) == 0
    experiment = client.get_experiment_by_name(attr.SERVICE_DOCTOR)
    assert experiment.tags[attr.DOCTOR_ID] == "doctor-1"
    assert client.search_runs([experiment.experiment_id]) == []

    def refuse(*_):
        raise RuntimeError("deleted")

    monkeypatch.setattr(StrictClient, "set_experiment_tag", refuse)
    assert runs.handle([verl.started(), doctors, verl.step(1, loss=0.5)]) == 0
    assert [value for _, value, _ in history(client, runs.resolve(verl.identity), "loss")] == [0.5]


def test_events_of_several_runs_in_one_request_go_to_their_runs(client, runs):
    one, two = VerlRun(f"run-{next(_numbers)}"), VerlRun(f"run-{next(_numbers)}", project="other")
    runs.handle([one.step(1, a=1.0), two.step(1, a=2.0), one.finished(), two.step(2, a=3.0)])
    assert [value for _, value, _ in history(client, runs.resolve(one.identity), "a")] == [1.0]
    assert [value for _, value, _ in history(client, runs.resolve(two.identity), "a")] == [2.0, 3.0]
    assert client.get_run(runs.resolve(two.identity).run_id).info.status == "RUNNING"


def test_requests_at_the_same_time_make_one_run(client, runs, verl):
    found, threads = [], []
    for _ in range(6):
        threads.append(threading.Thread(target=lambda: found.append(runs.resolve(verl.identity))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 6 and len(set(found)) == 1


def test_a_run_that_was_looked_up_wrongly_is_looked_up_again(client, runs, verl):
    first = runs.resolve(verl.identity)
    client.delete_run(first.run_id)
    assert runs.resolve(verl.identity) == first
    runs.forget()
    assert runs.resolve(verl.identity) != first


@pytest.mark.parametrize("run_id", ['a "quoted" one', "50% `off`", "奖励", "a=b AND tags.x = y"])
def test_a_run_id_with_special_characters_is_found_again(client, run_id):
    verl = VerlRun(f"{run_id} {next(_numbers)}")
    assert Runs(client).resolve(verl.identity) == Runs(client).resolve(verl.identity)


def test_a_run_is_named_by_what_is_known():
    assert identity_of({}) is None
    assert identity_of({"verl.run.id": ""}) is None
    assert identity_of({"verl.run.id": "run-1"}) == RunIdentity("run-1", "verl", "run-1")


# ---- names


@pytest.fixture(scope="module")
def verls_own_logger():
    """verl's MLflow logger, from its file: the whole package takes seconds to import."""
    path = importlib.metadata.distribution("verl").locate_file("verl/utils/tracking.py")
    spec = importlib.util.spec_from_file_location("verls_tracking", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._MlflowLoggingAdapter()


@pytest.mark.parametrize(
    "key",
    [
        *("critic/score/mean", "val-core/gsm8k/acc/mean@16", "best@4/std@2", "timing_s/agent_loop/x:y"),
        *("a//b", "a#b", "a b.c-d", "a(b)"),
    ],
)
def test_a_key_is_named_as_by_verls_own_logger(verls_own_logger, key):
    assert metric_name(key) == verls_own_logger._sanitize_key(key)


@settings(max_examples=300)
@given(
    st.text(st.characters(), max_size=300)
    | st.text("./@ ab:-\\", max_size=12)
    | st.text("a/", min_size=240, max_size=600)
)
@example("")
@example(".")
@example("..")
@example("../../etc/passwd")
@example("/absolute")
@example("a/")
@example("a/./b")
@example("a/../b")
@example(" ")
@example("\n")
@example("a" * 251)
@example("奖励/均值")
@example("\ud800")
def test_any_key_gets_a_name_that_mlflow_accepts(key):
    name = metric_name(key)
    _validate_metric_name(name)  # raises
    assert 0 < len(name) <= 250
    assert name == metric_name(key)
    assert posixpath.normpath(posixpath.join("/runs/1", name)).startswith("/runs/1/")


# ---- server


PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.fixture
def bridge(uri, monkeypatch):
    # Set by the bridge too; here so that they are put back.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    with TestClient(server.app({"mlflow": MlflowSink(uri)})) as bridge:
        yield bridge


def assert_serves(bridge):
    assert bridge.get("/healthz").status_code == 200
    good = log_request(VerlRun("run-health").step(1, a=1.0)).SerializeToString()
    assert bridge.post("/mlflow/v1/logs", content=good, headers=PROTOBUF).status_code == 200


def test_events_that_are_posted_are_in_mlflow(bridge, client, runs, verl):
    request = log_request(verl.started(lr=0.1), verl.step(3, **{"critic/score/mean": 0.1 + 0.2}), verl.finished(9))
    response = bridge.post("/mlflow/v1/logs", content=request.SerializeToString(), headers=PROTOBUF)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/x-protobuf"
    assert ExportLogsServiceResponse.FromString(response.content) == ExportLogsServiceResponse()
    run = client.get_run(runs.resolve(verl.identity).run_id)
    assert run.data.params == {"lr": "0.1"}
    assert run.info.status == "FINISHED"
    assert history(client, runs.resolve(verl.identity), "critic/score/mean") == [
        (3, 0.1 + 0.2, (START + 3 * SECOND) // 1_000_000)
    ]


def test_a_compressed_request_is_taken(bridge, client, runs, verl):
    body = gzip.compress(log_request(verl.step(1, a=1.0)).SerializeToString())
    assert (
        bridge.post("/mlflow/v1/logs", content=body, headers={**PROTOBUF, "content-encoding": "gzip"}).status_code
        == 200
    )
    assert client.get_run(runs.resolve(verl.identity).run_id).data.metrics == {"a": 1.0}


def test_a_compressed_request_in_many_pieces_is_taken(bridge, client, runs, verl):
    body = gzip.compress(log_request(verl.step(1, a=1.0)).SerializeToString())
    pieces = (body[i : i + 7] for i in range(0, len(body), 7))
    assert (
        bridge.post("/mlflow/v1/logs", content=pieces, headers={**PROTOBUF, "content-encoding": "gzip"}).status_code
        == 200
    )
    assert client.get_run(runs.resolve(verl.identity).run_id).data.metrics == {"a": 1.0}


def test_a_request_in_json_is_taken_and_answered_in_json(bridge, client, runs, verl):
    body = json_format.MessageToJson(log_request(verl.step(1, a=0.1 + 0.2))).encode()
    response = bridge.post("/mlflow/v1/logs", content=body, headers={"content-type": "application/json; charset=utf-8"})
    assert (response.status_code, response.json()) == (200, {})
    assert client.get_run(runs.resolve(verl.identity).run_id).data.metrics == {"a": 0.1 + 0.2}


def test_what_is_not_for_mlflow_is_a_partial_success(bridge, verl):
    nobody = RunEvent("verl.step", START, {}, {"a": 1.0}, {})
    request = log_request(verl.step(1, a=1.0), nobody, verl.event("other", 1, {}))
    response = bridge.post("/mlflow/v1/logs", content=request.SerializeToString(), headers=PROTOBUF)
    assert response.status_code == 200
    assert ExportLogsServiceResponse.FromString(response.content).partial_success.rejected_log_records == 2


def test_an_empty_request_is_taken(bridge):
    assert bridge.post("/mlflow/v1/logs", content=b"", headers=PROTOBUF).status_code == 200
    assert bridge.post("/mlflow/v1/traces", content=b"", headers=PROTOBUF).status_code == 200


@pytest.mark.parametrize("path", ["/mlflow/v1/logs", "/mlflow/v1/traces"])
@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"\xff\xff\xff\xff", PROTOBUF, 400),
        (b"not gzip", {**PROTOBUF, "content-encoding": "gzip"}, 400),
        (b"x", {**PROTOBUF, "content-encoding": "br"}, 415),
        (b"x", {**PROTOBUF, "content-encoding": "gzip, gzip"}, 415),
        (b"x", {"content-type": "text/plain"}, 415),
        (b"x", {}, 415),
    ],
)
def test_what_can_never_be_taken_is_refused_and_the_bridge_goes_on(bridge, path, content, headers, status):
    response = bridge.post(path, content=content, headers=headers)
    assert response.status_code == status
    assert response.text.endswith("\n")
    assert_serves(bridge)


@pytest.mark.parametrize("content", [b"", b"{", b"7", b"\xff", b'{"resourceLogs": 7}', b"[" * 100_000])
def test_json_that_cannot_be_read_is_refused(bridge, content):
    response = bridge.post("/mlflow/v1/logs", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert_serves(bridge)


def test_traces_in_json_are_refused(bridge):
    headers = {"content-type": "application/json"}
    assert bridge.post("/mlflow/v1/traces", content=b"{}", headers=headers).status_code == 415


def test_a_request_that_is_too_large_is_refused(bridge, monkeypatch):
    monkeypatch.setattr(server, "MAX_BODY", 10_000)
    assert bridge.post("/mlflow/v1/logs", content=b"\0" * 10_001, headers=PROTOBUF).status_code == 413
    assert_serves(bridge)


def test_a_request_that_unpacks_to_too_much_is_refused(bridge):
    bomb = gzip.compress(b"\0" * (server.MAX_BODY + 1), compresslevel=1)
    assert len(bomb) < server.MAX_BODY / 50
    response = bridge.post("/mlflow/v1/logs", content=bomb, headers={**PROTOBUF, "content-encoding": "gzip"})
    assert response.status_code == 413
    assert_serves(bridge)


def test_a_request_that_unpacks_to_nothing_is_refused_if_it_is_too_large(bridge, monkeypatch):
    monkeypatch.setattr(server, "MAX_BODY", 10_000)
    empty = gzip.compress(b"") * 600
    response = bridge.post("/mlflow/v1/logs", content=empty, headers={**PROTOBUF, "content-encoding": "gzip"})
    assert response.status_code == 413
    assert_serves(bridge)


def test_a_request_of_exactly_the_limit_is_not_too_large(bridge, monkeypatch, verl):
    request = log_request(verl.step(1, a=1.0)).SerializeToString()
    monkeypatch.setattr(server, "MAX_BODY", len(request))
    assert bridge.post("/mlflow/v1/logs", content=request, headers=PROTOBUF).status_code == 200
    packed = gzip.compress(request)
    assert (
        bridge.post("/mlflow/v1/logs", content=packed, headers={**PROTOBUF, "content-encoding": "gzip"}).status_code
        == 200
    )


@pytest.fixture
def nowhere():
    """The address of a server that is not there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_while_mlflow_is_away_the_collector_is_asked_to_wait(bridge, nowhere, verl):
    logs = log_request(verl.step(1, a=1.0)).SerializeToString()
    with TestClient(server.app({"mlflow": MlflowSink(nowhere)})) as cut_off:
        for path, content in (
            ("/mlflow/v1/logs", logs),
            ("/mlflow/v1/traces", trace_request(verl, 1).SerializeToString()),
        ):
            assert cut_off.post(path, content=content, headers=PROTOBUF).status_code == 503
        assert cut_off.get("/healthz").status_code == 200
        assert cut_off.post("/mlflow/v1/logs", content=b"\xff", headers=PROTOBUF).status_code == 400
    assert bridge.post("/mlflow/v1/logs", content=logs, headers=PROTOBUF).status_code == 200


def test_the_password_of_an_mlflow_that_is_away_is_neither_logged_nor_answered(nowhere, verl, caplog):
    address = nowhere.replace("://", "://user:Zq7planted@")
    with TestClient(server.app({"mlflow": MlflowSink(address)})) as cut_off:
        for path, content in (("logs", log_request(verl.step(1, a=1.0))), ("traces", trace_request(verl, 1))):
            answer = cut_off.post(f"/mlflow/v1/{path}", content=content.SerializeToString(), headers=PROTOBUF)
            assert answer.status_code == 503
            assert "Zq7planted" not in answer.text
    assert "failed with exception" in caplog.text
    assert "Zq7planted" not in caplog.text


class Broken:
    """A sink that fails as no sink should, with a secret in its message."""

    name = "Broken"

    def handle(self, events):
        raise LookupError(f"nothing at http://user:Zq7planted@127.0.0.1/{len(events)}?token=Zq7planted")


def test_what_fails_unforeseen_is_refused_and_logged_without_secrets(verl, caplog):
    with TestClient(server.app({"broken": Broken()})) as bridge:
        content = log_request(verl.step(1, a=1.0)).SerializeToString()
        answer = bridge.post("/broken/v1/logs", content=content, headers=PROTOBUF)
    assert answer.status_code == 400
    assert "LookupError: nothing at http://" in caplog.text
    assert "Zq7planted" not in caplog.text + answer.text


# ---- who may send


@pytest.fixture
def guarded(uri):
    with TestClient(server.app({"mlflow": MlflowSink(uri)}, token="the token")) as bridge:
        yield bridge


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "the token",
        "Bearer",
        "Bearer ",
        "Bearer the toke",
        "Bearer the token2",
        "Basic the token",
        "Bearer tök",
    ],
)
@pytest.mark.parametrize("path", ["/mlflow/v1/logs", "/mlflow/v1/traces"])
def test_without_the_token_nothing_is_taken_and_the_bridge_goes_on(guarded, verl, path, given):
    headers = [*PROTOBUF.items(), *([] if given is None else [("authorization", given.encode("latin-1"))])]
    response = guarded.post(path, content=b"\xff" * 100, headers=headers)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert "token2" not in response.text and "the token" not in response.text
    assert guarded.get("/healthz").status_code == 200


@pytest.mark.parametrize("given", ["Bearer the token", "bearer the token", "Bearer  the token "])
def test_with_the_token_events_are_taken(guarded, verl, given):
    content = log_request(verl.step(1, a=1.0)).SerializeToString()
    headers = {**PROTOBUF, "authorization": given}
    assert guarded.post("/mlflow/v1/logs", content=content, headers=headers).status_code == 200


@pytest.fixture
def served(monkeypatch):
    """What the command would serve."""
    calls = []
    monkeypatch.setattr("uvicorn.run", lambda app, **options: calls.append(options["host"]))
    return calls


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "bridge", "localhost.example.org"])
def test_the_bridge_does_not_listen_beyond_loopback_without_a_token(served, monkeypatch, capsys, host):
    command = ["bridge", "--mlflow", "http://127.0.0.1:1", "--host", host]
    assert main(command) == 2 and served == []
    assert "VERL_OTEL_BRIDGE_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("VERL_OTEL_BRIDGE_TOKEN", " ")
    assert main(command) == 2 and served == []
    monkeypatch.setenv("VERL_OTEL_BRIDGE_TOKEN", "secret")
    assert main(command) == 0 and served == [host]
    monkeypatch.delenv("VERL_OTEL_BRIDGE_TOKEN")
    assert main([*command, "--without-token"]) == 0 and served == [host, host]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "::1", "localhost"])
def test_on_loopback_the_bridge_needs_no_token(served, host):
    assert main(["bridge", "--mlflow", "http://127.0.0.1:1", "--host", host]) == 0 and served == [host]


def test_the_token_of_the_environment_is_asked_for(monkeypatch, uri):
    apps = []
    monkeypatch.setattr("uvicorn.run", lambda app, **options: apps.append(app))
    monkeypatch.setenv("VERL_OTEL_BRIDGE_TOKEN", "secret")
    assert main(["bridge", "--mlflow", "http://127.0.0.1:1"]) == 0
    with TestClient(apps[0]) as bridge:
        assert bridge.post("/mlflow/v1/logs", content=b"", headers=PROTOBUF).status_code == 401
        headers = {**PROTOBUF, "authorization": "Bearer secret"}
        assert bridge.post("/mlflow/v1/logs", content=b"", headers=headers).status_code == 200


# ---- anything at all


def mutated(valid):
    """Valid requests of which some bytes are others, missing, or there twice."""

    @st.composite
    def build(draw):
        content = bytearray(draw(st.sampled_from(valid)))
        for _ in range(draw(st.integers(1, 6))):
            at = draw(st.integers(0, len(content)))
            size = draw(st.integers(0, 8))
            kind = draw(st.sampled_from(["set", "cut", "twice"]))
            if kind == "set":
                content[at : at + size] = draw(st.binary(max_size=8))
            elif kind == "cut":
                del content[at : at + size]
            else:
                content[at:at] = content[at : at + size]
        return bytes(content)

    return build()


_FUZZED = VerlRun("run-fuzz")
_VALID = {
    "/mlflow/v1/logs": [
        log_request(_FUZZED.started(lr=0.1, name="x")).SerializeToString(),
        log_request(_FUZZED.step(3, **{"critic/score/mean": 0.5, "n": 7})).SerializeToString(),
        log_request(_FUZZED.finished(9)).SerializeToString(),
    ],
}
_TYPES = st.sampled_from(["application/x-protobuf", "application/json", "text/plain", ""])


class AnyMlflow(MlflowClient):
    """Takes everything that MLflow's server takes, at once: the store would take a second for each request."""

    def __init__(self, *_):
        self.calls = 0

    def _take(self, metrics=(), params=(), tags=()):
        _validate_batch_log_limits(list(metrics), list(params), list(tags))
        for metric in metrics:
            _validate_metric(metric.key, metric.value, metric.timestamp, metric.step)
        self.calls += 1

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id="1")

    def search_runs(self, *_, **__):
        return []

    def create_run(self, *_, tags, **__):
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r"))

    def get_run(self, run_id):
        data = types.SimpleNamespace(params={}, tags={})
        return types.SimpleNamespace(info=types.SimpleNamespace(status="RUNNING"), data=data)

    def log_batch(self, run_id, metrics=(), params=(), tags=()):
        self._take(metrics, params, tags)

    def log_text(self, *_):
        pass

    def set_terminated(self, *_, **__):
        pass

    def update_run(self, *_, **__):
        pass


@pytest.fixture(scope="module")
def fuzzed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink, "MlflowClient", AnyMlflow)
        patch.setattr(sink, "Traces", type("NotSent", (Traces,), {"_post": lambda *_: None}))
        app = server.app({"mlflow": MlflowSink("http://127.0.0.1:1")})
    with TestClient(app) as bridge:
        yield bridge


def assert_refused_or_taken(bridge, path, content, headers):
    response = bridge.post(path, content=content, headers=headers)
    assert 200 <= response.status_code < 300 or 400 <= response.status_code < 500, response.text
    assert bridge.get("/healthz").status_code == 200


@settings(max_examples=150)
@given(
    st.sampled_from(["/mlflow/v1/logs", "/mlflow/v1/traces"]),
    st.binary(max_size=200),
    _TYPES,
    st.sampled_from(["", "gzip", "br"]),
)
def test_no_bytes_are_too_much_for_the_bridge(fuzzed, path, content, kind, encoding):
    assert_refused_or_taken(fuzzed, path, content, {"content-type": kind, "content-encoding": encoding})


@settings(max_examples=300)
@given(mutated(_VALID["/mlflow/v1/logs"]), st.booleans())
def test_no_mutated_events_are_too_much_for_the_bridge(fuzzed, content, packed):
    headers = {**PROTOBUF, **({"content-encoding": "gzip"} if packed else {})}
    assert_refused_or_taken(fuzzed, "/mlflow/v1/logs", gzip.compress(content) if packed else content, headers)


@settings(max_examples=150)
@given(st.data())
def test_no_mutated_spans_are_too_much_for_the_bridge(fuzzed, data):
    valid = [trace_request(_FUZZED, 2, 1).SerializeToString(), trace_request(None, 1).SerializeToString()]
    assert_refused_or_taken(fuzzed, "/mlflow/v1/traces", data.draw(mutated(valid)), PROTOBUF)


_JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_JSON_FIELDS = {
    "eventName": st.sampled_from(["verl.step", "verl.run.started", "verl.run.finished", "verl.text"]) | _JSON_VALUES,
    "timeUnixNano": st.integers() | _JSON_VALUES,
    "body": st.fixed_dictionaries(
        {"kvlistValue": st.fixed_dictionaries({"values": st.lists(
            st.fixed_dictionaries({"key": st.text(st.characters(), max_size=5),
                                   "value": st.fixed_dictionaries({"doubleValue": st.floats() | _JSON_VALUES})}),
            max_size=3)})}
    ) | _JSON_VALUES,
    "attributes": st.lists(
        st.fixed_dictionaries({
            "key": st.sampled_from(["verl.run.id", "verl.step.number", "verl.run.attempt", "verl.run.state"]),
            "value": st.sampled_from(["stringValue", "intValue", "doubleValue"]).flatmap(
                lambda kind: st.fixed_dictionaries({kind: _JSON_VALUES | st.integers() | st.text(max_size=4)})),
        }), max_size=4) | _JSON_VALUES,
}  # fmt: skip


@settings(max_examples=300)
@given(st.fixed_dictionaries({}, optional=_JSON_FIELDS))
@example({"timeUnixNano": float("inf")})
@example({"timeUnixNano": "9" * 5000})
@example({"eventName": "\ud800"})
def test_no_json_is_too_much_for_the_bridge(fuzzed, record):
    resource = {"attributes": [{"key": "verl.run.id", "value": {"stringValue": "run-fuzz"}}]}
    request = {"resourceLogs": [{"resource": resource, "scopeLogs": [{"logRecords": [record]}]}]}
    content = json.dumps(request).encode()
    assert_refused_or_taken(fuzzed, "/mlflow/v1/logs", content, {"content-type": "application/json"})


def test_what_can_never_be_handled_is_not_sent_again_and_again(bridge, monkeypatch, verl, caplog):
    """One such request would hold up all that is behind it in the Collector's queue."""
    monkeypatch.setattr(Runs, "handle", lambda *_: 1 / 0)
    content = log_request(verl.step(1, a=1.0)).SerializeToString()
    assert bridge.post("/mlflow/v1/logs", content=content, headers=PROTOBUF).status_code == 400
    assert "it is lost" in caplog.text
    monkeypatch.undo()
    assert_serves(bridge)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/mlflow/v1/logs"), ("PUT", "/mlflow/v1/traces"), ("POST", "/mlflow/v1/metrics")]
)
def test_other_requests_are_refused(bridge, method, path):
    assert bridge.request(method, path).status_code in (404, 405)


# ---- traces


def resource_spans(request, resource, roots, children):
    added = request.resource_spans.add()
    for key, value in resource.items():
        added.resource.attributes.add(key=key).value.string_value = value
    scope = added.scope_spans.add()
    scope.scope.name = "verl_otel"
    for is_root in [True] * roots + [False] * children:
        span = scope.spans.add(name="a", trace_id=b"\1" * 16, span_id=next(_numbers).to_bytes(8, "big"))
        if not is_root:
            span.parent_span_id = b"\2" * 8
    return added


def trace_request(verl, roots, children=0):
    request = ExportTraceServiceRequest()
    resource_spans(request, verl.resource if verl is not None else {}, roots, children)
    return request


def spans_of(parts):
    return [
        (span.span_id, group.resource.SerializeToString(), scope.scope.name)
        for part in parts
        for group in part.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def roots_of(part):
    return sum(
        not span.parent_span_id for group in part.resource_spans for scope in group.scope_spans for span in scope.spans
    )


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 130), st.integers(0, 60)), max_size=4))
@example([(MAX_ROOTS, 0)])
@example([(MAX_ROOTS, 0), (1, 0)])
@example([(0, 0)])
@example([(MAX_ROOTS - 1, 3), (1, 3), (1, 3)])
@example([(3 * MAX_ROOTS, 1)])
def test_no_request_has_too_many_roots_and_no_span_is_lost(shape):
    request = ExportTraceServiceRequest()
    for index, (roots, children) in enumerate(shape):
        resource_spans(request, {"verl.run.id": "run-1", "service.instance.id": str(index)}, roots, children)
    parts = list(traces._parts(list(request.resource_spans)))
    assert all(roots_of(part) <= MAX_ROOTS for part in parts)
    assert all(part.resource_spans for part in parts)
    assert sorted(spans_of(parts)) == sorted(spans_of([request]))
    split = list(traces._split(request))
    assert all(roots_of(part) <= MAX_ROOTS for part in split)
    assert sorted(spans_of(split)) == sorted(spans_of([request]))


class OtlpEndpoint:
    """An HTTP server that takes what MLflow's `/v1/traces` takes, and answers as it is told."""

    def __init__(self):
        self.requests, self.status = [], 200
        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                endpoint.requests.append((self.path, dict(self.headers), ExportTraceServiceRequest.FromString(body)))
                self.send_response(endpoint.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def endpoint():
    endpoint = OtlpEndpoint()
    yield endpoint
    endpoint.close()


def test_spans_go_to_the_experiment_and_run_of_their_run(runs, endpoint):
    one, two = VerlRun(f"run-{next(_numbers)}"), VerlRun(f"run-{next(_numbers)}", project="other")
    request = trace_request(one, 2, 1)
    request.MergeFrom(trace_request(None, 1, 1))
    request.MergeFrom(trace_request(two, 1))
    request.MergeFrom(trace_request(one, MAX_ROOTS))
    assert Traces(runs, endpoint.url).forward(request) == 2
    sent = {}
    for path, headers, body in endpoint.requests:
        assert path == "/v1/traces"
        sent.setdefault((headers["x-mlflow-experiment-id"], headers["x-mlflow-run-id"]), []).append(body)
    expected = {(run.experiment_id, run.run_id) for run in (runs.resolve(one.identity), runs.resolve(two.identity))}
    assert set(sent) == expected
    of_one = runs.resolve(one.identity)
    assert len(spans_of(sent[of_one.experiment_id, of_one.run_id])) == MAX_ROOTS + 3


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, Refused),
        (413, Refused),
        (422, Refused),  # no experiment named
        (501, Refused),  # a store of files
        (404, TryLater),
        (408, TryLater),
        (429, TryLater),
        (500, TryLater),
        (503, TryLater),
    ],
)
def test_an_answer_of_mlflow_says_whether_to_try_again(runs, endpoint, verl, status, error):
    endpoint.status = status
    with pytest.raises(error, match=str(status)):
        Traces(runs, endpoint.url).forward(trace_request(verl, 1))


def test_a_run_that_mlflow_does_not_know_any_more_is_looked_up_again(client, runs, endpoint, verl):
    forwarding = Traces(runs, endpoint.url)
    first = runs.resolve(verl.identity)
    client.delete_run(first.run_id)
    endpoint.status = 404
    with pytest.raises(TryLater):
        forwarding.forward(trace_request(verl, 1))
    endpoint.status = 200
    forwarding.forward(trace_request(verl, 1))
    assert endpoint.requests[0][1]["x-mlflow-run-id"] == first.run_id
    assert endpoint.requests[1][1]["x-mlflow-run-id"] == runs.resolve(verl.identity).run_id != first.run_id


def test_a_server_that_is_away_is_tried_later(runs, nowhere, verl):
    with pytest.raises(TryLater, match="cannot be reached"):
        Traces(runs, nowhere).forward(trace_request(verl, 1))


def test_spans_that_name_no_run_are_a_partial_success(bridge):
    response = bridge.post("/mlflow/v1/traces", content=trace_request(None, 2, 1).SerializeToString(), headers=PROTOBUF)
    assert response.status_code == 200
    assert ExportTraceServiceResponse.FromString(response.content).partial_success.rejected_spans == 3

"""Inputs that broke something once: each stays mended."""

import gzip
import json
import resource
import signal
import subprocess
import sys
import textwrap
import types
import zlib

import pytest
from mlflow.tracking import MlflowClient
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from verl_otel.bridges.events import RunEvent, RunIdentity
from verl_otel.bridges.mlflow.runs import Runs, metric_name
from verl_otel.config import Settings
from verl_otel.identity import Identity
from verl_otel.metrics.recorder import Logged
from verl_otel.recording import reader
from verl_otel.report import page
from verl_otel.semconv.metrics import derived_name
from verl_otel.tracing import propagation, workers
from verl_otel.webserver import Gunzip


class Trainer:
    global_steps = 3


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no message")


@pytest.mark.parametrize("text", ["inf", "1e12"])
def test_endless_numbers_are_no_settings(text, monkeypatch):
    monkeypatch.setenv("VERL_OTEL_TRAJECTORIES", text)
    monkeypatch.setenv("VERL_OTEL_EXIT_TIMEOUT", text)
    settings = Settings.from_environ()
    assert (settings.trajectories, settings.exit_timeout) == (4, 5.0)


def test_an_exception_that_cannot_be_printed_still_ends_stage_and_call(memory):
    process = memory.process()
    process.steps.leave(process.steps.enter("adv"), Unprintable())
    process.workers.leave(process.workers.enter(types.SimpleNamespace(rank=0), "update_actor"), Unprintable())
    assert [(s.name, s.status.description) for s in memory.spans] == [
        ("verl.advantage", "Unprintable"),
        ("verl.worker.update_actor", "Unprintable"),
    ]
    assert memory.points("verl.stage.active") == []


def test_a_failed_device_does_not_cost_the_span_of_the_failed_call(memory, monkeypatch):
    def failed():
        raise RuntimeError("device-side assert")

    cuda = types.SimpleNamespace(is_initialized=lambda: True, memory_allocated=failed)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    process = memory.process("worker")
    process.workers.leave(process.workers.enter(types.SimpleNamespace(rank=0), "update_actor"))
    assert [s.name for s in memory.spans] == ["verl.worker.update_actor"]


def test_our_own_data_is_sent_even_if_the_other_processes_cannot_be_asked(memory):
    process = memory.process()

    def broken(timeout):
        raise RuntimeError("Ray is gone")

    process.steps.leave(process.steps.enter("adv"))
    process.finish(broken)
    assert [s.name for s in memory.spans] == ["verl.advantage"]


@pytest.mark.parametrize("step", [float("nan"), float("inf"), "three", None])
def test_a_step_that_is_no_number_does_not_cost_its_values(memory, step):
    process = memory.process()
    process.recorder.submit(Logged({"a/b": 1.5}, step, 1, process.run_context))
    (event,) = memory.events
    assert dict(event.body) == {"a/b": 1.5} and "verl.step.number" not in event.attributes


@pytest.mark.parametrize("one", ["a", "_a", "a_", "a/_", "_", "A", "a.b", "a/b"])
@pytest.mark.parametrize("other", ["a", "_a", "a_", "a/_", "_", "A", "a.b", "a/b"])
def test_different_keys_have_different_names(one, other):
    assert (derived_name(one) == derived_name(other)) == (one == other)


@pytest.mark.parametrize("key", ["stage/duration", "metric/non_finite", "training/step", "reward/mean", "timing"])
def test_a_key_cannot_take_the_name_of_another_instrument(key):
    assert derived_name(key).startswith("verl." + key.replace("/", ".") + "_")


@pytest.mark.parametrize("key", ["", "/", "@@", "\N{SNOWMAN}"])
def test_a_key_without_a_letter_has_a_name_as_well(key):
    assert derived_name(key).startswith("verl.key_")


@pytest.mark.parametrize(
    ("method", "model"), [("prefill", "none"), ("clear_prefix_cache", "none"), ("compute_ref_log_prob", "ref")]
)
def test_a_method_that_contains_ref_is_not_the_references(method, model):
    assert workers._model_type(None, method, "") == model


def test_a_numpy_rank_is_a_rank():
    import numpy

    assert workers._rank(types.SimpleNamespace(rank=numpy.int64(3))) == "3"


def test_what_precedes_an_unsampled_step_is_not_sampled(clean_process):
    from conftest import Memory

    memory = Memory(sampler=ParentBased(ALWAYS_OFF))
    process = memory.process()
    trainer = Trainer()
    process.steps.follow(trainer)
    process.steps.leave(process.steps.enter("start_profile"))
    assert memory.spans == []


def test_a_generators_throw_and_close_reach_it_in_its_context():
    from opentelemetry import baggage

    seen = []

    def generate():
        try:
            yield 1
        except ValueError:
            seen.append(("thrown", baggage.get_baggage("stage")))
        try:
            yield 2
        finally:
            seen.append(("closed", baggage.get_baggage("stage")))

    carrier = {"baggage": "stage=update"}
    generator = propagation.with_carrier(generate)(**{propagation.CARRIER: carrier})
    assert (next(generator), generator.throw(ValueError())) == (1, 2)
    generator.close()
    assert seen == [("thrown", "update"), ("closed", "update")]


def test_the_users_attributes_win_but_each_process_is_an_instance_of_its_own(monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=mine,verl.run.id=theirs")
    found = [Identity("run", 1, "trainer").resource().attributes for _ in range(2)]
    assert found[0]["verl.run.id"] == "theirs"
    assert all(str(attributes["service.instance.id"]).startswith("mine/") for attributes in found)
    assert found[0]["service.instance.id"] != found[1]["service.instance.id"]


# ---- files, reader, page


def recorded(tmp_path, *lines):
    (tmp_path / "x.jsonl").write_text("".join(line + "\n" for line in lines))
    return tmp_path


def span_line(**span):
    span = {
        "traceId": "a" * 32,
        "spanId": "b" * 16,
        "name": "s",
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "2",
        **span,
    }
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})


def test_an_empty_key_and_lines_of_nonsense_cost_only_themselves(tmp_path):
    body = {"kvlistValue": {"values": [{"value": {"doubleValue": 1.0}}]}}
    log = {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"eventName": "verl.step", "body": body}]}]}]}
    lines = [json.dumps(log), "[" * 200_000, span_line(startTimeUnixNano=float("inf")), span_line()]
    recording = reader.load(recorded(tmp_path, *lines))
    assert [event.body for event in recording.events] == [{"": 1.0}]
    assert (len(recording.spans), recording.unreadable_lines) == (1, 2)


def test_a_span_that_is_its_own_parent_does_not_stop_the_page(tmp_path):
    step = span_line(name="verl.step", spanId="c" * 16)
    circle = span_line(name="verl.generate", parentSpanId="b" * 16)
    assert "verl.generate" in page.render(reader.load(recorded(tmp_path, step, circle)))


def test_markup_in_names_stays_inert(tmp_path):
    name = "<!--<script>"
    text = page.render(
        reader.load(recorded(tmp_path, span_line(name="verl.step", spanId="c" * 16), span_line(name=name)))
    )
    data = text.split('<script id="data" type="application/json">')[1].split("</script>")[0]
    assert "<" not in data
    assert name in [bar["name"] for timeline in json.loads(data)["timelines"] for bar in timeline["bars"]]


def test_a_full_disk_costs_only_the_lines_that_do_not_fit(tmp_path):
    code = """
        import resource, signal
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
        from verl_otel.export.files import _Lines
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))
        lines = _Lines("traces")
        def write(name):
            request = ExportTraceServiceRequest()
            request.resource_spans.add().scope_spans.add().spans.add(name=name)
            return lines.write(request, Resource({}))
        print([write("a"), write("b" * 500), write("d")])
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "[True, False, True]", result.stderr
    (path,) = tmp_path.rglob("*.traces.jsonl")
    names = [json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["name"] for line in path.open()]
    assert names == ["a", "d"]
    assert resource and signal  # what the child uses is what this platform has


def test_a_process_of_the_same_name_does_not_write_into_a_torn_line(tmp_path, monkeypatch):
    import os

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.sdk.resources import Resource

    from verl_otel.export.files import _Lines

    monkeypatch.setenv("VERL_OTEL_FOLDER", str(tmp_path))
    folder = tmp_path / "no-run"
    folder.mkdir()
    path = folder / f"other-{os.uname().nodename}-{os.getpid()}.traces.jsonl"
    path.write_text('{"torn')
    request = ExportTraceServiceRequest()
    request.resource_spans.add().scope_spans.add().spans.add(name="whole")
    assert _Lines("traces").write(request, Resource({}))
    torn, whole = path.read_text().splitlines()
    assert torn == '{"torn' and "whole" in json.loads(whole)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["name"]


# ---- the bridge


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    return MlflowClient(f"sqlite:///{tmp_path_factory.mktemp('hostile')}/mlflow.db")


def event(name, run_id, attempt=1, time=1, body=None, **attributes):
    names = {"verl.run.id": run_id, "verl.run.attempt": attempt, "verl.project.name": "hostile"}
    return RunEvent(name, time, {**names, **attributes}, body or {}, {})


@pytest.mark.parametrize("run_id", ["it's", "100%", "a_b", 'say "x"'])
def test_any_run_id_is_found_again_after_a_restart_of_the_bridge(client, run_id):
    identity = RunIdentity(run_id, "hostile", "e")
    Runs(client).resolve(RunIdentity("other", "hostile", "e"))
    assert Runs(client).resolve(identity) == Runs(client).resolve(identity)


def test_old_events_delivered_again_do_not_end_a_later_attempt(client):
    runs = Runs(client)
    first = [
        event("verl.run.started", "r", 1, 1),
        event("verl.run.finished", "r", 1, 2, **{"verl.run.state": "failed"}),
    ]
    runs.handle([*first, event("verl.run.started", "r", 2, 3)])
    runs.handle(first)
    run = client.get_run(runs.resolve(RunIdentity("r", "hostile", "r")).run_id)
    assert (run.info.status, run.data.tags["verl.run.attempt"]) == ("RUNNING", "2")


def test_a_run_that_somebody_deleted_is_made_again(client):
    runs = Runs(client)
    step = {"verl.step.number": 1}
    runs.handle([event("verl.step", "gone", body={"a": 1.0}, **step)])
    client.delete_run(runs.resolve(RunIdentity("gone", "hostile", "gone")).run_id)
    runs.handle([event("verl.step", "gone", body={"a": 2.0}, **step)])
    again = client.get_run(runs.resolve(RunIdentity("gone", "hostile", "gone")).run_id)
    assert again.data.metrics == {"a": 2.0}


def test_a_step_that_is_no_number_is_not_for_mlflow(client):
    assert Runs(client).handle([event("verl.step", "r", body={"a": 1.0}, **{"verl.step.number": "x"})]) == 1


def test_keys_in_other_scripts_keep_their_letters():
    assert metric_name("奖励/mean") != metric_name("回报/mean")


def test_every_member_of_a_gzip_body_is_read_and_a_cut_one_is_refused():
    gunzip = Gunzip()
    assert gunzip.feed(gzip.compress(b"one ") + gzip.compress(b"two"), 100) == b"one two"
    gunzip.finish()
    cut = Gunzip()
    cut.feed(gzip.compress(b"x" * 1000)[:-9], 10_000)
    with pytest.raises(zlib.error):
        cut.finish()
    assert len(Gunzip().feed(gzip.compress(b"x" * 1_000_000), 1000)) == 1000


# ---- who is a process of a run


@pytest.mark.parametrize(
    ("command", "ray_itself"),
    [
        (["python", "/env/bin/ray", "start", "--head"], True),
        (["python", "-u", "/env/lib/site-packages/ray/dashboard/agent.py"], True),
        (["python", "-m", "verl.trainer.main_ppo"], False),
        (["python", "/home/ray/train.py"], False),
    ],
)
def test_rays_own_processes_do_not_name_a_run(command, ray_itself, monkeypatch):
    from verl_otel import identity

    monkeypatch.setattr(sys, "orig_argv", command)
    assert identity.in_ray_itself() == ray_itself


def test_a_trainer_that_cannot_be_referenced_weakly_is_not_an_error(memory):
    process = memory.process()
    process.steps.follow(types.SimpleNamespace(global_steps=1))
    assert process.steps.number() is None

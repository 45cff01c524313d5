"""OTLP/HTTP exporters behind the SDK's own processors (`export/otlp.py`): requests of bounded size, counted by item."""

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import Counter
from opentelemetry.sdk.metrics.export import AggregationTemporality
from opentelemetry.sdk.resources import Resource
from otlp_server import points, records, spans
from waiting import until

from verl_otel import config, events
from verl_otel.export import otlp, otlp_json, providers, reporting
from verl_otel.export.lifetime import Flusher, Last
from verl_otel.recording import reader

SECRET = "s3cr3t-7731"
RESOURCE = Resource({"verl.run.id": "run-1", "verl.process.role": "trainer"})


@pytest.fixture(autouse=True)
def own_process(monkeypatch, tmp_path):
    """An outbox and counts of the test's own."""
    monkeypatch.setattr(otlp, "_outbox", None)
    monkeypatch.setattr(otlp, "_counts", {})
    monkeypatch.setattr(providers, "_extend", lambda data: data)
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(tmp_path / "verl-otel"))
    yield
    if otlp.current() is not None:
        otlp.current().close(0)


@pytest.fixture
def pipeline(server, monkeypatch):
    """The three providers as they are made where an endpoint is configured."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)

    class Pipeline:
        tracer_provider = providers._tracer_provider(RESOURCE)
        meter_provider = providers._meter_provider(RESOURCE)
        logger_provider = providers._logger_provider(RESOURCE)
        tracer = tracer_provider.get_tracer("test")
        meter = meter_provider.get_meter("test")
        logger = logger_provider.get_logger("test")
        flusher = Flusher((meter_provider, logger_provider, tracer_provider))

        def flush(self, timeout=10.0):
            """As `Telemetry.flush`."""
            assert self.flusher.wait(self.flusher.request(), timeout)
            return otlp.current().flush(timeout)

    yield Pipeline()
    for provider in (Pipeline.tracer_provider, Pipeline.meter_provider, Pipeline.logger_provider):
        provider.shutdown()


def total(outcome, signal=None):
    return sum(n for (of, became, _), n in otlp.counts().items() if became == outcome and signal in {None, of})


def test_what_was_recorded_before_a_flush_has_arrived_after_it(pipeline, server):
    for i in range(700):
        pipeline.tracer.start_span(str(i)).end()
    gauge = pipeline.meter.create_gauge("g")
    for i in range(5):
        gauge.set(i, {"i": i})
    events.emit(pipeline.logger, "verl.step", {"a": 1}, {})
    assert pipeline.flush()
    assert sorted(server.names(), key=int) == [str(i) for i in range(700)]
    assert (server.items("metrics"), server.items("logs")) == (5, 1)
    assert otlp.counts() == {
        ("traces", "delivered", ""): 700,
        ("metrics", "delivered", ""): 5,  # data points, as everywhere
        ("logs", "delivered", ""): 1,
    }


def test_what_was_recorded_before_a_flush_is_on_disk_after_it_where_the_endpoint_hangs(pipeline, server, tmp_path):
    server.fault = "hangs"
    pipeline.tracer.start_span("a").end()
    pipeline.meter.create_counter("c").add(1)
    events.emit(pipeline.logger, "verl.step", {"a": 1}, {})
    start = time.monotonic()
    assert pipeline.flush(1.5)
    assert time.monotonic() - start < 2
    recording = reader.load(tmp_path / "verl-otel" / "run-1" / "spool")
    assert ([span.name for span in recording.spans], len(recording.events)) == (["a"], 1)
    assert total("spooled") == 3


def test_200_spans_with_100_kb_of_text_each_all_arrive(pipeline, server):
    for i in range(200):
        pipeline.tracer.start_span(str(i), attributes={"prompt": "x" * 100_000}).end()
    assert pipeline.flush()
    assert len(server.names()) == 200
    sent = [otlp_json.from_bytes(of, content) for of, content in server.taken if of == "traces"]
    texts = {
        len(a.value.string_value)
        for request in sent
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
        for a in span.attributes
        if a.key == "prompt"
    }
    assert texts == {4096}


@pytest.mark.parametrize(
    ("variables", "length"),
    [
        ({}, 4096),
        ({"OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "7"}, 7),
        ({"OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": "9"}, 9),
        ({"OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": "20000"}, 10_000),
    ],
)
def test_the_length_of_attribute_values_is_limited_as_the_environment_says(monkeypatch, variables, length):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    provider = providers._tracer_provider(RESOURCE)
    span = provider.get_tracer("t").start_span("a", attributes={"a": "x" * 10_000})
    assert len(span.attributes["a"]) == length
    provider.shutdown()


def test_large_requests_are_sent_in_parts_and_only_what_is_too_large_alone_is_lost(pipeline, server, monkeypatch):
    monkeypatch.setattr(otlp, "MAX_REQUEST", 20_000)
    for i in range(300):
        pipeline.tracer.start_span(str(i), attributes={"text": "x" * 400}).end()
    for i in range(10):
        pipeline.tracer.start_span("huge", attributes={f"a{k}": "x" * 4000 for k in range(6 if i == 5 else 1)}).end()
    assert pipeline.flush()
    assert max(len(content) for _, content in server.taken) <= 20_000
    assert sorted(server.names()) == sorted([str(i) for i in range(300)] + ["huge"] * 9)
    assert otlp.counts() == {("traces", "delivered", ""): 309, ("traces", "dropped", "too_large"): 1}


def test_one_metric_with_many_points_is_sent_in_parts(pipeline, server, monkeypatch):
    monkeypatch.setattr(otlp, "MAX_REQUEST", 5000)
    gauge = pipeline.meter.create_gauge("g")
    for i in range(300):
        gauge.set(i, {"rank": str(i)})
    assert pipeline.flush()
    assert len(server.taken) > 3
    assert max(len(content) for _, content in server.taken) <= 5000
    requests = [otlp_json.from_bytes(*one) for one in server.taken]
    metrics = [m for r in requests for g in r.resource_metrics for scope in g.scope_metrics for m in scope.metrics]
    assert sorted(point.as_double or point.as_int for m in metrics for point in m.gauge.data_points) == list(range(300))
    assert {m.name for m in metrics} == {"g"}
    assert total("delivered") == 300


@given(st.sampled_from(["traces", "metrics", "logs"]), st.integers(0, 40), st.integers(1, 2000))
def test_the_parts_of_a_request_have_each_of_its_items_once(signal, count, size):
    make = {"traces": lambda n: spans(*map(str, range(n))), "metrics": points, "logs": records}[signal]
    request = otlp_json.from_bytes(signal, make(count))
    parts, too_large = otlp_json.split(signal, request, size)
    assert all(len(part) <= size for part in parts)
    assert sum(otlp_json.items_of_bytes(signal, part) for part in parts) + too_large == count
    leaves = [
        leaf
        for part in parts
        for found in otlp_json._lists(signal, otlp_json.from_bytes(signal, part))
        for leaf in found
    ]
    all_leaves = [leaf for found in otlp_json._lists(signal, request) for leaf in found]
    if not too_large:
        assert leaves == all_leaves


def test_what_cannot_be_encoded_costs_only_itself(pipeline, server, monkeypatch):
    encode = otlp.encode_spans

    def broken(batch):
        if any(span.name == "bad" for span in batch):
            raise TypeError("cannot be encoded")
        return encode(batch)

    monkeypatch.setattr(otlp, "encode_spans", broken)
    for name in ("a", "bad", "b", "c"):
        pipeline.tracer.start_span(name).end()
    assert pipeline.flush()
    assert sorted(server.names()) == ["a", "b", "c"]
    assert otlp.counts() == {("traces", "delivered", ""): 3, ("traces", "dropped", "not_encodable"): 1}


def test_temporality_is_as_the_environment_says(server, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    (exporter,) = providers._exporters("metrics", RESOURCE)
    assert exporter._preferred_temporality[Counter] is AggregationTemporality.DELTA


def test_how_much_may_wait_in_memory_can_be_set(server, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    monkeypatch.setenv(config.MAX_PENDING, "0.5")
    providers._exporters("traces", RESOURCE)
    assert otlp.current()._max_bytes == 1 << 19


def test_one_thread_for_each_signal_that_is_sent(server, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{server.url}/v1/traces")
    for signal in ("traces", "metrics", "logs"):
        providers._exporters(signal, RESOURCE)
    assert otlp.current().pending() == {"traces": 0}


@pytest.mark.parametrize("mode", ["offline", "online", "disabled", "OFFLINE", "away"])
def test_the_mode(mode, server, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    monkeypatch.setenv("VERL_OTEL_MODE", mode)
    file = mode.lower() == "offline"
    for signal in ("traces", "metrics", "logs"):
        assert providers.exporter_names(signal) == (["verl_otel_file"] if file else ["otlp_proto_http"])
    assert config.sdk_disabled() == (mode == "disabled")
    assert ("VERL_OTEL_MODE" in caplog.text) == (mode == "away")


def test_offline_none_is_still_none(monkeypatch):
    monkeypatch.setenv("VERL_OTEL_MODE", "offline")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert providers.exporter_names("traces") == []


def test_the_last_words_say_what_became_of_everything(pipeline, server, caplog, tmp_path):
    pipeline.tracer.start_span("a").end()
    assert pipeline.flush()
    otlp.close(1)
    assert "items were sent" not in caplog.text  # all is well
    otlp.count("traces", "spooled", 5, "away")
    otlp.count("traces", "replayed", 2, "")
    otlp.count("traces", "dropped", 4, "refused")
    otlp.close(0)
    assert f"1 items were sent, 3 are kept in {tmp_path}/verl-otel/run-1/spool" in caplog.text
    assert "4 are lost" in caplog.text


def test_a_forked_child_counts_for_itself():
    otlp.count("traces", "delivered", 5, "")
    child = os.fork()
    if child == 0:
        os._exit(1 if total("delivered", "traces") else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert total("delivered") == 5


def test_the_last_work_is_done_once_and_nobody_waits_longer_than_agreed():
    done = []
    last = Last("last", lambda: done.append(1))
    assert last.run(10) and last.run(10)
    assert done == [1]
    slow = Last("slow", lambda: time.sleep(1))
    start = time.monotonic()
    assert not slow.run(0.1)
    assert time.monotonic() - start < 0.5
    until(lambda: slow.run(0))


def test_the_last_work_may_fail():
    def broken():
        raise RuntimeError

    assert Last("broken", broken).run(10)


@pytest.mark.parametrize(
    "text",
    [
        f"HTTPConnectionPool(host='h', port=1): Max retries exceeded with url: /v1/{SECRET}?token={SECRET} (by x)",
        f"POST http://user:{SECRET}@h:4318/v1/traces failed",
        f"to https://h:4318/{SECRET}/v1/traces?{SECRET}",
        f"Header format invalid: authorization=Bearer {SECRET}",
        "sent Bearer tok/en",
    ],
)
def test_messages_of_others_are_passed_on_without_secrets(text, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer {SECRET},b=Bearer%20tok%2Fen")
    shown = reporting.without_secrets(text)
    assert SECRET not in shown and "tok/en" not in shown
    assert reporting.without_secrets("StatusCode.UNAVAILABLE to h:4317") == "StatusCode.UNAVAILABLE to h:4317"


def test_headers_that_cannot_be_read_are_not_logged_by_opentelemetry_either(monkeypatch, caplog, server):
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"{SECRET}")
    reporting.install()
    OTLPSpanExporter().shutdown()
    (exporter,) = providers._exporters("traces", RESOURCE)
    exporter.shutdown()
    assert caplog.text.count("OTEL_EXPORTER_OTLP_HEADERS") == 1
    assert SECRET not in caplog.text

"""Local recordings (`export/files.py`): what a real pipeline exports is read back unchanged, and by the owner only."""

import json
import math
import os
import stat

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import LogRecordExportResult, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.trace import Link, Status, StatusCode

from verl_otel import border, events
from verl_otel.export import files, otlp_json
from verl_otel.export.files import FileLogExporter, FileMetricExporter, FileSpanExporter
from verl_otel.recording import reader

BODY = {
    "exact": 0.1 + 0.2,
    "tiny": 5e-324,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "large": 9_007_199_254_740_993,
    "largest": 2**63 - 1,
    "smallest": -(2**63),
    "yes": True,
    "奖励/均值": "中文 \u2028 \U0001f600 </script>",
    "list": [1, 2.5, "a"],
    "map": {"inner": 1},
}


def resource(run_id="run-1", role="trainer"):
    return Resource({"verl.run.id": run_id, "verl.process.role": role, "service.name": "verl-trainer"})


class Pipeline:
    """The three providers with the file exporters."""

    def __init__(self, of=None):
        of = of or resource()
        self.span_exporter, self.metric_exporter, self.log_exporter = (
            FileSpanExporter(),
            FileMetricExporter(),
            FileLogExporter(),
        )
        self.tracer_provider = TracerProvider(resource=of, shutdown_on_exit=False)
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self.span_exporter))
        self.metric_reader = PeriodicExportingMetricReader(self.metric_exporter, export_interval_millis=3_600_000)
        self.meter_provider = MeterProvider([self.metric_reader], resource=of, shutdown_on_exit=False)
        self.logger_provider = LoggerProvider(resource=of, shutdown_on_exit=False)
        self.logger_provider.add_log_record_processor(SimpleLogRecordProcessor(self.log_exporter))
        self.tracer = self.tracer_provider.get_tracer("test")
        self.meter = self.meter_provider.get_meter("test")
        self.logger = self.logger_provider.get_logger("test")

    def shutdown(self):
        for provider in (self.tracer_provider, self.meter_provider, self.logger_provider):
            provider.shutdown()


@pytest.fixture
def root(tmp_path, monkeypatch):
    folder = tmp_path / "recordings"
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(folder))
    return folder


@pytest.fixture
def pipeline(root):
    made = []

    def make(of=None):
        made.append(Pipeline(of))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


def lines(folder, signal):
    return [json.loads(line) for path in folder.rglob(f"*.{signal}.jsonl") for line in path.read_bytes().splitlines()]


def same(a, b):
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and type(a) is type(b)


def test_spans_are_read_back_as_they_were(pipeline, root):
    p = pipeline()
    elsewhere = p.tracer.start_span("elsewhere", context=Context())
    parent = p.tracer.start_span("verl.step", context=Context(), links=[Link(elsewhere.get_span_context())])
    child = p.tracer.start_span(
        "verl.rollout 中文",
        trace.set_span_in_context(parent, Context()),
        attributes={"rank": "0", "n": 2**62, "x": 0.1},
    )
    child.set_status(Status(StatusCode.ERROR, "boom"))
    child.end()
    parent.end()
    elsewhere.end()
    found = {span.name: span for span in reader.load(root).spans}
    assert set(found) == {"verl.step", "verl.rollout 中文", "elsewhere"}
    step, rollout = found["verl.step"], found["verl.rollout 中文"]
    assert step.trace_id == f"{parent.get_span_context().trace_id:032x}"
    assert step.span_id == f"{parent.get_span_context().span_id:016x}"
    assert step.parent_id == ""
    assert rollout.parent_id == step.span_id
    assert (rollout.start, rollout.end) == (child.start_time, child.end_time)
    assert rollout.seconds == (child.end_time - child.start_time) / 1e9
    assert same(rollout.attributes, {"rank": "0", "n": 2**62, "x": 0.1})
    assert (rollout.error, step.error) == ("boom", None)
    assert step.links == (f"{elsewhere.get_span_context().trace_id:032x}",)
    assert step.resource["verl.run.id"] == "run-1"


def test_events_are_read_back_as_they_were(pipeline, root):
    p = pipeline()
    span = p.tracer.start_span("verl.step", context=Context())
    context = trace.set_span_in_context(span, Context())
    events.emit(
        p.logger, "verl.step", BODY, {"verl.step.number": 7}, context=context, time_ns=1_800_000_000_123_456_789
    )
    (event,) = reader.load(root).events
    assert event.name == "verl.step"
    assert event.time == 1_800_000_000_123_456_789
    assert same(event.body, BODY)
    assert event.attributes == {"verl.step.number": 7}
    assert event.trace_id == f"{span.get_span_context().trace_id:032x}"
    assert event.resource["verl.process.role"] == "trainer"


def test_metrics_land_as_lines_of_otlp_json(pipeline, root):
    p = pipeline()
    with p.tracer.start_as_current_span("a") as span:
        p.meter.create_histogram("verl.stage.duration", "s").record(0.25, {"rank": "all"})
    p.meter.create_counter("verl.otel.dropped").add(3)
    p.meter_provider.force_flush()
    (line, *_) = lines(root, "metrics")
    (group,) = line["resourceMetrics"]
    metrics = {m["name"]: m for scope in group["scopeMetrics"] for m in scope["metrics"]}
    assert metrics["verl.otel.dropped"]["sum"]["dataPoints"][0]["asInt"] == "3"
    (point,) = metrics["verl.stage.duration"]["histogram"]["dataPoints"]
    assert point["sum"] == 0.25
    (exemplar,) = point["exemplars"]
    assert exemplar["traceId"] == f"{span.get_span_context().trace_id:032x}"
    assert {"key": "verl.run.id", "value": {"stringValue": "run-1"}} in group["resource"]["attributes"]


def test_ids_are_hex_as_otlp_json_wants_them(pipeline, root):
    with pipeline().tracer.start_as_current_span("a", context=Context()) as span:
        pass
    (line,) = lines(root, "traces")
    (found,) = line["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert found["traceId"] == f"{span.get_span_context().trace_id:032x}"
    assert found["spanId"] == f"{span.get_span_context().span_id:016x}"


def test_each_process_and_signal_has_a_file_of_its_own_in_the_folder_of_the_run(pipeline, root):
    p = pipeline()
    p.tracer.start_span("a", context=Context()).end()
    p.meter.create_counter("c").add(1)
    p.meter_provider.force_flush()
    events.emit(p.logger, "verl.step", {"a": 1}, {})
    me = f"trainer-{os.uname().nodename}-{os.getpid()}"
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*.*")) == [
        f"run-1/{me}.logs.jsonl",
        f"run-1/{me}.metrics.jsonl",
        f"run-1/{me}.traces.jsonl",
    ]


@pytest.mark.parametrize(
    ("environ", "copies"),
    [
        ({"OTEL_TRACES_EXPORTER": "otlp,verl_otel_file", "OTEL_METRICS_EXPORTER": "verl_otel_file"}, {"traces"}),
        (
            {"OTEL_TRACES_EXPORTER": "verl_otel_file,otlp", "OTEL_LOGS_EXPORTER": "otlp,verl_otel_file"},
            {"traces", "logs"},
        ),
        ({"OTEL_TRACES_EXPORTER": "otlp,verl_otel_file", "VERL_OTEL_MODE": "offline"}, set()),
        # The SDK's own exporter gives up what it cannot send.
        ({"OTEL_TRACES_EXPORTER": "otlp,verl_otel_file", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, set()),
        # The exporter is in providers of the user's own.
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, set()),
    ],
)
def test_a_file_with_what_its_process_sends_itself_says_so(pipeline, root, monkeypatch, environ, copies):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    p = pipeline()
    p.tracer.start_span("a", context=Context()).end()
    p.meter.create_counter("c").add(1)
    p.meter_provider.force_flush()
    events.emit(p.logger, "verl.step", {"a": 1}, {})
    named = {path.name.split(".", 1)[1] for path in root.rglob("*.jsonl")}
    signals = ("traces", "metrics", "logs")
    assert named == {f"{signal}.copy.jsonl" if signal in copies else f"{signal}.jsonl" for signal in signals}
    assert reader.newest(root) == root / "run-1"
    assert len(reader.load(root).spans) == 1


def test_only_the_owner_can_read_a_recording(pipeline, root):
    mask = os.umask(0)
    try:
        p = pipeline()
        p.tracer.start_span("a", context=Context()).end()
        p.meter.create_counter("c").add(1)
        p.meter_provider.force_flush()
        events.emit(p.logger, "verl.step", {"a": 1}, {})
    finally:
        os.umask(mask)
    assert stat.S_IMODE((root / "run-1").stat().st_mode) == 0o700
    modes = [stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*.jsonl")]
    assert modes == [0o600] * 3


def test_spans_of_several_resources_go_to_lines_of_their_own(root):
    exporter = FileSpanExporter()
    spans = []
    for run in ("run-1", "run-1", "run-2"):
        span = TracerProvider(resource=resource(run), shutdown_on_exit=False).get_tracer("t").start_span(run)
        span.end()
        spans.append(span)
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    assert len(lines(root, "traces")) == 3
    assert sorted(span.resource["verl.run.id"] for span in reader.load(root).spans) == ["run-1", "run-1", "run-2"]
    exporter.shutdown()


def test_a_folder_that_cannot_be_written_is_a_failure_with_one_warning_per_signal(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(tmp_path / "file" / "recordings"))
    p = Pipeline()
    span = p.tracer.start_span("a", context=Context())
    for _ in range(3):
        assert p.span_exporter.export([span]) is SpanExportResult.FAILURE
        events.emit(p.logger, "verl.step", {"a": 1}, {})
    assert p.log_exporter.export([]) is LogRecordExportResult.SUCCESS  # nothing to write
    p.meter.create_counter("c").add(1)
    results = []
    export = p.metric_exporter.export
    p.metric_exporter.export = lambda *args, **kwargs: results.append(export(*args, **kwargs)) or results[-1]
    p.metric_reader.force_flush()
    assert results == [MetricExportResult.FAILURE]
    ours = [record.getMessage() for record in caplog.records if record.name == "verl_otel"]
    assert len(ours) == 3
    assert all("VERL_OTEL_FOLDER" in message for message in ours)
    assert border.failures() == {"writing traces": 3, "writing logs": 3, "writing metrics": 1}
    p.shutdown()


def test_a_folder_that_can_be_written_later_is_used_then(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(tmp_path / "file" / "recordings"))
    exporter = FileSpanExporter()
    span = TracerProvider(resource=resource(), shutdown_on_exit=False).get_tracer("t").start_span("a")
    span.end()
    assert exporter.export([span]) is SpanExportResult.FAILURE
    (tmp_path / "file").unlink()
    assert exporter.export([span]) is SpanExportResult.SUCCESS
    assert [found.name for found in reader.load(tmp_path).spans] == ["a"]
    exporter.shutdown()


def test_a_file_that_is_large_enough_takes_no_more(pipeline, root, monkeypatch, caplog):
    monkeypatch.setattr(files, "MAX_BYTES", 500)
    p = pipeline()
    for _ in range(20):
        p.tracer.start_span("a", context=Context()).end()
    (path,) = root.rglob("*.traces.jsonl")
    assert 500 <= path.stat().st_size < 2000
    assert caplog.text.count("takes no more") == 1


@pytest.mark.parametrize("run_id", ["../../x", "/etc", "..", ".", "", "a/b", "...", "a\0b", "a\nb", "~root", ".hidden"])
def test_a_hostile_run_id_cannot_lead_out_of_the_folder(pipeline, root, run_id):
    pipeline(resource(run_id)).tracer.start_span("a", context=Context()).end()
    (path,) = root.parent.rglob("*.jsonl")
    assert path.resolve().parent.parent == root.resolve()
    assert not path.parent.name.startswith(".")


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@example("../" * 20)
@example("-rf")
def test_any_run_id_is_one_folder_below_the_root(run_id):
    folder = files.run_folder("/folder/of/recordings", run_id)
    assert os.path.dirname(os.path.normpath(folder)) == "/folder/of/recordings"
    assert "\0" not in folder


def test_a_usual_run_id_is_the_name_of_its_folder():
    assert files.run_folder("/r", "20261129-155413-3f9a1c") == "/r/20261129-155413-3f9a1c"


def test_a_torn_last_line_loses_only_that_line(pipeline, root):
    p = pipeline()
    for name in ("first", "second", "last"):
        p.tracer.start_span(name, context=Context()).end()
    (path,) = root.rglob("*.traces.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    recording = reader.load(root)
    assert [span.name for span in recording.spans] == ["first", "second"]
    assert recording.unreadable_lines == 1


@pytest.mark.parametrize("line", [b"", b"null", b"7", b"[]", b'"a"', b"{", b"\xff\xfe", b'{"resourceSpans": 3}'])
def test_a_foreign_line_is_counted_and_the_rest_is_read(pipeline, root, line):
    pipeline().tracer.start_span("a", context=Context()).end()
    (path,) = root.rglob("*.traces.jsonl")
    path.write_bytes(line + b"\n" + path.read_bytes())
    recording = reader.load(root)
    assert [span.name for span in recording.spans] == ["a"]
    assert recording.unreadable_lines == 1


def test_a_forked_process_writes_to_a_file_of_its_own(pipeline, root):
    p = pipeline()
    p.tracer.start_span("parent", context=Context()).end()
    child = os.fork()
    if child == 0:
        try:
            span = p.tracer.start_span("child", context=Context())
            span.end()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    # Of traces only: in a forked child the SDK lets readers that were shut down, of other tests, collect once more.
    assert sorted(path.name.rsplit("-", 1)[1] for path in root.rglob("*.traces.jsonl")) == sorted(
        [f"{os.getpid()}.traces.jsonl", f"{child}.traces.jsonl"]
    )
    assert sorted(span.name for span in reader.load(root).spans) == ["child", "parent"]


def test_after_shutdown_what_was_written_is_complete(pipeline, root):
    p = pipeline()
    p.tracer.start_span("a", context=Context()).end()
    p.shutdown()
    p.span_exporter.shutdown()
    (path,) = root.rglob("*.traces.jsonl")
    assert path.read_bytes().endswith(b"}\n")


names = st.text(min_size=1, max_size=20)
values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.dictionaries(names, values, max_size=5))
def test_any_event_is_read_back_as_it_was(memory, body):
    events.emit(memory.logger, "verl.step", body, {})
    request = json.loads(otlp_json.to_line(encode_logs(memory.logs[-1:])))
    (event,) = reader._events(request)
    assert same(event.body, body)

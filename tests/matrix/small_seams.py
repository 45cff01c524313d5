"""Run by test_pythons.py in a small environment: the seams of the real verl that import without torch and Ray."""

import importlib
import importlib.metadata
import sys
import types
from pathlib import Path

import pytest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from verl_otel import VerlInstrumentor, border, telemetry
from verl_otel.tracing.ids import DerivedIdGenerator


@pytest.fixture
def seen():
    """The files of the wheel, in packages without their `__init__` (which imports torch); verl-otel at work."""
    wheel = Path(str(importlib.metadata.distribution("verl").locate_file("verl")))
    for name, folder in {"verl": wheel, "verl.utils": wheel / "utils"}.items():
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    spans, logs = InMemorySpanExporter(), InMemoryLogRecordExporter()
    tracer_provider = TracerProvider(id_generator=DerivedIdGenerator(), shutdown_on_exit=False)
    tracer_provider.add_span_processor(SimpleSpanProcessor(spans))
    logger_provider = LoggerProvider(shutdown_on_exit=False)
    logger_provider.add_log_record_processor(SimpleLogRecordProcessor(logs))
    instrumentor = VerlInstrumentor()
    instrumentor.instrument(
        skip_dep_check=True,
        tracer_provider=tracer_provider,
        meter_provider=MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False),
        logger_provider=logger_provider,
    )
    yield spans, logs
    instrumentor.uninstrument()
    assert border.failures() == {}


def test_what_the_real_tracking_logs_is_a_step_event_and_in_its_own_file(seen, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))
    tracking = importlib.import_module("verl.utils.tracking")
    tracker = tracking.Tracking("project", "experiment", default_backend=["file"], config={"trainer": {"nnodes": 1}})
    tracker.log(data={"critic/score/mean": 0.1234567890123, "actor/grad_norm": 2}, step=7)
    assert telemetry.current().background.drained(10)
    (event,) = [log.log_record for log in seen[1].get_finished_logs() if log.log_record.event_name == "verl.step"]
    assert event.attributes["verl.step.number"] == 7
    assert dict(event.body) == {"critic/score/mean": 0.1234567890123, "actor/grad_norm": 2}
    tracker.finish()
    (written,) = tmp_path.rglob("*.jsonl")
    assert "0.1234567890123" in written.read_text()

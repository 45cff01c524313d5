"""What all unit tests share: a clean process around each test, and real SDK pipelines that export to memory."""

import atexit
import os
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import settings
from opentelemetry import context as otel_context
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp_server import Server

from verl_otel import background as background_module
from verl_otel import border
from verl_otel.assembly import Telemetry
from verl_otel.background import Background
from verl_otel.config import Settings
from verl_otel.identity import Identity
from verl_otel.tracing.ids import DerivedIdGenerator

os.environ.setdefault("DO_NOT_TRACK", "true")  # MLflow would report that it is used

settings.register_profile("unit", database=None, deadline=None, derandomize=True)
settings.load_profile("unit")

READ_FROM_THE_ENVIRONMENT = (
    "OTEL_",
    "VERL_OTEL_",
    "TRACEPARENT",
    "TRACESTATE",
    "BAGGAGE",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RANK",
    "TORCHELASTIC_RUN_ID",
    "PYTHONPATH",
)


@pytest.fixture(autouse=True)
def clean_process(monkeypatch):
    """No setting of the machine gets into a test, no warning is spent already, and no test leaks its context."""
    for variable in list(os.environ):
        if variable.startswith(READ_FROM_THE_ENVIRONMENT):
            monkeypatch.delenv(variable)
    border._counts.clear()
    before = otel_context.get_current()
    yield
    assert otel_context.get_current() == before, "the test left a context attached"
    border._counts.clear()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Background threads look at what is pending often, and sleep when the test is over."""
    made, original = [], Background.__init__

    def __init__(self, *args):
        original(self, *args)
        made.append(self)

    monkeypatch.setattr(Background, "__init__", __init__)
    monkeypatch.setattr(background_module, "INTERVAL", 0.002)
    yield
    for background in made:
        background._pending.append((threading.Event().wait, ()))


class Memory:
    """Tracer, meter and logger of the real SDK, and what they exported."""

    def __init__(self, sampler=None, id_generator=None):
        self._spans, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracer_provider = TracerProvider(
            sampler=sampler, id_generator=id_generator or DerivedIdGenerator(), shutdown_on_exit=False
        )
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.meter_provider = MeterProvider([self._reader], shutdown_on_exit=False)
        self._logs = InMemoryLogRecordExporter()
        self.logger_provider = LoggerProvider(shutdown_on_exit=False)
        self.logger_provider.add_log_record_processor(SimpleLogRecordProcessor(self._logs))
        self.tracer = self.tracer_provider.get_tracer("test")
        self.meter = self.meter_provider.get_meter("test")
        self.logger = self.logger_provider.get_logger("test")
        self._backgrounds = []

    def process(self, role="trainer", run=None, **identity):
        """The telemetry of a process of the run `run-1` on this pipeline.

        Args:
            run: the span of the run, whose context the process gets from its launcher.
            identity: what else `Identity` takes.
        """
        environ = pytest.MonkeyPatch()
        if run is not None:
            context = run.get_span_context()
            environ.setenv("TRACEPARENT", f"00-{context.trace_id:032x}-{context.span_id:016x}-01")
        settings = Settings.from_environ()
        made = Telemetry(
            settings,
            Identity(**{"run_id": "run-1", "attempt": 1, "role": role, **identity}),
            tracer_provider=self.tracer_provider,
            meter_provider=self.meter_provider,
            logger_provider=self.logger_provider,
        )
        environ.undo()
        atexit.unregister(made._at_exit)
        self._backgrounds.append(made.background)
        return made

    def settle(self):
        """Wait for what is recorded in the background."""
        assert all(background.drained(30) for background in self._backgrounds)

    @property
    def spans(self):
        """The ended spans, in order of their start."""
        self.settle()
        return sorted(self._spans.get_finished_spans(), key=lambda span: span.start_time)

    def span(self, name):
        (found,) = [span for span in self.spans if span.name == name]
        return found

    @property
    def logs(self):
        self.settle()
        return list(self._logs.get_finished_logs())

    @property
    def events(self):
        return [log.log_record for log in self.logs]

    def points(self, name):
        """The current points of a metric."""
        self.settle()
        data = self._reader.get_metrics_data()
        metrics = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics] if data else []
        return [point for metric in metrics if metric.name == name for point in metric.data.data_points]

    def values(self, name, *labels):
        """The current values of a metric, by the values of some of its labels."""
        return {tuple(p.attributes.get(label) for label in labels): p.value for p in self.points(name)}

    def tree(self):
        """The traces as a nested dict: name of a span -> its children. A second span of a name is `name (2)`."""
        spans = self.spans
        known = {span.context.span_id for span in spans}

        def below(parent_id):
            children = {}
            for span in spans:
                parent = span.parent.span_id if span.parent is not None else None
                parent = parent if parent in known else None
                if parent == parent_id:
                    name, count = span.name, 2
                    while name in children:
                        name, count = f"{span.name} ({count})", count + 1
                    children[name] = below(span.context.span_id)
            return children

        return below(None)


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def new_memory():
    """Make further pipelines, as of other processes, or with another sampler or id generator."""
    return Memory


@pytest.fixture
def server():
    """An OTLP endpoint that takes everything, until its `fault` says otherwise."""
    with Server() as server:
        yield server


@pytest.fixture
def clock(monkeypatch):
    """What `time.perf_counter` says, for durations that a test wants to know."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock

"""The OpenTelemetry providers of a verl process, made from `OTEL_*` variables.

A provider that is set already (by the user, their distro, or the caller) is used as it is. Otherwise the SDK's own
classes are put together the way `opentelemetry-instrument` does, with three differences: exporters default to local
files when no OTLP endpoint is configured, delays are short, and the end of the process is ours to bound
(`verl_otel.export.lifetime`), because the SDK's own exit handlers take as long as a dead collector makes them.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from opentelemetry import _logs, metrics, trace
from opentelemetry._logs import LoggerProvider
from opentelemetry.metrics import MeterProvider
from opentelemetry.sdk import _logs as sdk_logs
from opentelemetry.sdk import metrics as sdk_metrics
from opentelemetry.sdk import trace as sdk_trace
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import ProxyTracerProvider, TracerProvider

from verl_otel import border, config
from verl_otel.export import reporting
from verl_otel.tracing.ids import DerivedIdGenerator

FILE_EXPORTER = "verl_otel_file"
OTLP_HTTP, OTLP_GRPC = "otlp_proto_http", "otlp_proto_grpc"
PROMETHEUS = "prometheus"
"""Served by our own reader: the stock one of this name has one port for all processes of a node."""

_PACKAGES = {PROMETHEUS: "'verl-otel[prometheus]'", OTLP_GRPC: "opentelemetry-exporter-otlp-proto-grpc"}
_USUAL = ("otlp", FILE_EXPORTER, "console", PROMETHEUS, "none")

SPAN_DELAY_MS = 500
EVENT_DELAY_MS = 500
METRIC_INTERVAL_MS = 10_000
"""Defaults for `OTEL_BSP_SCHEDULE_DELAY`, `OTEL_BLRP_SCHEDULE_DELAY`, `OTEL_METRIC_EXPORT_INTERVAL`. Short, since Ray
ends workers without running exit handlers; a step's values leave at once besides (`verl_otel.export.lifetime`)."""

MAX_ATTRIBUTE_LENGTH = 4096
"""Characters of an attribute value of a span, where neither of these variables says it."""

_LENGTH_LIMITS = ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT")

_made: list[Any] = []

Extend = Callable[[MetricsData], MetricsData]
_extend: Extend = lambda data: data  # noqa: E731
"""Adds, at each export, what the SDK's instruments cannot take (`verl_otel.metrics.distributions`)."""

AddWithdrawn = Callable[[MetricsData, int], tuple[MetricsData, int]]
_add_withdrawn: AddWithdrawn = lambda data, after: (data, after)  # noqa: E731
"""Adds the series that have ended since the exporter's last export (`verl_otel.metrics.withdrawn`)."""


@dataclass(frozen=True)
class Providers:
    """The three providers of this process."""

    tracer: TracerProvider
    meter: MeterProvider
    logger: LoggerProvider

    @property
    def meter_is_ours(self) -> bool:
        """Whether the meter provider was made here, so that its exports are extended."""
        return self.meter in _made

    def exporters(self) -> dict[str, list[str]]:
        """By signal the exporters of the providers that were made here: where others send is not known."""
        signals = {"traces": self.tracer, "metrics": self.meter, "logs": self.logger}
        return {signal: exporter_names(signal) for signal, provider in signals.items() if provider in _made}

    def shut_down_ours(self) -> None:
        """Shut down those that were made here; called at the end of the process, since they stay the global ones."""
        for provider in (self.meter, self.logger, self.tracer):
            if provider in _made:
                try:
                    provider.shutdown()  # type: ignore[attr-defined]
                except Exception:
                    border.caught("shutting down")


def make(
    resource: Resource,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    logger_provider: LoggerProvider | None = None,
    *,
    extend_metrics: Extend | None = None,
    add_withdrawn: AddWithdrawn | None = None,
) -> Providers:
    """The providers to use: the given ones, else the global ones if somebody set them, else new ones, set globally.

    Args:
        extend_metrics: called with what the SDK has collected, before each export of a meter provider made here.
        add_withdrawn: called then too, for exporters that can say that a series has ended.
    """
    global _extend, _add_withdrawn
    if extend_metrics is not None:
        _extend = extend_metrics
    if add_withdrawn is not None:
        _add_withdrawn = add_withdrawn

    def choose(given: Any, current: Any, build: Callable[[Resource], Any], publish: Callable[[Any], None]) -> Any:
        if given is not None:
            return given
        if not _is_unset(current):
            return current
        reporting.install()
        provider = build(resource)
        publish(provider)
        _made.append(provider)
        return provider

    return Providers(
        choose(tracer_provider, trace.get_tracer_provider(), _tracer_provider, trace.set_tracer_provider),
        choose(meter_provider, metrics.get_meter_provider(), _meter_provider, metrics.set_meter_provider),
        choose(logger_provider, _logs.get_logger_provider(), _logger_provider, _logs.set_logger_provider),
    )


def _is_unset(provider: object) -> bool:
    return isinstance(provider, ProxyTracerProvider) or type(provider).__name__ in {
        "_ProxyMeterProvider",
        "ProxyLoggerProvider",
    }


def exporter_names(signal: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """The exporters of a signal (`traces`, `metrics` or `logs`): `OTEL_<SIGNAL>_EXPORTER`, else OTLP if an endpoint is
    configured, else local files. Empty if the user wants none."""
    env = os.environ if environ is None else environ
    names = [name.strip() for name in env.get(f"OTEL_{signal.upper()}_EXPORTER", "").split(",") if name.strip()]
    if config.mode(env) == config.OFFLINE:
        return [] if "none" in names else [FILE_EXPORTER]
    if not names:
        specific = f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"
        configured = env.get("OTEL_EXPORTER_OTLP_ENDPOINT") or env.get(specific)
        names = ["otlp" if configured else FILE_EXPORTER]
    if "none" in names:
        return []
    protocol = env.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL") or env.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"
    )
    otlp = OTLP_GRPC if protocol.strip() == "grpc" else OTLP_HTTP
    return [otlp if name == "otlp" else name for name in names]


def what_to_do_without(name: str) -> str:
    """About an exporter that is not installed. A package is named only where it is known: one of a misspelt name may be
    anybody's."""
    package = _PACKAGES.get(name)
    if package:
        return f"pip install {package} in the training environment, or unset the variable"
    return f"correct the name ({', '.join(_USUAL)}), or install the package that has it in the training environment"


def _exporters(signal: str, resource: Resource) -> list[Any]:
    """New exporters of a signal. One that cannot be made is reported, with what to do, and left out."""
    made = []
    for name in exporter_names(signal):
        found = list(entry_points(group=f"opentelemetry_{signal}_exporter", name=name))
        if not found:
            border.warn_once(
                f"exporter {name}",
                "the exporter %r asked for by OTEL_%s_EXPORTER or its protocol is not installed: %s",
                name,
                signal.upper(),
                what_to_do_without(name),
            )
            continue
        try:
            made.append(_make(name, found[0], signal, resource))
        except Exception as error:
            border.warn_once(
                f"exporter {name} ({type(error).__name__})",
                "the exporter %r cannot be made (%s: %s): check the OTEL_EXPORTER_* variables",
                name,
                type(error).__name__,
                reporting.without_secrets(str(error)),
            )
    return made


def _make(name: str, found: Any, signal: str, resource: Resource) -> Any:
    if name == PROMETHEUS:
        return _prometheus_reader(resource)
    if name == OTLP_HTTP:
        from verl_otel.export import otlp

        exporters = {
            "traces": otlp.OtlpSpanExporter,
            "metrics": otlp.OtlpMetricExporter,
            "logs": otlp.OtlpLogExporter,
        }
        return exporters[signal](otlp.outbox(resource, signal))
    return found.load()()


def _prometheus_reader(resource: Resource) -> MetricReader:
    from verl_otel.export.prometheus import PrometheusReader  # needs packages that may not be installed

    return PrometheusReader(resource, lambda data: _extend(data))


class _Extended(MetricExporter):
    """An exporter that is given what the SDK has collected and what is added to it.

    Of a forked child it exports nothing: the SDK's reader goes on there with the sums and gauges of its parent, as if
    they were another process's, so that each would be there twice.
    """

    def __init__(self, exporter: MetricExporter) -> None:
        super().__init__(exporter._preferred_temporality, exporter._preferred_aggregation)
        self._exporter = exporter
        self._withdrawn = 0
        self._pid = os.getpid()

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        if os.getpid() != self._pid:
            return MetricExportResult.SUCCESS
        data, withdrawn = _extend(metrics_data), self._withdrawn
        if getattr(self._exporter, "says_what_ends", False):
            data, withdrawn = _add_withdrawn(data, withdrawn)
        result = self._exporter.export(data, timeout_millis, **kwargs)
        if result is MetricExportResult.SUCCESS:
            self._withdrawn = withdrawn
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self._exporter.shutdown(timeout_millis, **kwargs)


def _milliseconds(variable: str, default: float) -> float:
    return config.number(os.environ, variable, default, 1)


def _span_limits() -> sdk_trace.SpanLimits:
    """As the environment says, with a length of attribute values that cannot make a batch too large."""
    asked = any(os.environ.get(name, "").strip() for name in _LENGTH_LIMITS)
    return sdk_trace.SpanLimits() if asked else sdk_trace.SpanLimits(max_attribute_length=MAX_ATTRIBUTE_LENGTH)


def _tracer_provider(resource: Resource) -> sdk_trace.TracerProvider:
    provider = sdk_trace.TracerProvider(
        resource=resource, shutdown_on_exit=False, id_generator=DerivedIdGenerator(), span_limits=_span_limits()
    )
    for exporter in _exporters("traces", resource):
        delay = _milliseconds("OTEL_BSP_SCHEDULE_DELAY", SPAN_DELAY_MS)
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=delay))
    return provider


def _meter_provider(resource: Resource) -> sdk_metrics.MeterProvider:
    interval = _milliseconds("OTEL_METRIC_EXPORT_INTERVAL", METRIC_INTERVAL_MS)
    readers = [
        exporter if isinstance(exporter, MetricReader) else PeriodicExportingMetricReader(_Extended(exporter), interval)
        for exporter in _exporters("metrics", resource)
    ]
    readers.sort(key=lambda reader: isinstance(reader, PeriodicExportingMetricReader))  # shut down last: it may wait
    return sdk_metrics.MeterProvider(resource=resource, shutdown_on_exit=False, metric_readers=readers)


def _logger_provider(resource: Resource) -> sdk_logs.LoggerProvider:
    provider = sdk_logs.LoggerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in _exporters("logs", resource):
        delay = _milliseconds("OTEL_BLRP_SCHEDULE_DELAY", EVENT_DELAY_MS)
        provider.add_log_record_processor(BatchLogRecordProcessor(exporter, schedule_delay_millis=delay))
    return provider

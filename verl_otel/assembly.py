"""Everything that one process of a run has to do with telemetry, put together.

Imported only when telemetry is made (`verl_otel.telemetry`): it needs the SDK, which a process that never uses verl is
not to pay for, and which raises at import when an `OTEL_*` variable is malformed.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from opentelemetry import propagate
from opentelemetry._logs import LoggerProvider, SeverityNumber
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.trace import TracerProvider, set_span_in_context

from verl_otel import border, events
from verl_otel.config import Settings
from verl_otel.export import lifetime, providers
from verl_otel.identity import LAUNCHER, TRAINER, Identity
from verl_otel.metrics.recorder import Gauges, Recorder
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.tracing import ids
from verl_otel.tracing.errors import describe, fail
from verl_otel.tracing.steps import Steps
from verl_otel.tracing.trajectories import Trajectories
from verl_otel.tracing.workers import Workers
from verl_otel.version import __version__

SCOPE = "verl_otel"

_EXIT_SHARE = {LAUNCHER: 0.3, TRAINER: 0.7}  # they end one after the other: together they keep the limit


def _observe_failures(_: CallbackOptions) -> list[Observation]:
    return [Observation(count, {"site": site}) for site, count in border.failures().items()]


class Telemetry:
    """Tracer, meter, logger and what is built on them, for one process of a run."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        logger_provider: LoggerProvider | None = None,
    ) -> None:
        self.settings = settings
        self.identity = identity
        self.providers = providers.make(identity.resource(), tracer_provider, meter_provider, logger_provider)
        self.tracer = self.providers.tracer.get_tracer(SCOPE, __version__)
        self.meter = self.providers.meter.get_meter(SCOPE, __version__)
        self.logger = self.providers.logger.get_logger(SCOPE, __version__)

        self.budget = lifetime.Budget(settings.exit_timeout * _EXIT_SHARE.get(identity.role, 1.0))
        self.flusher = lifetime.Flusher((self.providers.meter, self.providers.logger, self.providers.tracer))
        self.gauges = Gauges(self.meter)
        self.dropped = self.meter.create_counter(*names.DROPPED)
        failures, unit, description = names.FAILURES
        self.meter.create_observable_counter(failures, [_observe_failures], unit, description)
        self.run_context = propagate.extract(
            {key.lower(): os.environ[key] for key in ("TRACEPARENT", "TRACESTATE") if key in os.environ}
        )
        """Context of the run's own span, from the launcher; empty if there is none."""
        self.event_attributes = {attr.RUN_ID: identity.run_id, attr.RUN_ATTEMPT: identity.attempt}
        self.recorder = Recorder(
            self.meter, self.logger, self.gauges, self.dropped, self.event_attributes, self.flusher.request
        )
        sampler = ids.sampler_of(self.providers.tracer)
        self.steps = Steps(
            self.tracer, self.meter, self.gauges, self.recorder.defer, sampler, identity, self.run_context
        )
        self.workers = Workers(self.tracer, self.meter, self.recorder.defer, self.run_context, self.flusher.request)
        self.trajectories = Trajectories(
            self.tracer, sampler, self.dropped, identity, settings.trajectories, self.run_context
        )
        self._run_span: Any = None
        self._run_started = self._run_finished = False
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    # ---- the run ------------------------------------------------------------------------------------------------

    def start_run(self) -> None:
        """In the launcher: open the span of the run, whose context every other process gets."""
        if self._run_span is None:
            attributes = {attr.RANK: attr.ALL_RANKS, attr.STAGE: "other", attr.MODEL_TYPE: "none"}
            attributes.update(self.event_attributes)
            self._run_span = self.tracer.start_span(attr.SPAN_RUN, context=self.run_context, attributes=attributes)
            self.run_context = set_span_in_context(self._run_span, self.run_context)

    def run_carrier(self) -> dict[str, str]:
        """The run's context as environment variables (`TRACEPARENT`, ...) for other processes."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, self.run_context)
        return {key.upper(): value for key, value in carrier.items()}

    def run_started(self, project: str, experiment: str, parameters: dict[str, Any]) -> None:
        """Emit `verl.run.started`: names, and the whitelisted part of verl's configuration as body."""
        self._run_started = True
        attributes = {**self.event_attributes, attr.PROJECT_NAME: project, attr.EXPERIMENT_NAME: experiment}
        events.emit(self.logger, attr.EVENT_RUN_STARTED, parameters, attributes, context=self.run_context)
        self.flusher.request()

    def run_finished(self, error: BaseException | None, state: str | None = None) -> None:
        """Emit `verl.run.finished`, once per process: `finished`, or `failed` with the exception."""
        if self._run_finished:
            return
        self._run_finished = True
        body: dict[str, Any] = {}
        if error is not None:
            body = {"exception.type": type(error).__qualname__, "exception.message": describe(error)}
        attributes = {**self.event_attributes, attr.RUN_STATE: state or ("failed" if error is not None else "finished")}
        severity = SeverityNumber.INFO if error is None else SeverityNumber.ERROR
        events.emit(self.logger, attr.EVENT_RUN_FINISHED, body, attributes, context=self.run_context, severity=severity)

    # ---- the end ------------------------------------------------------------------------------------------------

    def flush(self, timeout: float) -> None:
        """Send what is pending, waiting `timeout` seconds at most."""
        if self.recorder.drained(timeout / 2):
            self.flusher.wait(self.flusher.request(), timeout / 2)

    def finish(self, broadcast: Callable[[float], None] | None = None) -> None:
        """At the end of training: let the other processes send what they have, then send our own."""
        if broadcast is not None:
            try:
                self.budget.spend(0.4, broadcast)
            except Exception:
                border.caught("flushing the other processes")
        self.budget.spend(0.6, self.flush)

    def close(self) -> None:
        """End the run's span and send what is pending, within the exit budget."""
        atexit.unregister(self._at_exit)
        error = getattr(sys, "last_value", None)  # the exception that ends the interpreter, if any
        if self._run_started:
            self.run_finished(error)  # trainers without an end that we see, such as SFT
        self._run_finished = True
        if self._run_span is not None:
            fail(self._run_span, error)
            self._run_span.end()
            self._run_span = None
        self.budget.spend(0.7, self.flush)

    def _shutdown(self, timeout: float) -> None:
        # In a thread that is left behind: with a dead endpoint the SDK's shutdown takes its own, longer time.
        thread = threading.Thread(target=self.providers.shut_down_ours, name="verl-otel-shutdown", daemon=True)
        thread.start()
        thread.join(timeout)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has none of the threads that it would wait for
        try:
            self.close()
            self.budget.spend(1.0, self._shutdown)
        except Exception:
            border.caught("the end of the process")

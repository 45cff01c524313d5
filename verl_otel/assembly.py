"""Everything that one process of a run has to do with telemetry, put together.

Imported only when telemetry is made (`verl_otel.telemetry`): it needs the SDK, which a process that never uses verl is
not to pay for, and which raises at import when an `OTEL_*` variable is malformed.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from opentelemetry import propagate
from opentelemetry._logs import LoggerProvider, SeverityNumber
from opentelemetry.metrics import MeterProvider
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, TracerProvider, set_span_in_context

from verl_otel import border, config, events, hardware
from verl_otel.background import Background
from verl_otel.config import BASIC, Settings
from verl_otel.export import announcement, lifetime, otlp, providers
from verl_otel.export.server_targets import ServerTargets
from verl_otel.export.termination import OnTermination, Terminated
from verl_otel.identity import LAUNCHER, OTHER, TRAINER, Identity, in_ray_worker
from verl_otel.metrics.distributions import Distributions
from verl_otel.metrics.instruments import Instruments
from verl_otel.metrics.ranks import Ranks, ReportOfRank
from verl_otel.metrics.recorder import WAIT_FOR_VALUES, Logged, Recorder
from verl_otel.metrics.samples import Samples
from verl_otel.metrics.servers import ServerMetrics
from verl_otel.metrics.step_values import StepValues
from verl_otel.metrics.user import UserMetrics
from verl_otel.metrics.withdrawn import Withdrawn
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.tracing import ids
from verl_otel.tracing.checkpoints import Checkpoints
from verl_otel.tracing.consumed import Consumed
from verl_otel.tracing.errors import fail, failure_of
from verl_otel.tracing.scores import Scores
from verl_otel.tracing.servers import Servers
from verl_otel.tracing.sft import SftLoop
from verl_otel.tracing.steps import Steps
from verl_otel.tracing.trajectories import Trajectories
from verl_otel.tracing.weight_sync import WeightSync
from verl_otel.tracing.workers import Workers
from verl_otel.version import __version__

if TYPE_CHECKING:
    from verl_otel.control.run import RunControl

SCOPE = "verl_otel"

_KILLED = frozenset({"KeyboardInterrupt", Terminated.__qualname__})
"""Exceptions by which somebody ends a run from outside."""

_EXIT_SHARE = {LAUNCHER: 0.3, TRAINER: 0.7, OTHER: 0.7}  # they end one after the other: together they keep the limit


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
        resource = identity.resource()
        scope = InstrumentationScope(SCOPE, __version__)
        distributions, withdrawn = Distributions(resource, scope), Withdrawn(resource, scope)
        self.providers = providers.make(
            resource,
            tracer_provider,
            meter_provider,
            logger_provider,
            extend_metrics=distributions.extend,
            add_withdrawn=withdrawn.extend,
        )
        self.tracer = self.providers.tracer.get_tracer(SCOPE, __version__)
        self.meter = self.providers.meter.get_meter(SCOPE, __version__)
        self.logger = self.providers.logger.get_logger(SCOPE, __version__)
        self.run_context = propagate.extract(
            {key.lower(): os.environ[key] for key in ("TRACEPARENT", "TRACESTATE") if key in os.environ}
        )
        """Context of the run's own span, from the launcher; empty if there is none."""
        self.event_attributes = {attr.RUN_ID: identity.run_id, attr.RUN_ATTEMPT: identity.attempt}
        sampler = ids.sampler_of(self.providers.tracer)
        self._run_span: Any = None
        if identity.launcher_is_silent and sampler is not None and not self.run_context:
            self._share_run(sampler)

        self.budget = lifetime.Budget(settings.exit_timeout * _EXIT_SHARE.get(identity.role, 1.0))
        self.flusher = lifetime.Flusher((self.providers.meter, self.providers.logger, self.providers.tracer))
        ours = self.providers.meter_is_ours
        self.instruments = Instruments(
            self.meter, settings.levels, distributions if ours else None, withdrawn if ours else None
        )
        # With one point at least: where the SDK has none, its readers export nothing, and so no distributions either.
        self.instruments.observe(names.FAILURES, lambda: border.failures() or {"none": 0}, attr.SITE)
        self.instruments.observe(names.EXPORTED, otlp.counts, attr.SIGNAL, attr.OUTCOME, attr.REASON)
        self.background = Background(lambda reason: self.instruments.dropped("metrics", reason))
        self.user = UserMetrics(self.background, self.instruments, self.logger, identity, self.event_attributes)
        self.step_values = StepValues(self.user.take)
        self.recorder = Recorder(
            self.background,
            self.instruments,
            self.logger,
            self.step_values,
            self.event_attributes,
            settings.unknown_keys,
            self.flusher.request,
        )
        self.ranks = Ranks(self.background, self.instruments, self.step_values, settings.rank_detail)
        self.steps = Steps(
            self.tracer, self.instruments, self.background, self.ranks, self.logger, sampler, identity, self.run_context
        )
        self.steps.on_idle_ratio = self._trainer_idle
        self.weight_sync = WeightSync(self.steps, self.tracer, self.instruments)
        self.consumed = Consumed(self.background, self.instruments, sampler, identity, self.steps)
        self.checkpoints = Checkpoints(self.logger, identity, self.event_attributes, self.flusher.request)
        self.user.step = self.steps.number
        self.samples = Samples(self.background, self.instruments, self.step_values, identity, self.steps.number)
        self.sft = SftLoop(self.steps, sampler, identity)
        self.workers = Workers(
            self.tracer,
            self.instruments,
            self.logger,
            self.background,
            self.run_context,
            self.event_attributes,
            settings.rank_detail,
            self.flusher.request,
            self.sft,
        )
        self.trajectories = Trajectories(
            self.tracer,
            sampler,
            self.instruments,
            self.background,
            identity,
            settings.trajectories,
            settings.message_content,
            self.run_context,
        )
        self.servers = Servers(self.tracer, ServerMetrics(self.background, self.instruments, identity))
        self.server_targets = ServerTargets(identity, settings.folder)
        self.scores = Scores(self.tracer, self.instruments, self.background, identity)
        self.control: RunControl | None = None
        """Where a `fit` runs that may be asked to pause or stop; off unless `VERL_OTEL_CONTROL` is set."""
        self._joined = self._run_started = self._run_finished = False
        self._pid = os.getpid()
        self._last = lifetime.Last("verl-otel-shutdown", self.providers.shut_down_ours)
        self._on_termination: OnTermination | None = None
        atexit.register(self._at_exit)

    def start(self) -> None:
        """Begin what goes on by itself: waiting for a signal that ends the process, sampling this node's hardware."""
        # In a worker Ray's own handler raises SystemExit, and exit handlers run.
        if threading.current_thread() is threading.main_thread() and not in_ray_worker():
            self._on_termination = OnTermination(lambda: self.flush(1.0), lambda: self._end(Terminated("by SIGTERM")))
        if self._exports_metrics_of("hardware"):
            hardware.start(self.identity, self.providers.meter)

    def _exports_metrics_of(self, module: str) -> bool:
        return self.settings.levels.wants(module, BASIC) and bool(providers.exporter_names("metrics"))

    # ---- what verl logs, and what other processes ask for -----------------------------------------------------------

    def log(self, data: dict[str, Any], step: Any) -> None:
        """Record one call of verl's `Tracking.log`, in the background. `data` is ours to keep."""
        scope, context = self.steps.last, self.steps.current_context()
        if scope is None:
            self.recorder.submit(Logged(data, step, time.time_ns(), context))
            return

        def on_non_finite(what: dict[str, Any]) -> None:
            if scope.span.is_recording():  # a validation may be between the end of the step and its log
                scope.span.add_event(attr.EVENT_NON_FINITE, what)

        def on_recorded() -> None:
            scope.logged = True

        timed = not self.steps.waits_for_rollout
        self.recorder.submit(Logged(data, step, time.time_ns(), context, timed, on_non_finite, on_recorded))

    def report(self, stage: int) -> ReportOfRank:
        """On a rank: its calls for a stage, and what users have logged here."""
        return self.workers.reported(stage), self.user.take()

    def server_launched(self, replica: Any) -> None:
        """verl's `RolloutReplica` has launched its servers: let Prometheus find their own metrics."""
        if self._exports_metrics_of("server"):
            self.server_targets.launched(replica)

    def take_requests(self, trainer: Any) -> None:
        """verl's `trainer` begins to train: from now on the run may be asked to pause or stop. Never raises."""
        if not os.environ.get(config.CONTROL, "").strip():
            return
        try:
            from verl_otel.control.run import RunControl

            self.control = RunControl(
                trainer,
                self.identity,
                self.steps,
                self.logger,
                self.instruments,
                self.flusher.request,
                config.number(os.environ, config.CONTROL_MAX_PAUSE, 3600.0, 0),
            )
        except Exception:
            border.caught("starting run control")

    def takes_no_requests(self) -> None:
        """What trains here cannot be asked: say so, if somebody relies on it. Never raises."""
        if os.environ.get(config.CONTROL, "").strip():
            border.warn_once(
                "run control", "%s is set, but this trainer takes no requests: see docs/alerting.md", config.CONTROL
            )

    def _trainer_idle(self, step: int | None, ratio: float) -> None:
        self.instruments.set(names.TRAINER_IDLE, names.all_ranks(names.TRAINER_IDLE), ratio)
        self.step_values.add(step, {names.TRAINER_IDLE.name: ratio})

    # ---- the run ------------------------------------------------------------------------------------------------

    def start_run(self) -> None:
        """In the launcher: open the span of the run, whose context every other process gets."""
        if self._run_span is None:
            attributes = {attr.RANK: attr.ALL_RANKS, attr.STAGE: "other", attr.MODEL_TYPE: "none"}
            attributes.update(self.event_attributes)
            self._run_span = self.tracer.start_span(attr.SPAN_RUN, context=self.run_context, attributes=attributes)
            self.run_context = set_span_in_context(self._run_span, self.run_context)

    def _share_run(self, sampler: Sampler) -> None:
        """Under torchrun, whose own process never loads verl: rank 0 has the span of the run, known to all ranks."""
        run = ids.run_context(sampler, self.identity.run_id, self.identity.attempt)
        if self.identity.worker_index == "0":
            with ids.use(run.trace_id, run.span_id):
                self.start_run()
        else:
            self.run_context = set_span_in_context(NonRecordingSpan(run), self.run_context)

    def join(self) -> None:
        """This process takes part in the run: by this the dashboards find both. Counts once."""
        if not self._joined:
            self._joined = True
            labels = {**names.all_ranks(names.PROCESS_START_TIME), attr.RANK: self.identity.worker_index}
            self.instruments.set(names.PROCESS_START_TIME, labels, time.time())

    def announce(self) -> None:
        """Say on standard error which run this is, and where it can be seen: once in a run. Never raises."""
        announcement.announce(self.identity.run_id, self.settings, self.providers)

    def run_carrier(self) -> dict[str, str]:
        """The run's context as environment variables (`TRACEPARENT`, ...) for other processes."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, self.run_context)
        return {key.upper(): value for key, value in carrier.items()}

    def run_started(self, project: str, experiment: str, parameters: dict[str, Any]) -> None:
        """Emit `verl.run.started`: names, and the whitelisted part of verl's configuration as body."""
        self._run_started = True
        attributes = {**self.event_attributes, attr.PROJECT_NAME: project, attr.EXPERIMENT_NAME: experiment}
        body = {**parameters, **self.settings.effective()}
        events.emit(self.logger, attr.EVENT_RUN_STARTED, body, attributes, context=self.run_context)
        self.flusher.request()

    def run_finished(self, error: BaseException | None, state: str | None = None) -> None:
        """Say how the run has ended, once per process: `verl.run.finished` with the exception, `verl.run.end_time`."""
        if not self._run_finished:
            self._finish_run(failure_of(error), state)

    def run_ended(self, failure: dict[str, str]) -> None:
        """The same, where another process says how training has ended; nothing in a process that trains nothing."""
        if self._run_started and not self._run_finished:
            self._finish_run(failure, None)

    def _finish_run(self, failure: dict[str, str], state: str | None) -> None:
        self._run_finished = True
        if self.control is not None:
            self.control.close()
            state = "stopped" if self.control.stopping and not failure else state
        if state is None:
            killed = failure.get("exception.type") in _KILLED
            state = "killed" if killed else "failed" if failure else "finished"
        now = time.time_ns()
        labels = {**names.all_ranks(names.RUN_END_TIME), attr.RUN_STATE: state}
        self.background.defer(self.instruments.set, names.RUN_END_TIME, labels, now / 1e9)
        attributes = {**self.event_attributes, attr.RUN_STATE: state}
        severity = SeverityNumber.ERROR if state == "failed" else SeverityNumber.INFO
        self.recorder.finish()
        self.background.defer(self._emit_finished, failure, attributes, severity, now)

    def _emit_finished(
        self, body: dict[str, Any], attributes: dict[str, Any], severity: SeverityNumber, now: int
    ) -> None:
        def emit() -> None:
            events.emit(
                self.logger,
                attr.EVENT_RUN_FINISHED,
                body,
                attributes,
                context=self.run_context,
                time_ns=now,
                severity=severity,
            )

        self.background.hold_last(WAIT_FOR_VALUES + 0.5, emit)  # the last step's event comes first

    # ---- the end ------------------------------------------------------------------------------------------------

    def flush(self, timeout: float) -> None:
        """Send what is pending, waiting `timeout` seconds at most."""
        end = time.monotonic() + timeout
        self.trajectories.release()
        self.background.drained(timeout / 2)  # if that is not enough, what is there is sent all the same
        self.flusher.wait(self.flusher.request(), 0.6 * max(0.0, end - time.monotonic()))
        outbox = otlp.current()
        if outbox is not None:
            outbox.flush(max(0.0, end - time.monotonic()))

    def finish(self, broadcast: Callable[[float], None] | None = None) -> None:
        """At the end of training: let the other processes send what they have, then send our own."""
        if broadcast is not None:
            try:
                self.budget.spend(0.4, broadcast)
            except Exception:
                border.caught("flushing the other processes")
        self.background.defer(self.server_targets.remove)
        self.budget.spend(0.6, self.flush)
        self.recorder.ended()

    def close(self, error: BaseException | None = None) -> None:
        """End the run's span, with the exception that ends the run, and send what is pending, within the budget."""
        atexit.unregister(self._at_exit)
        if self._on_termination is not None:
            self._on_termination.stop()
        self.sft.close(error)
        # Trainers without an end that we see, such as SFT; and where Ray kills the trainer, since the launcher ends.
        if self._run_started or (self._run_span is not None and type(error).__qualname__ in _KILLED):
            self.run_finished(error)
        self._run_finished = True
        if self._run_span is not None:
            fail(self._run_span, error)
            self._run_span.end()
            self._run_span = None
        if self.identity.role == LAUNCHER and config.ACTIVE not in os.environ:  # else a process of the run started it
            self.background.defer(self.server_targets.remove)
        self.background.release()
        self.budget.spend(0.6, self.flush)
        self.budget.spend(0.3, hardware.stop)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has none of the threads that it would wait for
        error = getattr(sys, "last_value", None)  # the exception that ends the interpreter, if any
        if error is None and self._on_termination is not None and self._on_termination.ray_exits():
            error = Terminated("by SIGTERM")
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        try:
            self.close(error)
            # In a thread that is left behind: with a dead endpoint the SDK's own exporters take their own, longer time.
            self.budget.spend(0.5, self._last.run)
        except Exception:
            border.caught("the end of the process")
        finally:  # also where the user cannot wait, and interrupts
            self.budget.spend(1.0, otlp.close)

"""The events of a verl run, as the bridge gets them."""

from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from verl_otel import events
from verl_otel.bridges.events import RunEvent, RunIdentity

SECOND = 1_000_000_000
START = 1_800_000_000 * SECOND


class VerlRun:
    """The events of a verl run, as the bridge gets them."""

    def __init__(self, run_id, project="gsm8k", experiment="ppo-1"):
        self.run_id, self.project, self.experiment = run_id, project, experiment
        self.resource = {
            "verl.run.id": run_id,
            "verl.project.name": project,
            "verl.experiment.name": experiment,
            "verl.version": "0.9.1",
        }

    @property
    def identity(self):
        return RunIdentity(self.run_id, self.project, self.experiment)

    def event(self, name, at, body, attempt=1, **attributes):
        found = {"verl.run.id": self.run_id, "verl.run.attempt": attempt, **attributes}
        return RunEvent(name, START + int(at * SECOND), found, body, self.resource)

    def started(self, at=0, attempt=1, **parameters):
        return self.event("verl.run.started", at, parameters, attempt)

    def step(self, number, at=None, attempt=1, **metrics):
        at = number if at is None else at
        return self.event("verl.step", at, metrics, attempt, **{"verl.step.number": number})

    def finished(self, at=100, attempt=1, state="finished", **body):
        return self.event("verl.run.finished", at, body, attempt, **{"verl.run.state": state})


def log_request(*run_events):
    """The request that the Collector sends for events: made by the real SDK and encoder."""
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
    from opentelemetry.sdk.resources import Resource

    request = ExportLogsServiceRequest()
    for event in run_events:
        exporter = InMemoryLogRecordExporter()
        provider = LoggerProvider(resource=Resource(dict(event.resource)), shutdown_on_exit=False)
        provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
        events.emit(provider.get_logger("t"), event.name, event.body, event.attributes, time_ns=event.time_ns)
        request.MergeFrom(encode_logs(exporter.get_finished_logs()))
    return request

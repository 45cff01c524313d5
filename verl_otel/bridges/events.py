"""The events of verl runs, out of OTLP requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from verl_otel.semconv import attributes as attr


@dataclass(frozen=True)
class RunIdentity:
    """A verl run and the names of its project and experiment."""

    run_id: str
    project: str
    experiment: str


@dataclass(frozen=True)
class RunEvent:
    """One event of a run, as the bridge needs it. `time_ns` is Unix time."""

    name: str
    time_ns: int
    attributes: Mapping[str, Any]
    body: Mapping[str, Any]
    resource: Mapping[str, Any]

    def identity(self) -> RunIdentity | None:
        """Whose event it is; None if it names no run."""
        return identity_of({**self.resource, **self.attributes})

    def attempt(self) -> int:
        """The attempt of the run in which it happened."""
        return integer(self.attributes.get(attr.RUN_ATTEMPT)) or 1

    def step(self) -> int | None:
        """The step's number."""
        return integer(self.attributes.get(attr.STEP_NUMBER))

    def numbers(self) -> dict[str, float]:
        """What is a number in the body, NaN and infinite ones included."""
        return {key: float(value) for key, value in self.body.items()
                if isinstance(value, int | float) and not isinstance(value, bool)}  # fmt: skip


def identity_of(attributes: Mapping[str, Any]) -> RunIdentity | None:
    """The run that a resource or event belongs to, None if it names none."""
    run_id = attributes.get(attr.RUN_ID)
    if not run_id:
        return None
    project = str(attributes.get(attr.PROJECT_NAME) or "verl")
    return RunIdentity(str(run_id), project, str(attributes.get(attr.EXPERIMENT_NAME) or run_id))


def events_of(request: ExportLogsServiceRequest) -> list[RunEvent]:
    """The log records of a request that are events."""
    events = []
    for resource_logs in request.resource_logs:
        resource = attributes_of(resource_logs.resource.attributes)
        for scope_logs in resource_logs.scope_logs:
            for record in scope_logs.log_records:
                body = _value(record.body)
                time = record.time_unix_nano or record.observed_time_unix_nano
                attributes = attributes_of(record.attributes)
                body = body if isinstance(body, dict) else {}
                events.append(RunEvent(record.event_name, time, attributes, body, resource))
    return events


def integer(value: Any) -> int | None:
    """`value` as a whole number, None if it is none."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def attributes_of(pairs: Any) -> dict[str, Any]:
    """Attributes, or what else OTLP has as pairs of keys and values."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "kvlist_value":
        return attributes_of(value.kvlist_value.values)
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None

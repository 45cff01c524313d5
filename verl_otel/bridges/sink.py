"""What the bridge writes to."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from verl_otel.bridges.events import RunEvent


class TryLater(Exception):
    """The destination cannot take it now; the Collector is to send it again."""


class Refused(Exception):
    """The destination will never take it."""


class Sink(Protocol):
    """A destination. Handling anything twice changes nothing. Threads may call it at the same time."""

    name: str
    """As in messages and answers."""

    def handle(self, events: Sequence[RunEvent]) -> int:
        """Write events; returns how many were not for it (no run named, unknown event, step without a number).

        Raises:
            TryLater, Refused: see there.
        """
        ...


@runtime_checkable
class TraceSink(Sink, Protocol):
    """A destination that takes traces too."""

    def forward(self, request: ExportTraceServiceRequest) -> int:
        """Write the spans of a request; returns how many name no run and were left out.

        Raises:
            TryLater, Refused: see there.
        """
        ...

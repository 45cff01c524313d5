"""An MLflow server as a sink of the bridge."""

import os
from collections.abc import Sequence

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from verl_otel.bridges.events import RunEvent
from verl_otel.bridges.mlflow.runs import Runs
from verl_otel.bridges.mlflow.traces import Traces
from verl_otel.bridges.sink import Refused, TryLater
from verl_otel.redaction import shown


class MlflowSink:
    """The MLflow server at `tracking_uri`, with an SQL store."""

    name = "MLflow"

    def __init__(self, tracking_uri: str) -> None:
        # One quick retry here; the Collector's queue is the place for patience.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        self._runs = Runs(MlflowClient(tracking_uri))
        self._traces = Traces(self._runs, tracking_uri)

    def handle(self, events: Sequence[RunEvent]) -> int:
        try:
            return self._runs.handle(events)
        except MlflowException as error:
            raise _failure(error) from error

    def forward(self, request: ExportTraceServiceRequest) -> int:
        try:
            return self._traces.forward(request)
        except MlflowException as error:
            raise _failure(error) from error


def _failure(error: MlflowException) -> TryLater | Refused:
    # Without an answer, or with a fault of the server, it may go better later; otherwise the data is at fault.
    message = str(error)
    later = error.get_http_status_code() >= 500 or "failed with" in message or "Max retries" in message
    return (TryLater if later else Refused)(f"MLflow: {shown(message)}")

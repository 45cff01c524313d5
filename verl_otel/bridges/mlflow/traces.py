"""Spans -> MLflow's OTLP endpoint, each run's with the headers of its own experiment and run.

MLflow links a trace to the run when the trace's root span is in the request, and not at all if a request has more
than 100 root spans; so requests are made per run and kept small.
"""

from collections.abc import Iterator
from typing import Any

import requests
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from verl_otel.bridges.events import RunIdentity, attributes_of, identity_of
from verl_otel.bridges.mlflow.runs import Runs
from verl_otel.bridges.sink import Refused, TryLater

MAX_ROOTS = 50
TIMEOUT = 30.0


class Traces:
    """Forwards spans to the MLflow server at `tracking_uri`."""

    def __init__(self, runs: Runs, tracking_uri: str) -> None:
        self._runs = runs
        self._url = tracking_uri.rstrip("/") + "/v1/traces"
        self._session = requests.Session()

    def forward(self, request: ExportTraceServiceRequest) -> int:
        """Forward the spans of all runs in a request; returns how many spans name no run and were left out.

        Raises:
            TryLater, Refused: see there.
        """
        groups: dict[RunIdentity, list[Any]] = {}
        left_out = 0
        for resource_spans in request.resource_spans:
            identity = identity_of(attributes_of(resource_spans.resource.attributes))
            if identity is None:
                left_out += sum(len(scope.spans) for scope in resource_spans.scope_spans)
            else:
                groups.setdefault(identity, []).append(resource_spans)
        for identity, group in groups.items():
            run = self._runs.resolve(identity)
            for part in _parts(group):
                headers = {
                    "Content-Type": "application/x-protobuf",
                    "x-mlflow-experiment-id": run.experiment_id,
                    "x-mlflow-run-id": run.run_id,
                }
                self._post(part.SerializeToString(), headers)
        return left_out

    def _post(self, body: bytes, headers: dict[str, str]) -> None:
        try:
            response = self._session.post(self._url, data=body, headers=headers, timeout=TIMEOUT)
        except requests.RequestException as error:
            raise TryLater(f"MLflow cannot be reached: {type(error).__name__}") from error
        if response.status_code < 300:
            return
        if response.status_code == 404:
            self._runs.forget()
        if response.status_code == 501:
            raise Refused("MLflow answered 501: its store takes no traces; it needs an SQL store (--backend-store-uri)")
        if response.status_code in (404, 408, 429) or response.status_code >= 500:
            raise TryLater(f"MLflow answered {response.status_code}")
        raise Refused(f"MLflow answered {response.status_code}: {response.text[:200]}")


def _parts(group: list[Any]) -> Iterator[ExportTraceServiceRequest]:
    """Requests with at most MAX_ROOTS root spans each."""
    part, roots = ExportTraceServiceRequest(), 0
    for resource_spans in group:
        roots += sum(not span.parent_span_id for scope in resource_spans.scope_spans for span in scope.spans)
        part.resource_spans.append(resource_spans)
        if roots > MAX_ROOTS:
            yield from _split(part)
            part, roots = ExportTraceServiceRequest(), 0
    if part.resource_spans:
        yield part


def _split(request: ExportTraceServiceRequest) -> Iterator[ExportTraceServiceRequest]:
    part, roots = ExportTraceServiceRequest(), 0
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            target = None
            for span in scope_spans.spans:
                if target is None:
                    holder = part.resource_spans.add(resource=resource_spans.resource)
                    target = holder.scope_spans.add(scope=scope_spans.scope)
                target.spans.append(span)
                roots += not span.parent_span_id
                if roots >= MAX_ROOTS:
                    yield part
                    part, roots, target = ExportTraceServiceRequest(), 0, None
    if part.resource_spans:
        yield part

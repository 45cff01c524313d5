"""The bridge's OTLP/HTTP receiver: `/v1/logs` and `/v1/traces`, protobuf (logs also JSON), gzip.

Answers so that the Collector does the right thing: 503 when MLflow is away (it keeps the data and tries again), 400,
401, 413, 415 for what can never be taken, and a partial success that says how much was not for MLflow.
"""

import logging
import os
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from verl_otel.bridges.mlflow.runs import RunEvent, Runs
from verl_otel.bridges.mlflow.traces import Refused, Traces, TryLater
from verl_otel.webserver import BadRequest, is_authorized, read_body, unauthorized

logger = logging.getLogger(__name__)

MAX_BODY = 64 << 20
"""Bytes of a request, before and after decompression."""

_PROTOBUF, _JSON = "application/x-protobuf", "application/json"


def app(tracking_uri: str, token: str = "") -> Starlette:
    """The ASGI application for the MLflow server at `tracking_uri`.

    Args:
        token: what requests must bring as `Authorization: Bearer <token>`; empty if they need not. `/healthz` is open.
    """
    # One quick retry here; the Collector's queue is the place for patience.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    runs = Runs(MlflowClient(tracking_uri))
    traces = Traces(runs, tracking_uri)

    async def take_logs(request: Request) -> Response:
        if not is_authorized(request, token):
            return unauthorized()
        return await _take(request, ExportLogsServiceRequest(), ExportLogsServiceResponse(), _log_handler(runs))

    async def take_traces(request: Request) -> Response:
        if not is_authorized(request, token):
            return unauthorized()
        return await _take(request, ExportTraceServiceRequest(), ExportTraceServiceResponse(), _trace_handler(traces))

    async def health(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    return Starlette(
        routes=[
            Route("/v1/logs", take_logs, methods=["POST"]),
            Route("/v1/traces", take_traces, methods=["POST"]),
            Route("/healthz", health),
        ]
    )


def _log_handler(runs: Runs) -> Any:
    def handle(request: Any, response: Any) -> None:
        ignored = runs.handle(events_of(request))
        if ignored:
            response.partial_success.rejected_log_records = ignored
            response.partial_success.error_message = (
                "log records without verl.run.id or of other names are not for MLflow"
            )

    return handle


def _trace_handler(traces: Traces) -> Any:
    def handle(request: Any, response: Any) -> None:
        left_out = traces.forward(request)
        if left_out:
            response.partial_success.rejected_spans = left_out
            response.partial_success.error_message = "spans whose resource has no verl.run.id are not for MLflow"

    return handle


def events_of(request: ExportLogsServiceRequest) -> list[RunEvent]:
    """The log records of a request that are events."""
    events = []
    for resource_logs in request.resource_logs:
        resource = _mapping(resource_logs.resource.attributes)
        for scope_logs in resource_logs.scope_logs:
            for record in scope_logs.log_records:
                body = _value(record.body)
                time = record.time_unix_nano or record.observed_time_unix_nano
                attributes = _mapping(record.attributes)
                body = body if isinstance(body, dict) else {}
                events.append(RunEvent(record.event_name, time, attributes, body, resource))
    return events


async def _take(request: Request, message: Message, response: Message, handle: Any) -> Response:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        _decode(await read_body(request, MAX_BODY), kind, message)
        await run_in_threadpool(handle, message, response)
    except BadRequest as error:
        return PlainTextResponse(f"{error}\n", error.status)
    except TryLater as error:
        logger.warning("%s; the Collector will send it again", error)
        return PlainTextResponse(f"{error}\n", 503, {"Retry-After": "2"})
    except Refused as error:
        logger.error("%s; this part is lost", error)
        return PlainTextResponse(f"{error}\n", 400)
    except MlflowException as error:
        # Without an answer, or with a fault of the server, it may go better later; otherwise the data is at fault.
        later = error.get_http_status_code() >= 500 or "failed with" in str(error) or "Max retries" in str(error)
        logger.warning("MLflow: %s", str(error)[:500])
        return PlainTextResponse("MLflow did not take it\n", 503 if later else 400)
    except OSError as error:  # MLflow or the network
        logger.warning("MLflow cannot be reached: %s; the Collector will send it again", type(error).__name__)
        return PlainTextResponse("MLflow cannot be reached\n", 503)
    except Exception:
        # The same request would fail again, for ever, and hold up what is behind it in the Collector's queue.
        logger.exception("a request could not be handled; it is lost")
        return PlainTextResponse("this request cannot be handled\n", 400)
    content = json_format.MessageToJson(response).encode() if kind == _JSON else response.SerializeToString()
    return Response(content, media_type=kind)


def _decode(body: bytes, kind: str, message: Message) -> None:
    try:
        if kind == _PROTOBUF:
            message.ParseFromString(body)
        elif kind == _JSON and isinstance(message, ExportLogsServiceRequest):
            if not body.lstrip().startswith(b"{"):
                raise BadRequest(400, "the body is not a JSON object")
            json_format.Parse(body, message, ignore_unknown_fields=True)
        else:
            raise BadRequest(415, f"content-type {kind or '(none)'} is not supported; use {_PROTOBUF}")
    except BadRequest:
        raise
    except Exception as error:  # not only DecodeError and ParseError: an infinite time is an OverflowError, for one
        raise BadRequest(400, f"the body cannot be decoded: {str(error)[:500]}") from error


def _mapping(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "kvlist_value":
        return _mapping(value.kvlist_value.values)
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None

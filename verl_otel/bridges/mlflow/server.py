"""The bridge's OTLP/HTTP receiver: `/v1/logs` and `/v1/traces`, protobuf (logs also JSON), gzip.

Answers so that the Collector does the right thing: 503 when MLflow is away (it keeps the data and tries again), 400,
401, 413, 415 for what can never be taken, and a partial success that says how much was not for MLflow.
"""

import hmac
import logging
import os
import zlib
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

logger = logging.getLogger(__name__)

MAX_BODY = 64 << 20
"""Bytes of a request, before and after decompression."""

_PROTOBUF, _JSON = "application/x-protobuf", "application/json"


class BadRequest(Exception):
    """A request that cannot be taken."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


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
        if not _authorized(request, token):
            return _unauthorized()
        return await _take(request, ExportLogsServiceRequest(), ExportLogsServiceResponse(), _log_handler(runs))

    async def take_traces(request: Request) -> Response:
        if not _authorized(request, token):
            return _unauthorized()
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


def _authorized(request: Request, token: str) -> bool:
    if not token:
        return True
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # In constant time: how long it takes says nothing of how much of it was right.
    return hmac.compare_digest(given.strip().encode("latin-1"), token.encode()) and scheme.lower() == "bearer"


def _unauthorized() -> Response:
    """Given before the body is read."""
    return PlainTextResponse("a bearer token is needed here\n", 401, {"WWW-Authenticate": "Bearer"})


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
        _decode(await _body(request), kind, message)
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


async def _body(request: Request) -> bytes:
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity", "gzip"):
        raise BadRequest(415, f"content-encoding {encoding} is not supported; use gzip")
    gzip = _Gunzip() if encoding == "gzip" else None
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk if gzip is None else gzip.feed(chunk, MAX_BODY + 1 - len(body))
            if len(body) > MAX_BODY:
                raise BadRequest(413, f"the request is larger than {MAX_BODY} bytes")
        if gzip is not None:
            gzip.finish()
    except zlib.error as error:
        raise BadRequest(400, f"the body is not gzip: {error}") from error
    return bytes(body)


class _Gunzip:
    """Decompresses gzip, of one or more members, a chunk at a time and never more than asked for."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=31)

    def feed(self, chunk: bytes, most: int) -> bytes:
        """At most `most` decompressed bytes of what came so far (more means that the request is too large)."""
        out = bytearray()
        while chunk and len(out) < most:
            if self._member.eof:
                self._member = zlib.decompressobj(wbits=31)
            out += self._member.decompress(chunk, most - len(out))
            chunk = self._member.unused_data
        return bytes(out)

    def finish(self) -> None:
        """Raise `zlib.error` if the body ended in the middle."""
        if not self._member.eof:
            raise zlib.error("it ends in the middle")


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

"""The bridge's OTLP/HTTP receiver: logs and traces for each sink, protobuf (logs also JSON), gzip.

Answers so that the Collector does the right thing: 503 when the sink is away (it keeps the data and tries again), 400,
401, 413, 415 for what can never be taken, and a partial success that says how much was not for the sink.
"""

import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from google.protobuf import json_format
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from verl_otel.bridges.events import events_of
from verl_otel.bridges.sink import Refused, Sink, TraceSink, TryLater
from verl_otel.redaction import traceback_of
from verl_otel.webserver import BadRequest, is_authorized, read_body, unauthorized

logger = logging.getLogger(__name__)

MAX_BODY = 64 << 20
"""Bytes of a request, before and after decompression."""

SLOTS = 8
"""Requests to one sink at a time: one that hangs must not take the threads of the others."""

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

_PROTOBUF, _JSON = "application/x-protobuf", "application/json"


def app(sinks: Mapping[str, Sink], token: str = "") -> Starlette:
    """The ASGI application: `/<name>/v1/logs`, and `/<name>/v1/traces` of a sink that takes traces.

    Each sink has its own address, for its own exporter and queue in the Collector: one that is away holds up no other.

    Args:
        sinks: by the name in the address.
        token: what requests must bring as `Authorization: Bearer <token>`; empty if they need not. `/healthz` is open.
    """

    async def health(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    routes = [Route("/healthz", health)]
    for name, sink in sinks.items():
        slots = threading.BoundedSemaphore(SLOTS)
        routes.append(Route(f"/{name}/v1/logs", _logs(sink, token, slots), methods=["POST"]))
        if isinstance(sink, TraceSink):
            routes.append(Route(f"/{name}/v1/traces", _traces(sink, token, slots), methods=["POST"]))
    routes.append(Route("/{name}/v1/{signal}", _nobody(sinks), methods=["POST"]))
    return Starlette(routes=routes)


def _nobody(sinks: Mapping[str, Sink]) -> Endpoint:
    """A sink that the bridge was not started with: the Collector keeps the data until it is."""

    async def refuse(request: Request) -> Response:
        name = request.path_params["name"]
        if name in sinks:
            return PlainTextResponse("not for this sink\n", 404)
        logger.warning("the Collector sends data for %.20r: start the bridge with that too, or send it nothing", name)
        return PlainTextResponse(f"this bridge writes to {', '.join(sinks)} only\n", 503, {"Retry-After": "30"})

    return refuse


def _logs(sink: Sink, token: str, slots: threading.BoundedSemaphore) -> Endpoint:
    def handle(request: Any, response: Any) -> None:
        ignored = sink.handle(events_of(request))
        if ignored:
            response.partial_success.rejected_log_records = ignored
            response.partial_success.error_message = (
                f"log records without verl.run.id or of other names are not for {sink.name}"
            )

    async def take(request: Request) -> Response:
        if not is_authorized(request, token):
            return unauthorized()
        return await _take(request, ExportLogsServiceRequest(), ExportLogsServiceResponse(), handle, sink.name, slots)

    return take


def _traces(sink: TraceSink, token: str, slots: threading.BoundedSemaphore) -> Endpoint:
    def handle(request: Any, response: Any) -> None:
        left_out = sink.forward(request)
        if left_out:
            response.partial_success.rejected_spans = left_out
            response.partial_success.error_message = f"spans whose resource has no verl.run.id are not for {sink.name}"

    async def take(request: Request) -> Response:
        if not is_authorized(request, token):
            return unauthorized()
        return await _take(request, ExportTraceServiceRequest(), ExportTraceServiceResponse(), handle, sink.name, slots)

    return take


async def _take(
    request: Request,
    message: Message,
    response: Message,
    handle: Callable[[Any, Any], None],
    name: str,
    slots: threading.BoundedSemaphore,
) -> Response:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        _decode(await read_body(request, MAX_BODY), kind, message)
        if not slots.acquire(blocking=False):
            raise TryLater(f"{name} has not answered {SLOTS} requests yet")
        try:
            await run_in_threadpool(handle, message, response)
        finally:
            slots.release()
    except BadRequest as error:
        return PlainTextResponse(f"{error}\n", error.status)
    except TryLater as error:
        logger.warning("%s; the Collector will send it again", error)
        return PlainTextResponse(f"{error}\n", 503, {"Retry-After": "2"})
    except Refused as error:
        logger.error("%s; this part is lost", error)
        return PlainTextResponse(f"{error}\n", 400)
    except OSError as error:  # the destination or the network
        logger.warning("%s cannot be reached: %s; the Collector will send it again", name, type(error).__name__)
        return PlainTextResponse(f"{name} cannot be reached\n", 503)
    except Exception as error:
        # The same request would fail again, for ever, and hold up what is behind it in the Collector's queue.
        logger.error("a request could not be handled; it is lost\n%s", traceback_of(error))
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

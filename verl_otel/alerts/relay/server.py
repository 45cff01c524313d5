"""The relay's HTTP server: `POST /alerts` for Alertmanager's webhook, `/healthz`, `/metrics`.

The answer does not wait for any robot: what was taken is in a queue. 400, 401, 413, 415 for what can never be taken.
"""

import contextlib
import logging
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from verl_otel.alerts.relay.actions import Actions
from verl_otel.alerts.relay.delivery import Delivery
from verl_otel.alerts.relay.metrics import Metrics
from verl_otel.alerts.relay.notification import Malformed, parse
from verl_otel.alerts.relay.sent import Sent
from verl_otel.alerts.relay.settings import Settings
from verl_otel.redaction import traceback_of
from verl_otel.webserver import BadRequest, is_authorized, read_body, unauthorized

logger = logging.getLogger(__name__)

MAX_BODY = 8 << 20
"""Bytes of a request, before and after decompression."""

STOP_SECONDS = 10.0
"""Seconds that the end of the relay may take to send what waits."""


def app(settings: Settings) -> Starlette:
    """The ASGI application; its robots' threads run as long as it does."""
    metrics, sent = Metrics(), Sent(settings.state)
    deliveries = [Delivery(route, sent, metrics) for route in settings.robots]
    actions = None if settings.channel is None else Actions(settings.actions, settings.channel, sent, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        for part in (*deliveries, *([actions] if actions else [])):
            part.start()
        yield
        for delivery in deliveries:
            delivery.stop(STOP_SECONDS)
        for delivery in deliveries:
            await run_in_threadpool(delivery.join)
        if actions is not None:
            await run_in_threadpool(actions.stop, STOP_SECONDS)

    async def take(request: Request) -> Response:
        if not is_authorized(request, settings.token):
            return unauthorized()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return PlainTextResponse(f"content-type {kind or '(none)'} is not supported; use application/json\n", 415)
        try:
            notification = parse(await read_body(request, MAX_BODY))
        except (BadRequest, Malformed) as error:
            return PlainTextResponse(f"{error}\n", error.status if isinstance(error, BadRequest) else 400)
        if actions is not None:
            actions.offer(notification)
        for delivery in deliveries:
            delivery.offer(notification)
        return PlainTextResponse("ok\n")

    async def take_and_count(request: Request) -> Response:
        try:
            response = await take(request)
        except Exception as error:
            # Alertmanager would send the same again for ever.
            logger.error("a notification could not be handled; it is lost\n%s", traceback_of(error))
            response = PlainTextResponse("this notification cannot be handled\n", 400)
        metrics.request(response.status_code)
        return response

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def own_metrics(_: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[
            Route("/alerts", take_and_count, methods=["POST"]),
            Route("/healthz", health),
            Route("/metrics", own_metrics),
        ],
        lifespan=lifespan,
    )

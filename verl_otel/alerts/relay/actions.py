"""What an alert asks of the run that it is about. Only where the configuration has `actions`."""

import logging
import queue
import threading

from verl_otel.alerts.relay.message import plain
from verl_otel.alerts.relay.metrics import Metrics
from verl_otel.alerts.relay.notification import FIRING, Alert, Notification
from verl_otel.alerts.relay.sent import Sent
from verl_otel.alerts.relay.settings import ActionRoute
from verl_otel.control.requests import Channel, NoControl

logger = logging.getLogger(__name__)

MAX_WAITING = 1000


class Actions:
    """Leaves requests for runs, on a thread of its own: the folder may be on a file system that hangs."""

    def __init__(self, routes: tuple[ActionRoute, ...], channel: Channel, sent: Sent, metrics: Metrics) -> None:
        self._routes = routes
        self._channel = channel
        self._sent = sent
        self._metrics = metrics
        self._waiting: queue.Queue[tuple[str, Alert] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="actions", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, notification: Notification) -> None:
        """Note what the alerts of a notification ask: once for each time that one fires."""
        for alert in notification.alerts:
            route = next((route for route in self._routes if route.match.fits(alert)), None)
            if route is None or alert.status != FIRING or not self._sent.begin(_key(route.action, alert)):
                continue
            try:
                self._waiting.put_nowait((route.action, alert))
            except queue.Full:
                self._metrics.action(route.action, "dropped")
                self._sent.forget([_key(route.action, alert)])

    def stop(self, seconds: float) -> None:
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _run(self) -> None:
        while (found := self._waiting.get()) is not None:
            action, alert = found
            run_id = alert.labels.get("verl_run_id", "")
            try:
                if not run_id:
                    raise NoControl("the alert has no label verl_run_id")
                reason = alert.annotations.get("summary", "") or alert.name
                self._channel.ask(run_id, action, f"alert {alert.name}", reason)
            except Exception as error:
                logger.error(
                    "alert %s cannot ask for %s: %s", plain(alert.name), action,
                    plain(str(error)) if isinstance(error, NoControl) else type(error).__name__,
                )  # fmt: skip
                self._metrics.action(action, "failed")
                self._sent.forget([_key(action, alert)])
            else:
                logger.warning("alert %s asks run %s: %s", plain(alert.name), plain(run_id), action)
                self._metrics.action(action, "asked")
                self._sent.done([_key(action, alert)])


def _key(action: str, alert: Alert) -> str:
    return f"action {action} {alert.key}"

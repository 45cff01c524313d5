"""A queue and a thread for each robot: a robot that is slow or away delays neither the others nor Alertmanager.

What has to wait, for the robot's rate or for its return, is merged into one message as far as that has room.
"""

import json
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import requests

from verl_otel.alerts.relay.message import Message, message_of
from verl_otel.alerts.relay.metrics import Metrics
from verl_otel.alerts.relay.notification import Alert, Notification
from verl_otel.alerts.relay.robots import DELIVERED, LATER, REFUSED, TOO_MANY, Answer
from verl_otel.alerts.relay.sent import Sent
from verl_otel.alerts.relay.settings import RobotRoute

logger = logging.getLogger(__name__)

MAX_WAITING = 5000
"""Alerts that may wait for one robot; what comes then is dropped and counted."""

GIVE_UP = 900.0
"""Seconds after which a message that cannot be sent is dropped; Alertmanager repeats what still fires."""

TIMEOUT = 10.0
"""Seconds that a robot may take for an answer."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between the tries of a message: the first is doubled up to the longest, which is that of `too many`, too."""

MAX_ANSWER = 65_536


class Post(Protocol):
    """Sends JSON to a URL and gives status and body; raises `requests.RequestException`."""

    def __call__(self, url: str, body: dict[str, Any]) -> tuple[int, bytes]: ...


def post(url: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """`Post` by requests. A redirect is not followed: it would carry the message to somewhere else."""
    content = json.dumps(body, ensure_ascii=False).encode(errors="replace")  # escaped, it could be twice as long
    headers = {"Content-Type": "application/json; charset=utf-8"}
    with requests.post(
        url, data=content, headers=headers, timeout=TIMEOUT, allow_redirects=False, stream=True
    ) as response:
        return response.status_code, response.raw.read(MAX_ANSWER, decode_content=True)


class Delivery:
    """The way to one robot. `offer` never blocks.

    Args:
        send: how messages are posted.
        pause: seconds before the second try of a message.
    """

    def __init__(
        self, route: RobotRoute, sent: Sent, metrics: Metrics, send: Post = post, pause: float = FIRST_PAUSE
    ) -> None:
        self._route = route
        self._sent = sent
        self._metrics = metrics
        self._send = send
        self._pause = pause
        self._waiting: deque[tuple[list[Alert], int]] = deque()
        self._size = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._stop_at = 0.0
        self._times: list[deque[float]] = [deque(maxlen=count) for count, _ in route.robot.rates]
        self._thread = threading.Thread(target=self._run, name=f"robot-{route.name}", daemon=True)

    @property
    def name(self) -> str:
        return self._route.name

    def start(self) -> None:
        self._thread.start()

    def offer(self, notification: Notification) -> None:
        """Take what of a notification is for this robot and new."""
        mine = [alert for alert in notification.alerts if self._route.match.fits(alert)]
        new = [alert for alert in mine if self._sent.begin(self._key(alert))]
        self._metrics.alerts(self.name, "repeated", len(mine) - len(new))
        if not new:
            return
        with self._changed:
            full = self._size + len(new) > MAX_WAITING or self._stopping
            if not full:
                self._waiting.append((new, notification.left_out))
                self._size += len(new)
                self._changed.notify()
        if full:
            self._drop(new, "queue_full")

    def stop(self, seconds: float) -> None:
        """Send what waits, for `seconds` at most; what is left is dropped and counted. Returns at once."""
        with self._changed:
            self._stopping = True
            self._stop_at = time.monotonic() + seconds
            self._changed.notify()

    def join(self) -> None:
        """Wait for the end that `stop` has set."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, self._stop_at - time.monotonic()) + TIMEOUT)

    def try_once(self, message: Message) -> Answer:
        """Send one message, now."""
        url, body = self._route.robot.request(message, time.time())
        try:
            return self._route.robot.answer(*self._send(url, body))
        except requests.RequestException as error:
            return Answer(LATER, type(error).__name__)  # not the text, which has the URL in it
        except Exception as error:
            return Answer(REFUSED, type(error).__name__)

    # ---- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    return
            if not self._sleep(self._until_allowed()):
                break
            self._deliver(*self._take())
        while self._waiting:
            self._drop(self._take()[0], "stopped")

    def _take(self) -> tuple[list[Alert], int]:
        """What waits: the first notification, and those behind it that go into the same message."""
        with self._changed:
            alerts, left_out = self._waiting.popleft()
            while self._waiting:
                more, left_out_more = self._waiting[0]
                together = [*alerts, *more]
                if not self._route.robot.fits(message_of(together, left_out + left_out_more)):
                    break
                alerts, left_out = together, left_out + left_out_more
                self._waiting.popleft()
                self._metrics.messages(self.name, "merged")
            self._size -= len(alerts)
            return alerts, left_out

    def _deliver(self, alerts: list[Alert], left_out: int) -> None:
        message = message_of(alerts, left_out)
        give_up, pause = time.monotonic() + GIVE_UP, self._pause
        while True:
            for times in self._times:
                times.append(time.monotonic())
            answer = self.try_once(message)
            if answer.outcome == DELIVERED:
                self._metrics.messages(self.name, "delivered")
                self._metrics.alerts(self.name, "delivered", len(alerts))
                self._sent.done([self._key(alert) for alert in alerts])
                return
            if answer.outcome == REFUSED:
                logger.error("robot %s refuses a message (%s); it is lost", self.name, answer.why)
                self._drop(alerts, "refused")
                return
            self._metrics.messages(self.name, "retried")
            wait = LONGEST_PAUSE if answer.outcome == TOO_MANY else pause * random.uniform(0.8, 1.2)
            pause = min(LONGEST_PAUSE, 2 * pause)
            logger.warning("robot %s: %s; trying again in %.0f s", self.name, answer.why, wait)
            if time.monotonic() + wait > give_up or not self._sleep(max(wait, self._until_allowed())):
                self._drop(alerts, "stopped" if self._stopping else "gave_up")
                return

    def _until_allowed(self) -> float:
        """Seconds until the robot's rate allows one more message."""
        now = time.monotonic()
        rates = zip(self._route.robot.rates, self._times, strict=True)
        waits = [times[0] + seconds - now for (count, seconds), times in rates if len(times) == count]
        return max([0.0, *waits])

    def _sleep(self, seconds: float) -> bool:
        """Wait; False if the relay stops before."""
        end = time.monotonic() + seconds
        with self._changed:
            while (left := end - time.monotonic()) > 0:
                if self._stopping:
                    if end > self._stop_at:
                        return False
                    self._changed.wait(left)
                else:
                    self._changed.wait_for(lambda: self._stopping, left)
        return not self._stopping or time.monotonic() < self._stop_at

    def _drop(self, alerts: Sequence[Alert], reason: str) -> None:
        self._metrics.alerts(self.name, f"dropped_{reason}", len(alerts))
        self._sent.forget([self._key(alert) for alert in alerts])

    def _key(self, alert: Alert) -> str:
        return f"{self.name} {alert.key}"

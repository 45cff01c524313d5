"""What Alertmanager posts to a webhook: version 4 of its JSON (prometheus.io/docs/alerting/latest/configuration)."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_ALERTS = 10_000
"""Alerts of one notification; more are left out, and counted in the message."""

FIRING, RESOLVED = "firing", "resolved"


class Malformed(ValueError):
    """Not a notification of Alertmanager."""


@dataclass(frozen=True)
class Alert:
    """One alert of a notification. Times are as Alertmanager writes them (RFC 3339)."""

    status: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_at: str
    ends_at: str
    fingerprint: str

    @property
    def name(self) -> str:
        return self.labels.get("alertname", "alert")

    @property
    def key(self) -> str:
        """The same for the same news: one alert that began then, and is firing or resolved."""
        return f"{self.fingerprint} {self.starts_at} {self.status}"


@dataclass(frozen=True)
class Notification:
    """The alerts of one group; `left_out` is how many more there are, which Alertmanager or we have cut."""

    alerts: tuple[Alert, ...]
    left_out: int = 0


def parse(body: bytes) -> Notification:
    """Read a notification; `Malformed` says what is wrong with it."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the body is not JSON: {type(error).__name__}") from error
    if not isinstance(data, dict) or not isinstance(data.get("alerts"), list):
        raise Malformed("the body is not a notification of Alertmanager: it has no list `alerts`")
    if str(data.get("version", "4")) != "4":
        raise Malformed(f"version {str(data['version'])[:20]} of Alertmanager's webhook is not known; 4 is")
    alerts = data["alerts"]
    truncated = data.get("truncatedAlerts")
    left_out = truncated if isinstance(truncated, int) and truncated > 0 else 0
    return Notification(tuple(map(_alert, alerts[:MAX_ALERTS])), left_out + max(0, len(alerts) - MAX_ALERTS))


def _alert(data: Any) -> Alert:
    if not isinstance(data, dict) or data.get("status") not in (FIRING, RESOLVED):
        raise Malformed("an alert has no status `firing` or `resolved`")
    labels = _texts(data.get("labels"), "labels")
    fingerprint = data.get("fingerprint")
    if not isinstance(fingerprint, str) or not fingerprint:
        fingerprint = hashlib.sha256(json.dumps(sorted(labels.items())).encode()).hexdigest()[:16]
    return Alert(
        data["status"],
        labels,
        _texts(data.get("annotations"), "annotations"),
        str(data.get("startsAt", ""))[:40],
        str(data.get("endsAt", ""))[:40],
        fingerprint[:64],
    )


def _texts(data: Any, what: str) -> dict[str, str]:
    if not isinstance(data, dict):
        raise Malformed(f"the {what} of an alert are not a map")
    return {str(key): value if isinstance(value, str) else json.dumps(value) for key, value in data.items()}

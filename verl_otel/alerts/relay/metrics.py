"""The relay's own metrics, at `/metrics`."""

from prometheus_client import CollectorRegistry, Counter, generate_latest


class Metrics:
    """Counters of one relay."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._alerts = Counter(
            "verl_otel_relay_alerts",
            "Alerts for a robot: delivered, repeated (told before), dropped_<why>",
            ["robot", "outcome"],
            registry=self._registry,
        )
        self._messages = Counter(
            "verl_otel_relay_messages",
            "Messages to a robot: delivered, retried, merged (into the one before)",
            ["robot", "outcome"],
            registry=self._registry,
        )
        self._requests = Counter(
            "verl_otel_relay_requests", "Requests to the relay by the status of the answer", ["status"],
            registry=self._registry,
        )  # fmt: skip
        self._actions = Counter(
            "verl_otel_relay_actions", "What runs were asked, and whether that could be left for them",
            ["action", "outcome"], registry=self._registry,
        )  # fmt: skip

    def alerts(self, robot: str, outcome: str, count: int) -> None:
        self._alerts.labels(robot, outcome).inc(count)

    def messages(self, robot: str, outcome: str) -> None:
        self._messages.labels(robot, outcome).inc()

    def request(self, status: int) -> None:
        self._requests.labels(str(status)).inc()

    def action(self, action: str, outcome: str) -> None:
        self._actions.labels(action, outcome).inc()

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)
